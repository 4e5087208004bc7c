"""One request's texts: submitted together, given out in pieces as they come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planetary.core.errors import ClosedError
from planetary.data.tokenizer import Tokenizer
from planetary.runs.serve.http.metrics import ServingMetrics
from planetary.runs.serve.http.service import Service
from planetary.runs.serve.http.text_assembly import TextAssembly, TextPiece
from planetary.runs.serve.scheduling.sequences import SequenceRequest, Token
from planetary.web.api_errors import ApiError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoicePiece:
    """Some more of one of a request's texts.

    Attributes:
        choice: which, from 0.
        piece: text and tokens.
        reason: why nothing follows, in OpenAI's words; "" while something does.
    """

    choice: int
    piece: TextPiece
    reason: str = ""


@dataclass
class Choice:
    """A whole text."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    reason: str = ""


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
    ) -> None:
        """`still_allowed`: whether who asks may still do so; looked at with every piece."""
        self._service, self._metrics, self._requests = service, metrics, requests
        self._tokenizer, self._stops, self._still_allowed = tokenizer, stops, still_allowed
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
                    raise ApiError(503, str(one), code="unavailable")
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
            choice = choices[one.choice]
            choice.text += one.piece.text
            choice.tokens += one.piece.tokens
            choice.reason = one.reason
        return choices

    async def _one(self, number: int, request: SequenceRequest, found: asyncio.Queue[ChoicePiece | Exception]) -> None:
        assembly = TextAssembly(self._tokenizer, self._stops, request.prompt)
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
                reason = "stop" if piece.stopped else output.finished
                if reason and not piece.stopped:
                    rest = assembly.end()
                    reason = "stop" if rest.stopped else reason
                    piece = TextPiece(piece.text + rest.text, (*piece.tokens, *rest.tokens), rest.stopped)
                if piece.text or piece.tokens or reason:
                    found.put_nowait(ChoicePiece(number, piece, reason))
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


async def embedding_of(service: Service, request: SequenceRequest) -> np.ndarray:
    """Return the mean f32 [C] of a prompt's last hidden states. Raises `ApiError` when the gateway ends."""
    try:
        async for output in service.generate(request):
            if output.embedding is not None:
                return output.embedding
    except ClosedError as error:
        raise ApiError(503, str(error), code="unavailable") from None
    raise ApiError(500, "the text ended without an embedding", code="internal_error")
