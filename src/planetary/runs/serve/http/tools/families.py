"""The families whose calls are known. A class with a `name` is found by it."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from planetary.core import decoding
from planetary.runs.serve.http.tools.tool_format import Call, ToolFormat, call_of, value_end

_LONGEST_NAME = 300  # characters before the arguments of a call


class Mistral(ToolFormat):
    """`[TOOL_CALLS]` and an array of objects; of newer models, `NAME[ARGS]` and the arguments for each call."""

    name = "mistral"
    openings = ("[TOOL_CALLS]",)
    forced = "[TOOL_CALLS] ["
    _named = re.compile(r"\s*([\w.-]+?)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")

    @classmethod
    def recognises(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def calls(self, text: str, *, is_whole: bool) -> tuple[list[Call], int] | None:
        if not text.strip():
            return None
        if text.lstrip().startswith("["):
            end = value_end(text)
            return None if end is None else ([call_of(one) for one in _array(text[:end])], end)
        named = self._named.match(text)
        if named is None:
            if len(text) > _LONGEST_NAME:
                raise ValueError("no name")
            return None
        end = value_end(text[named.end() :])
        if end is None:
            return None
        written = {"name": named[1], "arguments": msgspec.Raw(text[named.end() :][:end].encode())}
        return [call_of(msgspec.json.encode(written))], named.end() + end

    def new_id(self) -> str:
        """Templates of this family refuse ids of another length."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Hermes(ToolFormat):
    """An object between `<tool_call>` and `</tool_call>` for each call: Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4."""

    name = "hermes"
    openings = ("<tool_call>",)
    forced = "<tool_call>\n"
    _end = "</tool_call>"

    @classmethod
    def recognises(cls, template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template

    def calls(self, text: str, *, is_whole: bool) -> tuple[list[Call], int] | None:
        begin = text.lstrip()
        if begin and not begin.startswith("{"):
            raise ValueError("no object")
        end = value_end(text)
        if end is None:
            return None
        call = call_of(text[:end].encode())
        rest = text[end:].lstrip()
        if rest.startswith(self._end):
            return [call], len(text) - len(rest) + len(self._end)
        return None if self._end.startswith(rest) and not is_whole else ([call], end)


class Llama(ToolFormat):
    """Objects with `parameters`, maybe after `<|python_tag|>`, with semicolons between them: Llama 3.1, 3.2 and 3.3."""

    name = "llama"
    openings = ("<|python_tag|>",)
    bare = re.compile(r"\s*;?\s*(?=\{)")
    key = "parameters"
    forced = ""

    @classmethod
    def recognises(cls, template: str) -> bool:
        return "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template)

    def calls(self, text: str, *, is_whole: bool) -> tuple[list[Call], int] | None:
        begin = text.lstrip()
        if begin and not begin.startswith("{"):
            raise ValueError("no object")
        end = value_end(text)
        return None if end is None else ([call_of(text[:end].encode())], end)


class Generic(Hermes):
    """For a model whose template has no tools: they are described in the chat's text, and called as Hermes does."""

    name = "generic"

    @classmethod
    def recognises(cls, template: str) -> bool:
        return False

    def shown(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return messages of system, user and assistant alone: the tools are in the first one of system or user."""
        shown = [self._plain(message) for message in messages]
        roles = [message["role"] for message in shown]
        if tools:
            at = 0 if roles[:1] in (["system"], ["developer"]) else roles.index("user") if "user" in roles else None
            if at is None:
                shown.insert(0, {"role": "user", "content": _described(tools)})
            else:
                text = _text_of(shown[at])
                parts = (text, _described(tools)) if roles[at] != "user" else (_described(tools), text)
                shown[at] = {**shown[at], "content": "\n\n".join(parts)}
        return shown, ()

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] in ("tool", "function"):
            return {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
        if not message.get("tool_calls"):
            return message
        calls = (one["function"] for one in message["tool_calls"])
        texts = (_json({"name": one["name"], "arguments": one["arguments"]}) for one in calls)
        written = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        text = _text_of(message)
        found = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**found, "content": f"{text}\n{written}" if text else written}


def _array(text: str) -> list[msgspec.Raw]:
    try:
        return decoding.from_json(text.encode(), list[msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content)


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(_json(tool) for tool in tools)
    return (
        "You may call functions to help with the request. Their signatures are within <tools></tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "For each call return a JSON object with the name and the arguments of the function within "
        "<tool_call></tool_call>:\n"
        '<tool_call>\n{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )
