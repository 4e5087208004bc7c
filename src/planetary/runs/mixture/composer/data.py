"""The tokens a composer trains and evaluates on: read by itself, or from the gateway, some steps ahead."""

from __future__ import annotations

import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import Slice
from planetary.data.reader import batches, read_slice
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.plan import MixturePlan

Batch = tuple[np.ndarray, np.ndarray]
HELD_OUT = -1
"""As a shard: the tokens are those of the held-out batches."""


class ComposerData:
    """Batches of a composer: tokens and targets, i32 [batch, T] each."""

    def __init__(self, plan: MixturePlan) -> None:
        self._plan = plan
        self._dtype = host_dtype(plan.order.file.dtype)
        self._per_step = plan.order.slice_tokens // plan.training.composers
        self._first, self._rows = 0, np.zeros((0, self._per_step), self._dtype)  # rows of steps from `_first` on
        self._held_out: list[Batch] | None = None

    def forget(self) -> None:
        """Drop all tokens: another shard, or another step, is composed from now on."""
        self._rows = self._rows[:0]

    def arrived(self, message: mm.TokensReady, payload: Packed, done: int) -> None:
        """Take tokens from the gateway; those of steps before `done` are of no use any more.

        Raises:
            RemoteProtocolError: their number is another than the message's.
        """
        per = self._plan.model.batch_size * (self._plan.model.sequence_length + 1)
        width = per if message.shard == HELD_OUT else self._per_step
        if len(payload) != message.count * width * self._dtype.itemsize:
            raise RemoteProtocolError(f"tokens of {message.count} steps came in {len(payload)} bytes")
        rows = np.frombuffer(payload, self._dtype).reshape(message.count, width)
        if message.shard == HELD_OUT:
            self._held_out = [self._cut(row) for row in rows]
            return
        held = self._rows[max(0, done - self._first) :] if len(self._rows) else self._rows
        self._first = done if len(held) else message.first
        self._rows = np.concatenate([held, rows])

    def batch(self, shard: int, step: int) -> Batch:
        """Return a shard's batch of a step."""
        if self._plan.delivery == "path":
            return self._cut(read_slice(self._plan.tokens_of(shard, step)))
        return self._cut(self._rows[step - self._first])

    def held_out(self) -> list[Batch]:
        """Return the held-out batches. Under delivery by the gateway they are there before anything is asked."""
        if self._plan.delivery == "path":
            return [self._cut(read_slice(piece)) for piece in self._plan.held_out]
        if self._held_out is None:
            raise RemoteProtocolError("the gateway asks for an evaluation and has sent no held-out tokens")
        return self._held_out

    def _cut(self, tokens: np.ndarray) -> Batch:
        return next(batches(tokens, self._plan.model.batch_size, self._plan.model.sequence_length))


def tokens_payload(slices: tuple[Slice, ...]) -> np.ndarray:
    """Return the tokens of slices, one after the other in their own type, as bytes ui8 [n].

    Raises:
        UserError, ResourceError: they cannot be read.
    """
    return np.concatenate([read_slice(piece) for piece in slices]).view(np.uint8)
