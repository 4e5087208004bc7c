"""Dialogues in the policy's chat template: prompts, the text behind an assistant's turn, and calls of tools.

Sampled tokens stay as they were drawn: only the text that the template writes behind a turn is encoded and appended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planetary.core.errors import UserError
from planetary.data.chat.renderer import ChatRenderer
from planetary.net.loop_thread import LoopThread
from planetary.runs.serve.http.tools.tool_format import CallPiece, CallReader, format_of
from planetary.runs.serve.http.tools.tool_use import shown_tool

Message = Mapping[str, Any]
"""A message of a chat, as templates see it."""
_MARK = "said-by-the-policy"
"""Stand-in for a turn's text: the template's own text follows it."""
_STOP_S = 10.0


class PolicyChats:
    """Renders and reads dialogues of one policy. Methods block; a template runs in a process with limits."""

    def __init__(self, template: str, special: Mapping[str, str], ends: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            template: in Jinja.
            special: names such as `eos_token` that it sees.
            ends: texts of the tokens that end a completion, one at least.
        """
        self._template, self._special, self._ends = template, dict(special), tuple(ends)
        self._format = format_of(template)()
        self._renderer = ChatRenderer(processes=1)
        self._loop: LoopThread | None = None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return the text that asks for the next turn of the assistant. Raises `UserError`, as `ChatRenderer.text`."""
        return self._text(messages, tools, asks=True)

    def following(self, messages: Sequence[Message], added: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return the text from the end of the assistant's last turn to the next prompt, the ending token included.

        Args:
            messages: the last is the assistant's.
            added: messages after it.
            tools: of the dialogue.

        Raises:
            UserError: as `prompt`; or the template leaves the turn out, or does not end it.
        """
        *before, turn = messages
        calls = turn.get("tool_calls")
        marked: dict[str, Any] = {"role": "assistant", "content": "" if calls else _MARK}
        if calls:
            last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {_MARK: _MARK}}}
            marked["tool_calls"] = [*calls[:-1], last]
        _, mark, rest = self._text([*before, marked, *added], tools, asks=True).rpartition(_MARK)
        if not mark:
            raise UserError("its chat template leaves out an assistant's turn before other messages")
        if not calls:
            return rest
        alone = self._text([*before, marked], tools).rpartition(_MARK)[2]
        end = min((place for one in self._ends if (place := alone.find(one)) >= 0), default=-1)
        if end < 0:
            raise UserError("its chat template writes no token that ends a text behind calls of tools")
        return rest[end:]

    def ending(self, messages: Sequence[Message], answer: str, tools: Sequence[Message] = ()) -> str:
        """Return the text of the token that the template writes behind an answer; "": of none that ends one."""
        asked = self._text(messages, tools, asks=True)
        said = self._text([*messages, {"role": "assistant", "content": answer}], tools)
        rest = said[len(asked) :] if said.startswith(asked) else said
        places = [(place, one) for one in self._ends if (place := rest.find(one)) >= 0]
        return min(places)[1] if places else ""

    def read(self, text: str, number: int, tools: Sequence[Message] = ()) -> dict[str, Any]:
        """Return a completion as a message, with the calls of known tools that it has; ids begin with `number`.

        Ids are those of nine letters and digits that every family's template takes.
        """
        if not tools:
            return {"role": "assistant", "content": text}
        reader = CallReader(self._format, {one["function"]["name"] for one in tools})
        content, names, arguments = "", list[str](), list[str]()
        for piece in [*reader.add(text), *reader.end()]:
            if not isinstance(piece, CallPiece):
                content += piece
            elif piece.name:
                names.append(piece.name)
                arguments.append("")
            else:
                arguments[piece.index] += piece.arguments
        if not names:
            return {"role": "assistant", "content": text}
        calls = [
            {
                "id": f"call{(number + i) % 100000:05d}",
                "type": "function",
                "function": {"name": name, "arguments": json.loads(given)},
            }
            for i, (name, given) in enumerate(zip(names, arguments, strict=True))
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._loop is not None:
            self._loop.call(self._renderer.close())
            self._loop.stop(_STOP_S)
            self._loop = None

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], *, asks: bool = False) -> str:
        shown, offered = list(map(dict, messages)), tools
        if tools or "tool" not in self._template:
            shown, offered = self._format.shown(shown, [shown_tool(one) for one in tools])
        names = {**self._special, "messages": shown, "tools": list(offered) or None, "add_generation_prompt": asks}
        if self._loop is None:
            self._loop = LoopThread("chat template of a policy")
        try:
            return self._loop.call(self._renderer.text(self._template, names, is_training=True))
        except UserError as error:
            raise UserError(f"the policy's chat template: {error}") from None
