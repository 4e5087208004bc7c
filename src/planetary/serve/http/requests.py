"""The bodies of requests, in OpenAI's words, their options for a model, and a chat as the text that a model knows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from planetary.core.errors import UserError
from planetary.serve.http.grammar import ResponseFormat
from planetary.serve.scheduling.sampling import SamplingOptions
from planetary.web.api_errors import ApiError, wrong

MOST_CHOICES = 32
MOST_STOPS = 16
MOST_LIKELIEST = 20

Prompt = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Additions to a stream's text."""

    include_usage: bool = False


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
        found = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(found) > MOST_STOPS or not all(found):
            raise wrong("stop", f"expected at most {MOST_STOPS} strings, none of them empty")
        return found

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def seed_of(self, choice: int) -> int:
        """Return the seed of a text, the `choice`-th of its prompt; one of its own where none was given."""
        given = random.SystemRandom().getrandbits(63) if self.seed is None else self.seed + choice
        return given & (2**63 - 1)

    def options(self, vocabulary: int) -> SamplingOptions:
        """Return how tokens are drawn. Raises `ApiError` for values that cannot be."""
        bias: dict[int, float] = {}
        for token, value in (self.logit_bias or {}).items():
            if not token.isdecimal() or int(token) >= vocabulary:
                raise wrong("logit_bias", f"expected tokens below {vocabulary}, found {token!r}")
            bias[int(token)] = value
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
            if (value := getattr(self, name)) is not None
        }
        if given.get("top_k") == -1:  # as vLLM says "all"
            given["top_k"] = 0
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


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    def text(self) -> str:
        """Return the content as text. Raises `ApiError` for parts that are no text."""
        if isinstance(self.content, list):
            if any(part.get("type") != "text" for part in self.content):
                raise wrong("messages", "expected content of the type text alone")
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    input: Prompt
    model: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /tokenize`."""

    prompt: str
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class ChatTemplate:
    """The template of a tokenizer, compiled once. It runs in Jinja's sandbox: it comes with a model from anywhere."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` by the names that templates have for them, such as `eos_token`.

        Raises:
            UserError: it is no template.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"the chat template cannot be read: {error}") from error

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a chat, up to where the assistant's answer begins. Raises `UserError`."""
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            raise UserError(f"the chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    raise UserError(message)
