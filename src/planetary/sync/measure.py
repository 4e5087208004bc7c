"""What a judge measures of a contribution, as the journal keeps it."""

from __future__ import annotations

import msgspec


class Measure(msgspec.Struct, frozen=True):
    """The measured size and direction of a contribution, and the verdict."""

    task: int
    worker: str
    loss: float  # loss in the worker's report, nats per token
    delta_norm: float  # Euclidean norm of the start of the round minus the end parameters
    cosine: float | None  # cosine of the delta and the mean of those that count; None: one of them is zero
    refused: str = ""  # why it does not count; "": it does
