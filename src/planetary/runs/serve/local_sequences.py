"""Sequences that one process computes by itself, with the scheduler and the sampler of a served model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from planetary.runs.serve.loaded_model import with_draws
from planetary.runs.serve.messages import ComputeCall, candidates_of
from planetary.runs.serve.program.shape import ServingShape
from planetary.runs.serve.scheduling.scheduler import Scheduler, SequenceOutput
from planetary.runs.serve.scheduling.sequences import SequenceRequest

_WORKER = 1  # session of the scheduler's only worker


class Computes(Protocol):
    """Computes calls: see `runs.serve.role.LoadedModel`."""

    def compute(self, message: ComputeCall) -> dict[str, np.ndarray]:
        """Return the results of a call."""
        ...


class LocalSequences:
    """Continues sequences on one device, without a gateway. Used by one thread at a time."""

    def __init__(self, model: Computes, shape: ServingShape, vocabulary: int) -> None:
        """Start without sequences.

        Args:
            model: on the device, with an empty cache.
            shape: the sizes of the functions.
            vocabulary: tokens below it can be drawn.
        """
        self._model, self._vocabulary = model, vocabulary
        self._scheduler = Scheduler(shape, vocabulary)
        self._scheduler.join(_WORKER)

    def submit(self, request: SequenceRequest) -> None:
        """Take a sequence, whose prompt is shorter than the window and is not scored."""
        self._scheduler.submit(request)

    def cancel(self, number: int) -> None:
        """Forget a sequence, unless it is finished."""
        self._scheduler.cancel(number)

    def tokens(self) -> Iterator[SequenceOutput]:
        """Yield the tokens of all sequences as they are drawn, until every sequence is finished or cancelled."""
        while calls := self._scheduler.next_calls():
            for session, call in calls:
                message = ComputeCall.of(0, call, self._vocabulary)
                found = with_draws(message, self._model.compute(message))
                yield from self._scheduler.computed(session, candidates_of(found))
