"""OpenAI's completions and chat completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from planetary.runs.serve.http import answers
from planetary.runs.serve.http.generation import Choice, ChoicePiece
from planetary.runs.serve.http.prompts import PromptText
from planetary.runs.serve.http.requests import ChatRequest, CompletionRequest, GenerationRequest
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.scheduling.sequences import Token
from planetary.web.api_errors import ApiError, event_line

DONE = b"data: [DONE]\n\n"


class _OpenAiForm:
    """The common part: chunks of one object, and the usage at the end where it is wanted."""

    def __init__(self, body: GenerationRequest, model: ServedModel, prompt_tokens: int, number: str, kind: str) -> None:
        self._body, self._model, self._prompt_tokens = body, model, prompt_tokens
        self._number, self._kind = f"{number}-{secrets.token_hex(12)}", kind

    def begin(self) -> Iterator[bytes]:
        yield from ()

    def end(self, generated: int) -> Iterator[bytes]:
        if self._body.with_usage:
            used = answers.usage(self._prompt_tokens, generated)
            yield event_line({**self._envelope(), "choices": [], "usage": used})
        yield DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield b"data: " + error.body() + b"\n\n"

    def _envelope(self) -> dict[str, Any]:
        return answers.envelope(self._kind, self._number, self._model.name)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event_line(
            {**self._envelope(), "choices": [choice], **({"usage": None} if self._body.with_usage else {})}
        )


class CompletionForm(_OpenAiForm):
    """`/v1/completions`."""

    def __init__(self, body: CompletionRequest, model: ServedModel, prompts: Sequence[PromptText]) -> None:
        """`prompts`: of the request, each of which has `body.choices` texts."""
        super().__init__(body, model, sum(len(one.tokens) for one in prompts), "cmpl", "text_completion")
        self._completion = body
        likeliest, scores = body.logprobs or 0, body.echo and body.logprobs is not None
        self._asked = [one for one in prompts for _ in range(body.choices)]
        self._echoes = [one.text if body.echo else "" for one in self._asked]
        self._logprobs = [
            answers.CompletionLogprobs(model.tokenizer, likeliest, 0, unwritten=one.added, lost=one.lost)
            if scores
            else answers.CompletionLogprobs(model.tokenizer, likeliest, len(echo))
            for one, echo in zip(self._asked, self._echoes, strict=True)
        ]

    def whole(self, choices: Sequence[Choice], generated: int) -> dict[str, Any]:
        if self._completion.max_tokens == 0:  # the prompt alone was wanted
            generated = 0
            choices = [
                Choice([], one.tokens[: len(asked.tokens)] if self._completion.logprobs is not None else [], "length")
                for one, asked in zip(choices, self._asked, strict=True)
            ]
        written = [self._choice(i, one.text, one.tokens, one.reason) for i, one in enumerate(choices)]
        return {**self._envelope(), "choices": written, "usage": answers.usage(self._prompt_tokens, generated)}

    def events(self, piece: ChoicePiece) -> Iterator[bytes]:
        yield self._chunk(self._choice(piece.choice, piece.piece.text, piece.piece.tokens, piece.reason))

    def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str) -> dict[str, Any]:
        echo, self._echoes[index] = self._echoes[index], ""
        logprobs = None if self._completion.logprobs is None else self._logprobs[index].of(tokens)
        return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": reason or None}


class ChatForm(_OpenAiForm):
    """`/v1/chat/completions`."""

    def __init__(self, body: ChatRequest, model: ServedModel, prompt_tokens: int) -> None:
        super().__init__(
            body, model, prompt_tokens, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion"
        )
        self._has_logprobs = bool(body.logprobs)
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice], generated: int) -> dict[str, Any]:
        written = [
            {
                "index": index,
                "message": _message(one),
                "logprobs": self._logprobs(one.tokens),
                "finish_reason": one.reason,
            }
            for index, one in enumerate(choices)
        ]
        return {**self._envelope(), "choices": written, "usage": answers.usage(self._prompt_tokens, generated)}

    def events(self, piece: ChoicePiece) -> Iterator[bytes]:
        if (delta := self._delta(piece)) is None:
            return
        yield self._chunk(
            {
                "index": piece.choice,
                "delta": delta,
                "logprobs": self._logprobs(piece.piece.tokens),
                "finish_reason": piece.reason or None,
            }
        )

    def _delta(self, piece: ChoicePiece) -> dict[str, Any] | None:
        """Return what a piece adds to a message; None: nothing."""
        begins, call = piece.choice not in self._begun, piece.call
        if call is None and not piece.piece.text and not piece.reason and not begins and not self._has_logprobs:
            return None
        self._begun.add(piece.choice)
        role = {"role": "assistant"} if begins else {}
        if call is None:
            return {**role, "content": piece.piece.text}
        head = {"id": call.id, "type": "function"} if call.id else {}
        function = {**({"name": call.name} if call.id else {}), "arguments": call.arguments}
        content = {"content": None} if begins else {}
        return {**role, **content, "tool_calls": [{"index": call.index, **head, "function": function}]}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return answers.chat_logprobs(self._model.tokenizer, tokens) if self._has_logprobs else None


def _message(choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    if not choice.calls:
        return message
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in choice.calls
    ]
    return {**message, "content": choice.text or None, "tool_calls": calls}
