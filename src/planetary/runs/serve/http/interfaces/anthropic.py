"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from planetary.core import decoding
from planetary.runs.serve.http.generation import Choice, ChoicePiece, WholeCall
from planetary.runs.serve.http.grammar import JsonSchemaFormat, ResponseFormat
from planetary.runs.serve.http.requests import ChatRequest
from planetary.runs.serve.program.served_model import ServedModel
from planetary.web.api_errors import ApiError, event_line, json_of, wrong

_REASONS: Mapping[str, str] = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tools may be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema of the text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort` is for a chat template that reads `reasoning_effort`."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


class _Block(msgspec.Struct, frozen=True):
    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


def chat_of(body: CountTokensRequest) -> ChatRequest:
    """Return the chat a request asks for. Raises `ApiError`."""
    config, choice = body.output_config or OutputConfig(), body.tool_choice
    schema = None if config.format is None else JsonSchemaFormat(config.format.schema)
    chat = ChatRequest(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(one, i) for i, one in enumerate(body.tools or ())],
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        response_format=None if schema is None else ResponseFormat("json_schema", schema),
        reasoning_effort=config.effort,
    )
    if not isinstance(body, MessagesRequest):
        return chat
    return msgspec.structs.replace(
        chat,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
    )


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise wrong("tool_choice", "the type tool needs a name")
    return {"type": "function", "function": {"name": choice.name}}


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    try:
        found = decoding.convert(tool, _Tool)
    except msgspec.ValidationError as error:
        raise wrong("tools", f"tools[{number}]: {error}; tools of the server itself are not supported here") from None
    described = {} if found.description is None else {"description": found.description}
    return {"type": "function", "function": {"name": found.name, **described, "parameters": found.input_schema}}


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    system = _text(body.system, "system") if body.system is not None else ""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for i, raw in enumerate(body.messages):
        place = f"messages[{i}]"
        try:
            message = decoding.convert(raw, _Message)
        except msgspec.ValidationError as error:
            raise wrong("messages", str(error).replace("`$", f"`{place}")) from None
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, place, names))
        else:
            messages += _others(message.role, message.content, place, names)
    if messages[-1]["role"] == "assistant":
        raise wrong("messages", "the last one is the assistant's, but an answer cannot be begun for the model here")
    return messages


def _assistant(blocks: Sequence[_Block], place: str, names: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _joined(blocks)}
    calls = []
    for j, block in enumerate(blocks):
        if block.type == "tool_use":
            if block.id is None or block.name is None:
                raise wrong("messages", f"{place}.content[{j}]: a tool_use needs an id and a name")
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking" and block.thinking:
            message["reasoning_content"] = block.thinking
        elif block.type == "tool_result":
            raise wrong("messages", f"{place}.content[{j}]: a tool_result is the user's")
    return {**message, "tool_calls": calls} if calls else message


def _others(role: str, blocks: Sequence[_Block], place: str, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the results of tools, and then the text, which follows them in Anthropic's messages, too."""
    for j, block in enumerate(blocks):
        if block.type == "text":
            continue
        if block.type != "tool_result" or block.tool_use_id is None:
            raise wrong("messages", f"{place}.content[{j}]: expected text, or a tool_result with tool_use_id")
        content = _text(block.content or "", f"{place}.content[{j}].content")
        result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        yield {**result, "name": names[block.tool_use_id]} if block.tool_use_id in names else result
    if any(block.type == "text" for block in blocks) or not blocks:
        yield {"role": role, "content": _joined(blocks)}


def _joined(blocks: Sequence[_Block]) -> str:
    return "\n".join(block.text or "" for block in blocks if block.type == "text")


def _text(content: str | list[dict[str, Any]], place: str) -> str:
    """Return the text of blocks. Raises `ApiError` for others, such as images."""
    if isinstance(content, str):
        return content
    for j, block in enumerate(content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise wrong(place.split("[", maxsplit=1)[0], f"{place}[{j}]: expected text, found {block.get('type')!r}")
    return "\n".join(block["text"] for block in content)


class MessagesForm:
    """One message."""

    def __init__(self, model: ServedModel, prompt_tokens: int) -> None:
        self._model, self._prompt_tokens = model, prompt_tokens
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks, self._open = 0, ""  # blocks so far; type of the open one
        self._reason = self._stop = ""

    def whole(self, choices: Sequence[Choice], generated: int) -> dict[str, Any]:
        (choice,) = choices
        self._reason, self._stop = choice.reason, choice.stop
        content = [_block(one) for one in choice.parts]
        return {**self._message(generated), "content": content, **self._end()}

    def begin(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._message(0))

    def events(self, piece: ChoicePiece) -> Iterator[bytes]:
        call, text = piece.call, piece.piece.text
        self._reason, self._stop = piece.reason, piece.piece.stop
        if call is not None and call.id:
            yield from self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        elif text and self._open != "text":
            yield from self._begin_block({"type": "text", "text": ""})
        if call is not None and call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        elif text:
            yield self._delta({"type": "text_delta", "text": text})

    def end(self, generated: int) -> Iterator[bytes]:
        yield from self._end_block()
        yield _event("message_delta", delta=self._end(), usage={"output_tokens": generated})
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield _event("error", error=_error(error))

    def _begin_block(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_block()
        self._blocks, self._open = self._blocks + 1, block["type"]
        yield _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _end_block(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end(self) -> dict[str, Any]:
        if self._stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        return {"stop_reason": _REASONS[self._reason], "stop_sequence": None}

    def _message(self, generated: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self._prompt_tokens,
                "output_tokens": generated,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }


def _block(part: str | WholeCall) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    try:
        found = decoding.from_json(part.arguments.encode(), dict[str, Any])
    except msgspec.DecodeError:  # cut by max_tokens
        return {"type": "text", "text": part.arguments}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": found}


def _event(kind: str, **more: Any) -> bytes:
    return event_line({"type": kind, **more}, name=kind)


def _error(error: ApiError) -> dict[str, str]:
    return {"type": _KINDS.get(error.status, "invalid_request_error"), "message": error.message}


def refusal(error: ApiError) -> Response:
    """Return an error in Anthropic's form."""
    body = json_of({"type": "error", "error": _error(error)})
    return Response(body, error.status, error.headers, "application/json")
