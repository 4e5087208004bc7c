"""`/v1/responses`: OpenAI's Responses, in the neutral specification Open Responses. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from planetary.core import decoding
from planetary.runs.serve.http import answers
from planetary.runs.serve.http.generation import Choice, ChoicePiece, WholeCall
from planetary.runs.serve.http.grammar import JsonSchemaFormat, ResponseFormat
from planetary.runs.serve.http.interfaces.openai import DONE
from planetary.runs.serve.http.requests import MOST_LIKELIEST, ChatRequest, StreamOptions
from planetary.runs.serve.http.unsupported_fields import note_ignored
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.scheduling.sequences import Token
from planetary.web.api_errors import ApiError, event_line, wrong

_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text, as `response_format` of chat completions."""

    type: str = "text"
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort` is for a chat template that reads it; there are no summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None
    include: list[str] = []
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    metadata: dict[str, Any] | None = None  # given back
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in self.include or bool(self.top_logprobs)


class _Part(msgspec.Struct, frozen=True):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


_Content = str | list[_Part] | None


class _Item(msgspec.Struct, frozen=True):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content = None
    summary: _Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Content = None


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the chat a request asks for. Raises `ApiError`."""
    for one in body.include:
        if one == _ENCRYPTED:
            note_ignored(f"include {one}", "nothing is encrypted")
        elif one != _LOGPROBS:
            raise wrong("include", f"{one} is not supported here; there is {_LOGPROBS}")
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        note_ignored("reasoning.summary", "answers have no separate reasoning")
    form = None if body.text is None else body.text.format
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return ChatRequest(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(one, i) for i, one in enumerate(body.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if form is None else _response_format(form),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
        stream=body.stream,
        user=body.user,
    )


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type == "json_schema" and form.schema is None:
        raise wrong("text", "the format json_schema needs a schema")
    schema = None if form.schema is None else JsonSchemaFormat(form.schema, form.name or "")
    return ResponseFormat(form.type, schema)


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(
            400,
            f"tools[{number}]: the type {tool.get('type')!r} is not supported here; functions are",
            param="tools",
            code="unsupported_parameter",
        )
    return {"type": "function", "function": {key: one for key, one in tool.items() if key != "type"}}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages of a request. Calls, texts and reasoning of the assistant in a row are one message."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    names: dict[str, str] = {}
    for i, raw in enumerate(items):
        place = f"input[{i}]"
        try:
            item = decoding.convert(raw, _Item)
        except msgspec.ValidationError as error:
            if raw.get("type") == "item_reference":
                raise wrong("input", f"{place}: nothing is stored, so no item can be referred to") from None
            raise wrong("input", str(error).replace("`$", f"`{place}")) from None
        match item.type or "message":
            case "message":
                if item.role is None:
                    raise wrong("input", f"{place} has no role")
                if item.role != "assistant":
                    messages.append({"role": item.role, "content": _text(item.content)})
                    continue
                message = _assistant(messages)
                message["content"] = (message.get("content") or "") + _text(item.content)
            case "function_call":
                call_id, name = _needed(item.call_id, f"{place}.call_id"), _needed(item.name, f"{place}.name")
                names[call_id] = name
                function = {"name": name, "arguments": item.arguments or "{}"}
                call = {"id": call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = _needed(item.call_id, f"{place}.call_id")
                result = {"role": "tool", "tool_call_id": call_id, "content": _text(item.output)}
                messages.append({**result, "name": names[call_id]} if call_id in names else result)
            case "reasoning":
                if text := _text(item.content) or _text(item.summary):
                    _assistant(messages)["reasoning_content"] = text
    return messages


def _needed(value: str | None, place: str) -> str:
    if value is None:
        raise wrong("input", f"{place} is missing")
    return value


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if it is the assistant's, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: _Content) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


class ResponsesForm:
    """One response."""

    def __init__(self, body: ResponsesRequest, model: ServedModel, prompt_tokens: int) -> None:
        self._body, self._model, self._prompt_tokens = body, model, prompt_tokens
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []  # items; the last one may be open
        self._is_open = False
        self._reason = ""

    def whole(self, choices: Sequence[Choice], generated: int) -> dict[str, Any]:
        (choice,) = choices
        self._reason = choice.reason
        tokens = choice.tokens
        for part in choice.parts or [""]:
            if isinstance(part, WholeCall):
                self._output.append(_call(part.id, part.name, part.arguments))
            else:
                self._output.append(_message(part, self._logprobs(tokens)))
                tokens = []
        self._output[-1]["status"] = self._status
        return self._response(self._status, generated)

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def events(self, piece: ChoicePiece) -> Iterator[bytes]:
        call, text = piece.call, piece.piece.text
        self._reason = piece.reason
        if call is not None and call.id:
            yield from self._close()
            yield from self._open(_call(call.id, call.name, ""))
        if call is not None and call.arguments:
            item = self._output[-1]
            item["arguments"] += call.arguments
            yield self._event("response.function_call_arguments.delta", **self._of_item(), delta=call.arguments)
        if text:
            if not self._is_open or self._output[-1]["type"] != "message":
                yield from self._close()
                yield from self._open(_message("", []))
            part = self._output[-1]["content"][0]
            logprobs = self._logprobs(piece.piece.tokens)
            part["text"] += text
            part["logprobs"] += logprobs
            yield self._event("response.output_text.delta", **self._of_part(), delta=text, logprobs=logprobs)

    def end(self, generated: int) -> Iterator[bytes]:
        if not self._output:
            yield from self._open(_message("", []))
        yield from self._close(self._status)
        yield self._event(f"response.{self._status}", response=self._response(self._status, generated))
        yield DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        reason = {"code": error.code or error.kind, "message": error.message}
        yield self._event("response.failed", response={**self._response("failed"), "error": reason})
        yield DONE

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event_line({"type": kind, "sequence_number": number, **more}, name=kind)

    def _of_item(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1, "item_id": self._output[-1]["id"]}

    def _of_part(self) -> dict[str, Any]:
        return {**self._of_item(), "content_index": 0}

    def _open(self, item: dict[str, Any]) -> Iterator[bytes]:
        """Begin an item."""
        self._output.append({**item, "status": "in_progress"})
        self._is_open = True
        at = len(self._output) - 1
        shown = {**self._output[-1], **({"content": []} if item["type"] == "message" else {})}
        yield self._event("response.output_item.added", output_index=at, item=shown)
        if item["type"] == "message":
            yield self._event("response.content_part.added", **self._of_part(), part=item["content"][0])

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """End the open item, if there is one."""
        if not self._is_open:
            return
        item, self._is_open = self._output[-1], False
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            text, logprobs = part["text"], part["logprobs"]
            yield self._event("response.output_text.done", **self._of_part(), text=text, logprobs=logprobs)
            yield self._event("response.content_part.done", **self._of_part(), part=part)
        else:
            name, arguments = item["name"], item["arguments"]
            done = "response.function_call_arguments.done"
            yield self._event(done, **self._of_item(), name=name, arguments=arguments)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _logprobs(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return answers.chat_logprobs(self._model.tokenizer, tokens)["content"] if self._body.has_logprobs else []

    def _response(self, status: str, generated: int | None = None) -> dict[str, Any]:
        body, is_over = self._body, generated is not None
        form = TextFormat() if body.text is None or body.text.format is None else body.text.format
        shown_form = {key: one for key, one in msgspec.to_builtins(form).items() if one is not None}
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": generated or 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + (generated or 0),
        }
        no_tool = {"description": None, "parameters": None, "strict": None}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model.name,
            "output": list(self._output),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "tools": [{**no_tool, **one} for one in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "top_logprobs": body.top_logprobs or 0,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "text": {"format": shown_form, "verbosity": "medium"},
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
            "prompt_cache_key": None,
            "safety_identifier": None,
            "user": body.user,
            "usage": usage if is_over else None,
        }


def _message(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    item = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "status": "completed"}
    return {**item, "call_id": call_id, "name": name, "arguments": arguments}
