"""Records of data sets as chats: `messages`, prompts with completions, and ShareGPT's `conversations`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from planetary.core.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {  # speaker in ShareGPT's form -> role
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
}


class Chat(msgspec.Struct, frozen=True):
    """A conversation.

    Attributes:
        messages: as a chat template sees them, each with a known role.
        turns: indices of the assistant's messages that are trained, ascending; at least one.
        tools: as a chat template sees them; None: none.
        is_answer: whether the trained turns are one side of a pair, which has to be one text.
    """

    messages: list[dict[str, Any]]
    turns: tuple[int, ...]
    tools: list[Any] | None = None
    is_answer: bool = False


def is_chat(record: Any) -> bool:
    """Whether a record is plainly a chat: it has a conversation in one of the known forms, and no `text`."""
    if not isinstance(record, Mapping) or isinstance(record.get("text"), str):
        return False
    for key in ("messages", "conversations"):
        found = record.get(key)
        if isinstance(found, list) and found and isinstance(found[0], Mapping):
            return "role" in found[0] or {"from", "value"} <= found[0].keys()
    return all(isinstance(record.get(key), str | list) for key in ("prompt", "completion"))


def chat_of(record: Any, where: str) -> Chat:
    """Return the chat of a record.

    A text as `prompt` is a user's message, one as `completion` the assistant's. Only the completion is trained then,
    and no message of an assistant that has `weight = 0`.

    Raises:
        UserError: it has none of the known forms, an unknown role, a content that is no text, or nothing of the
            assistant's to train; the text begins with `where`.
    """
    messages, first = _conversation(record, where)
    weights = [one.pop("weight", 1) for one in messages]
    if strange := [weight for weight in weights if weight not in (0, 1)]:
        raise UserError(f"{where}: a message has the weight {strange[0]!r}: expected 0 (not trained) or 1")
    turns = tuple(i for i, one in enumerate(messages) if i >= first and one["role"] == "assistant" and weights[i])
    if not turns:
        raise UserError(
            f"{where}: nothing here is trained: expected a message of the assistant"
            + (" in the completion" if first else "")
            + (" whose weight is not 0" if 0 in weights else "")
        )
    return Chat(messages, turns, _tools(record.get("tools"), where))


def prompt_of(record: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], str, list[Any]]:
    """Return the messages a record asks, what its assistant answers last ("": nothing), and its tools.

    Raises:
        UserError: as `chat_of`; or nothing is asked.
    """
    if isinstance(record.get("prompt"), list) and record.get("completion") is None:
        record = {**record, "messages": record["prompt"]}
    messages, _ = _conversation(record, where)
    answer = ""
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        answer = last["content"] if isinstance(last.get("content"), str) and not last.get("tool_calls") else ""
    if not messages or messages[-1]["role"] in ("assistant", "system", "developer"):
        raise UserError(f"{where}: nothing is asked: expected a message of the user, or of a tool, before the answer")
    for one in messages:
        one.pop("weight", None)
    return messages, answer, _tools(record.get("tools"), where) or []


def _conversation(record: Any, where: str) -> tuple[list[dict[str, Any]], int]:
    """Return the messages of a record, and how many are no completion. Raises `UserError`."""
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with messages, found {type(record).__name__}")
    first = 0
    if record.get("messages") is not None:
        found = _listed(record["messages"], "messages", where)
    elif record.get("conversations") is not None:
        found = _listed(record["conversations"], "conversations", where)
    elif record.get("prompt") is not None and record.get("completion") is not None:
        prompt = _said(record["prompt"], "user", "prompt", where)
        found, first = [*prompt, *_said(record["completion"], "assistant", "completion", where)], len(prompt)
    else:
        raise UserError(
            f"{where}: expected a chat, which is messages (role, content), conversations (from, value) or prompt and "
            f"completion, found {', '.join(map(repr, record)) or 'an empty object'}"
        )
    messages = [_message(one, f"{where}, message {number}") for number, one in enumerate(found, start=1)]
    if isinstance(record.get("system"), str) and messages and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": record["system"]}, *messages], first + bool(first)
    return messages, first


def pair_of(record: Any, where: str) -> tuple[Chat, Chat]:
    """Return a record's prompt with the preferred answer, and with the other one.

    `prompt`, `chosen` and `rejected` are texts or messages. Without a `prompt`, the answers are whole chats, and the
    messages they begin with alike are the prompt. Of an answer of several messages the assistant's are trained.

    Raises:
        UserError: as `chat_of`; an answer is missing, does not end with the assistant, or both are the same.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with prompt, chosen and rejected, found {type(record).__name__}")
    if missing := [name for name in ("chosen", "rejected") if record.get(name) in (None, "", [])]:
        has = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"{where} has no {missing[0]!r}: a pair is prompt, chosen and rejected; it has {has}")
    sides = {name: record[name] for name in ("chosen", "rejected")}
    prompt = record.get("prompt")
    if prompt is None:
        whole = [_listed(side, name, f"{where}, without a 'prompt'") for name, side in sides.items()]
        common = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*whole, strict=False)))
        prompt, sides = whole[0][:common], {name: side[common:] for name, side in zip(sides, whole, strict=True)}
    if sides["chosen"] == sides["rejected"]:
        raise UserError(f"{where}: 'chosen' and 'rejected' are the same, so neither is preferred")
    rest = {name: record[name] for name in ("system", "tools") if name in record}
    chats = []
    for name, side in sides.items():
        chat = chat_of({**rest, "prompt": prompt, "completion": side}, f"{where}, {name}")
        if chat.messages[-1]["role"] != "assistant":
            raise UserError(
                f"{where}: {name!r} ends with a message of the {chat.messages[-1]['role']}: expected the assistant's"
            )
        chats.append(msgspec.structs.replace(chat, is_answer=True))
    return chats[0], chats[1]


