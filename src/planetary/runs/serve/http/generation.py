"""One request's texts: submitted together, given out in pieces as they come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planetary.core.errors import ClosedError
from planetary.data.tokenizer import Tokenizer
from planetary.runs.serve.http.metrics import ServingMetrics
from planetary.runs.serve.http.service import Service
from planetary.runs.serve.http.text_assembly import TextAssembly, TextPiece
from planetary.runs.serve.http.tools.tool_format import AnswerReader, CallPiece
from planetary.runs.serve.scheduling.sequences import SequenceRequest, Token
from planetary.web.api_errors import ApiError

log = logging.getLogger(__name__)

RETRY = {"retry-after": "1"}
"""Headers of an answer after which a request may be sent again."""


@dataclass(frozen=True)
class ChoicePiece:
    """Some more of one of a request's texts.

    Attributes:
        choice: which, from 0.
        piece: text and tokens; the text is content.
        reason: why nothing follows, in OpenAI's words; "" while something does.
        call: some more of a call of a tool, in place of content.
    """

    choice: int
    piece: TextPiece
    reason: str = ""
    call: CallPiece | None = None


@dataclass
class WholeCall:
    """A call of a tool in an answer."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Choice:
    """A whole text.

    Attributes:
        parts: content and calls, in order.
        stop: the string that ended it; "": none did.
    """

    parts: list[str | WholeCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    reason: str = ""
    stop: str = ""

    def add(self, one: ChoicePiece) -> None:
        """Append a piece."""
        text, call = one.piece.text, one.call
        last = self.parts[-1] if self.parts else None
        if call is not None and call.id:
            self.parts.append(WholeCall(call.id, call.name, call.arguments))
        elif call is not None and isinstance(last, WholeCall):
            last.arguments += call.arguments
        elif text and isinstance(last, str):
            self.parts[-1] = last + text
        elif text:
            self.parts.append(text)
        self.tokens += one.piece.tokens
        self.reason, self.stop = one.reason, one.piece.stop

    @property
    def text(self) -> str:
        return "".join(one for one in self.parts if isinstance(one, str))

    @property
    def calls(self) -> list[WholeCall]:
        return [one for one in self.parts if isinstance(one, WholeCall)]


class Generation:
    """The texts of a request.

    Attributes:
        generated: tokens so far, of all texts.
    """

    def __init__(
        self,
        service: Service,
        metrics: ServingMetrics,
        requests: Sequence[SequenceRequest],
        *,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        still_allowed: Callable[[], bool],
        reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        """Compute nothing yet.

        Args:
            service, metrics: of the endpoint.
            requests: the texts.
            tokenizer: of the model.
            stops: strings that end a text.
            still_allowed: whether who asks may still do so; looked at with every piece.
            reader: makes a reader of calls for each text; None: everything is content.
        """
        self._service, self._metrics, self._requests = service, metrics, requests
        self._tokenizer, self._stops, self._still_allowed = tokenizer, stops, still_allowed
        self._reader = reader
        self.generated = 0

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """Yield pieces of all texts as they come; leaving early cancels them.

        Raises:
            ApiError: the gateway ends, or the key was revoked.
        """
        began = time.monotonic()
        found: asyncio.Queue[ChoicePiece | Exception] = asyncio.Queue()
        for request in self._requests:
            self._metrics.prompt_tokens.inc(len(request.prompt))
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._one(i, one, found)) for i, one in enumerate(self._requests)]
        left = len(tasks)
        try:
            while left:
                one = await found.get()
                if isinstance(one, Exception):
                    raise ApiError(503, str(one), code="unavailable", headers=RETRY)
                if not self._still_allowed():
                    raise ApiError(401, "the key was revoked", code="invalid_api_key")
                left -= bool(one.reason)
                yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._metrics.whole_s.observe(time.monotonic() - began)

    async def whole(self) -> list[Choice]:
        """Return all texts once they are finished. Raises as `pieces`."""
        choices = [Choice() for _ in self._requests]
        async for one in self.pieces():
            choices[one.choice].add(one)
        return choices

    async def _one(self, number: int, request: SequenceRequest, found: asyncio.Queue[ChoicePiece | Exception]) -> None:
        assembly = TextAssembly(self._tokenizer, self._stops, request.prompt)
        reader = None if self._reader is None else self._reader()
        unscored = 0 if not request.scores_prompt else len(request.prompt)
        began = last = time.monotonic()
        stream = self._service.generate(request)
        try:
            async for output in stream:
                now = time.monotonic()
                new = max(0, len(output.tokens) - unscored)
                unscored -= len(output.tokens) - new
                if new:
                    first = last == began
                    (self._metrics.first_token_s if first else self._metrics.between_tokens_s).observe(now - last)
                    last = now
                    self.generated += new
                    self._metrics.generated_tokens.inc(new)
                scored, drawn = output.tokens[: len(output.tokens) - new], output.tokens[len(output.tokens) - new :]
                if scored:  # the prompt's own, whose text the client has
                    found.put_nowait(ChoicePiece(number, TextPiece("", tuple(scored))))
                piece = assembly.add(drawn)
                reason = "stop" if piece.stop else output.finished
                if reason and not piece.stop:
                    rest = assembly.end()
                    reason = "stop" if rest.stop else reason
                    piece = TextPiece(piece.text + rest.text, (*piece.tokens, *rest.tokens), rest.stop)
                read = [ChoicePiece(number, piece, reason)] if reader is None else _read(number, piece, reason, reader)
                reason = read[-1].reason
                for one in read:
                    if one.piece.text or one.piece.tokens or one.call is not None or one.reason:
                        found.put_nowait(one)
                if reason:
                    self._metrics.finished.labels(reason).inc()
                    return
        except ClosedError as error:
            found.put_nowait(error)
        except Exception as error:  # a reader that waits for ever would be worse
            log.exception("text %d failed", request.number)
            found.put_nowait(error)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]


def _read(number: int, piece: TextPiece, reason: str, reader: AnswerReader) -> list[ChoicePiece]:
    """Return a piece as content and calls; the last one has the reason, if nothing follows."""
    parts = reader.add(piece.text)
    if reason and not reader.is_complete:
        parts = [*parts, *reader.end()]
    if reader.is_complete or (reader.calls and reason == "stop"):
        reason = "tool_calls"
    found = [
        ChoicePiece(number, TextPiece(one, ()))
        if isinstance(one, str)
        else ChoicePiece(number, TextPiece("", ()), "", one)
        for one in parts or [""]
    ]
    found[0] = replace(found[0], piece=replace(found[0].piece, tokens=piece.tokens))
    found[-1] = replace(found[-1], reason=reason, piece=replace(found[-1].piece, stop=piece.stop))
    return found


async def embedding_of(service: Service, request: SequenceRequest) -> np.ndarray:
    """Return the mean f32 [C] of a prompt's last hidden states. Raises `ApiError` when the gateway ends."""
    try:
        async for output in service.generate(request):
            if output.embedding is not None:
                return output.embedding
    except ClosedError as error:
        raise ApiError(503, str(error), code="unavailable", headers=RETRY) from None
    raise ApiError(500, "the text ended without an embedding", code="internal_error")
