"""Continues many texts with a policy's functions: the scheduler of a served model, with one worker and no endpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planetary.serve.program.serving_shape import IDS, ROW, VALUES, ServingShape
from planetary.serve.protocol.serving_messages import ComputeCall
from planetary.serve.scheduling.sampling import Candidates, SamplingOptions
from planetary.serve.scheduling.scheduler import Call, Scheduler
from planetary.serve.scheduling.texts import TextRequest

SEAT = 1


class Computes(Protocol):
    """What computes calls: see `serve.worker.serving_role.LoadedModel`."""

    def compute(self, message: ComputeCall) -> dict[str, np.ndarray]:
        """Return the results of a call."""
        ...


@dataclass(frozen=True)
class TextStart:
    """A text to continue.

    Attributes:
        tokens: so far.
        seed: of the draws.
        most: tokens to generate at most.
    """

    tokens: tuple[int, ...]
    seed: int
    most: int


@dataclass
class Completion:
    """What was generated: tokens, and the log-probability that the model gave each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def sample(
    model: Computes,
    shape: ServingShape,
    vocabulary: int,
    starts: Sequence[TextStart],
    *,
    ends: Collection[int],
    greedy: bool = False,
) -> list[Completion]:
    """Continue all texts and return their completions, in order.

    Tokens are drawn from the whole distribution at temperature 1, so that a token's log-probability is that with which
    it was drawn. The token that ends a text is the last of its completion.
    """
    scheduler = Scheduler(shape, vocabulary)
    scheduler.join(SEAT)
    found = [Completion() for _ in starts]
    for number, start in enumerate(starts):
        options = SamplingOptions(temperature=0.0 if greedy else 1.0, seed=start.seed)
        scheduler.submit(TextRequest(text=number, prompt=start.tokens, most=start.most, options=options))
    while calls := scheduler.next_calls():
        for _, call in calls:
            results = model.compute(_message(call))
            for given in scheduler.computed(SEAT, _candidates(results, len(call.rows))):
                completion = found[given.text]
                for token in given.tokens:
                    completion.tokens.append(token.token)
                    completion.logprobs.append(0.0 if token.logprob is None else token.logprob)
                if not given.finished and completion.tokens and completion.tokens[-1] in ends:
                    scheduler.cancel(given.text)
    return found


def _message(call: Call) -> ComputeCall:
    return ComputeCall(
        call=0,
        function=call.function,
        tokens=tuple(row.tokens for row in call.rows),
        starts=tuple(row.start for row in call.rows),
        pages=tuple(row.pages for row in call.rows),
        full=call.full,
    )


def _candidates(results: dict[str, np.ndarray], count: int) -> list[Candidates]:
    row = results.get(ROW)
    return [Candidates(results[IDS][i], results[VALUES][i], None if row is None else row[i]) for i in range(count)]