def _listed(value: Any, key: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: expected messages under {key!r}, found {_shown(value)}")
    return value


def _said(value: Any, role: str, key: str, where: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, key, where)


def _message(value: Any, where: str) -> dict[str, Any]:
    """Return a message as templates see it: known role, no field that is null but the content of calls."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected an object with role and content, found {_shown(value)}")
    found = {name: part for name, part in value.items() if part is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        found = {"role": role, "content": found.pop("value", None), **found}
    if found.get("role") not in ROLES:
        known = f"{', '.join(ROLES)}; of ShareGPT also {', '.join(name for name in _SPEAKERS if name not in ROLES)}"
        raise UserError(f"{where} has the role {found.get('role')!r}; known: {known}")
    calls = found.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(one, where) for one in _listed(calls, "tool_calls", where)]
        found.setdefault("content", None)
    else:
        found.pop("tool_calls", None)
    _check_content(found.get("content"), bool(calls), where)
    return found


def _check_content(content: Any, has_calls: bool, where: str) -> None:
    if isinstance(content, str) or (content is None and has_calls):
        return
    if not isinstance(content, list):
        raise UserError(f"{where}: expected a text under 'content', found {_shown(content)}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"{where} has a part of the kind {kind!r} in its content: a model of text knows text only")


def _call(value: Any, where: str) -> Any:
    """Return a call with its arguments as an object, which templates expect; files often have them as JSON."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: expected a call as {{'function': {{'name', 'arguments'}}}}, found {_shown(value)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments or "{}", f"{where}: the arguments of the call of {function['name']}")
    function = {**function, "arguments": arguments if arguments is not None else {}}
    return {**value, "function": function} if "function" in value else function


def _tools(value: Any, where: str) -> list[Any] | None:
    tools = _decoded(value, f"{where}: its tools") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(one, Mapping) for one in tools):
        raise UserError(f"{where}: expected a list of tools, each an object, found {_shown(tools)}")
    return list(tools)


def _decoded(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} are no JSON: {error}") from None


def _shown(value: Any) -> str:
    return "nothing" if value in (None, "", [], {}) else f"{type(value).__name__} {str(value)[:40]!r}"
