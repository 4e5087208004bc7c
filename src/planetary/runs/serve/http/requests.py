"""The bodies of requests, in OpenAI's words, and their options for a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.runs.serve.http.grammar import ResponseFormat
from planetary.runs.serve.http.tools.tool_use import ToolUse, shown_tool, tool_use_of
from planetary.runs.serve.http.unsupported_fields import accepted, note_ignored
from planetary.runs.serve.scheduling.sampling import SamplingOptions, choice_seed
from planetary.web.api_errors import ApiError, wrong
from planetary.web.request_bodies import converted, decoded

MOST_CHOICES = 32
MOST_STOPS = 16
MOST_LIKELIEST = 20
HOTTEST_REQUEST = 2.0  # largest temperature, as OpenAI's

Prompt = str | list[str | int | list[int]]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Additions to a stream's text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of pieces; there is none


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common part of completions and chat completions. `options` checks values."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None

    @property
    def choices(self) -> int:
        """How many texts each prompt gets."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text. Raises `ApiError`."""
        found = (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())
        if len(found) > MOST_STOPS or not all(found):
            raise wrong("stop", f"expected at most {MOST_STOPS} strings, none of them empty")
        return found

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def seed_of(self, choice: int) -> int:
        """Return the seed of a text, the `choice`-th of the prompt; a random one if the request has none."""
        if self.seed is None:
            return random.SystemRandom().getrandbits(63)
        return choice_seed(self.seed, choice)

    def options(self, vocabulary: int) -> SamplingOptions:
        """Return how tokens are drawn. Raises `ApiError` for values that cannot be."""
        bias: dict[int, float] = {}
        for token, value in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) < 20) or int(token) >= vocabulary:
                raise wrong("logit_bias", f"expected tokens below {vocabulary}, found {token!r}")
            bias[int(token)] = value
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
            if (value := getattr(self, name)) is not None
        }
        if given.get("top_k") == -1:  # as vLLM says "all"
            given["top_k"] = 0
        if given.get("temperature", 0.0) > HOTTEST_REQUEST:
            why = f"temperature must be between 0 and {HOTTEST_REQUEST:g}, found {given['temperature']}"
            raise ApiError(400, why, param="temperature", code="invalid_value")
        try:
            return SamplingOptions(**given, logit_bias=bias)
        except UserError as error:
            raise ApiError(400, str(error), param=str(error).split()[0], code="invalid_value") from None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0)] | None = 16
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None
    echo: bool = False
    add_special_tokens: bool = True  # add the tokenizer's special tokens


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a message whose types are known. Others reach the template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def _for_template(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a message as templates read it. Raises `ApiError` for a malformed one; `place` is the field's name.

    Null is the same as no field. A message without calls always has content. Arguments of calls are objects: clients
    send them as JSON text, and templates write them as JSON.
    """
    found = {name: value for name, value in message.items() if value is not None}
    try:
        typed = decoding.convert(found, ChatMessage)
    except msgspec.ValidationError as error:
        raise wrong("messages", str(error).replace("`$", f"`{place}")) from None
    if typed.tool_calls:
        found["tool_calls"] = [
            {**raw, "function": {**raw["function"], "arguments": _arguments(one.function.arguments, f"{place}.{i}")}}
            for i, (raw, one) in enumerate(zip(found["tool_calls"], typed.tool_calls, strict=True))
        ]
    else:
        found.pop("tool_calls", None)
        found.setdefault("content", "")
    return found


def _arguments(given: str | dict[str, Any] | None, place: str) -> dict[str, Any]:
    if isinstance(given, str) and given.strip():
        try:
            given = decoded(given.encode())
        except (ApiError, UnicodeEncodeError) as error:
            raise wrong("messages", f"the arguments of the call {place} are no JSON: {error}") from None
    found = given or {}
    if not isinstance(found, dict):
        raise wrong("messages", f"the arguments of the call {place} are no JSON object")
    return found


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # for a template that reads it
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # add the tokenizer's special tokens; a template writes them itself
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None

    @property
    def tool_use(self) -> ToolUse:
        """The calls an answer may have. Raises `ApiError`."""
        use = tool_use_of(self.tools or (), self.tool_choice, self.parallel_tool_calls)
        if not use.is_forced and any(one.strict for one in use.functions):
            note_ignored("strict", "calls are as the model writes them, unless tool_choice forces one")
        return use


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    input: Prompt
    model: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a text, or a chat."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    model: str | None = None
    add_special_tokens: bool | None = None  # None: to a text, not to a chat


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def template_names(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the names a chat template sees, beside special tokens. Raises `ApiError`."""
    tool_use_of(body.tools or (), body.tool_choice, True)
    more = body.chat_template_kwargs or {}
    if taken := sorted({"messages", "tools", "documents", "add_generation_prompt"} & set(more)):
        raise wrong("chat_template_kwargs", f"{taken[0]} is a field of the request itself")
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {
        **effort,
        **more,
        "messages": [_for_template(one, f"messages[{i}]") for i, one in enumerate(body.messages or ())],
        "tools": [shown_tool(one) for one in body.tools or ()] or None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
    }


Body = TypeVar("Body", bound=msgspec.Struct)


def request_of(data: bytes, kind: type[Body]) -> Body:
    """Decode a request. Raises `ApiError` (400) that names the field."""
    found = decoded(data)
    return converted(accepted(found, kind.__name__) if isinstance(found, dict) else found, kind)
