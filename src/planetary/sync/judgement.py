"""Which contributions of a round count, as one pure function that returns the reason.

Workers of one round start from the same parameters and train on different tokens of the same text, so their deltas are
about equally long and point, a little, the same way. A contribution of another kind shows in the table of inner
products (`sync.deltas`). The effect of a lie is bounded: a delta is at most `LONGEST` times as long as the others' and
points no more away from them than honest ones do.

The thresholds are far from honest workers' values, because a refusal costs the worker's work: in the runs of
`bench/results/liars.md` honest lengths differ by less than a tenth, and honest cosines by less than a third.

Lengths are compared with the others of the round where there are three or more. A median of two says nothing: there,
and for a single worker, they are compared with the rounds before, more loosely, since honest lengths change as a run
goes on. Directions are compared only among three or more.

A contribution of a share s of the usual inner steps is between s and 1 times as long as one of all of them (for s above
1, between 1 and s): in proportion while each step goes on in the direction of the last, not longer at all where
training has converged. So the length stands for a range of whole lengths, which has to meet the others' within the
limits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import ClassVar

import msgspec

from planetary.core.configuration.needs import Need
from planetary.core.errors import UserError
from planetary.sync.deltas import Table
from planetary.sync.measure import Measure

LONGEST = 4.0  # a delta may be so many times as long as is usual, or as short
LONGEST_LATER = 10.0  # the same where it is compared with the rounds before
LONGEST_AT_FIRST = 10.0  # limit in the first round of one or two workers: times the length of the parameters themselves
LEAST_COSINE = 0.25  # fraction of the usual cosine among the others, and ...
DEVIATIONS = 4.0  # ... so many standard deviations below it
COPY = 0.999  # a cosine above which two deltas are one
NOT_ALIKE = 0.9  # where the usual cosine is below it; above, equal work gives equal deltas
HIGHEST_LOSS = 2.0  # a loss may be so many times the median of the round, and ...
LOSS_MARGIN = 0.5  # ... so many nats per token more
REMEMBERED = 8  # rounds whose lengths are remembered
FEWEST = 3  # contributions with a usual direction
MOSTLY_WHOLE = 0.5  # share of the usual inner steps, from which a length is one that others are compared with


class Claim(msgspec.Struct, frozen=True):
    """A worker's report on a contribution."""

    task: int
    worker: str
    loss: float  # mean training loss in the worker's report, nats per token
    share: float = 1.0  # inner steps relative to an average contribution; 0: none are behind the delta


class Judgement(msgspec.Struct, frozen=True):
    """The verdict on a round's contributions."""

    measures: tuple[Measure, ...]  # measures in the order of the claims
    length: float  # the median length of those that count, divided by `scale` and √share; 0: nothing counts

    @property
    def refused(self) -> dict[int, str]:
        """Return why, of each task that does not count."""
        return {measure.task: measure.refused for measure in self.measures if measure.refused}


class Judge(ABC):
    """Decides which contributions of a round count. Called as a function of a round; see `refused`.

    Attributes:
        needs: of the configuration.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    @abstractmethod
    def refused(
        self, claims: Sequence[Claim], table: Table, history: Sequence[float], scale: float
    ) -> Mapping[int, str]:
        """Return the tasks whose contributions do not count, each with the reason.

        Args:
            claims: in the order in which they were accepted, which decides who copied whom.
            table: inner products of the deltas of the same tasks.
            history: `Judgement.length` of the rounds before, oldest first.
            scale: the unit of lengths, where that differs between rounds: the sum of the learning rates; 0
                where nothing can move.
        """

    def __call__(
        self, claims: Sequence[Claim], table: Table, history: Sequence[float], scale: float = 1.0
    ) -> Judgement:
        """Return the verdict on a round; arguments as of `refused`. Raises `UserError` where that fails."""
        try:
            refused = self.refused(claims, table, history, scale)
        except Exception as error:
            raise UserError(f"the judge {type(self).__name__} failed: {type(error).__name__}: {error}") from error
        return _judgement(claims, table, refused, scale if scale > 0 else 1.0)


class ByOthers(Judge):
    """Compare contributions with each other; see the module."""

    name = "others"

    def refused(
        self, claims: Sequence[Claim], table: Table, history: Sequence[float], scale: float
    ) -> Mapping[int, str]:
        if scale <= 0:
            history, scale = (), 1.0
        rows = {task: row for row, task in enumerate(table.tasks)}
        products = table.products
        norms = {claim.task: _norm(table, rows[claim.task]) for claim in claims}

        def cosine(one: int, other: int) -> float:
            lengths = norms[one] * norms[other]
            return products[rows[one]][rows[other]] / lengths if lengths > 0 else 0.0

        refused: dict[int, str] = {}
        for rule in (_by_length, _by_loss):
            left = [claim for claim in claims if claim.task not in refused]
            refused |= rule(left, {c.task: norms[c.task] / scale for c in left}, history, table.start_norm / scale)
        left = [claim.task for claim in claims if claim.task not in refused]
        pairs = {one: {other: cosine(one, other) for other in left if other != one} for one in left}
        # A copy stays among those the others are compared with: it points as the original does. How alike deltas
        # usually are is asked of those that point the same way, or liars would make honest ones look like copies.
        refused |= _by_direction(pairs, table.size)
        left = [task for task in left if task not in refused]
        refused |= _by_copy(left, {one: {other: pairs[one][other] for other in left if other != one} for one in left})
        return refused


class AcceptAll(Judge):
    """Measure the contributions and refuse none."""

    name = "none"

    def refused(
        self, claims: Sequence[Claim], table: Table, history: Sequence[float], scale: float
    ) -> Mapping[int, str]:
        return {}


judge = ByOthers()
Judging = Callable[[Sequence[Claim], Table, Sequence[float], float], Judgement]
"""A judge, or a function in front of one."""


def _judgement(claims: Sequence[Claim], table: Table, refused: Mapping[int, str], scale: float) -> Judgement:
    rows = {task: row for row, task in enumerate(table.tasks)}
    kept = [rows[claim.task] for claim in claims if claim.task not in refused]
    counting = [claim for claim in claims if claim.task not in refused]
    lengths = [_norm(table, rows[claim.task]) / (scale * claim.share**0.5) for claim in counting if claim.share > 0]
    measures = [
        Measure(
            claim.task,
            claim.worker,
            claim.loss,
            _norm(table, rows[claim.task]),
            _with_mean(rows[claim.task], kept, table.products),
            refused.get(claim.task, ""),
        )
        for claim in claims
    ]
    return Judgement(tuple(measures), median(lengths) if lengths else 0.0)


def _norm(table: Table, row: int) -> float:
    return math.sqrt(max(0.0, table.products[row][row]))


def _by_length(
    claims: Sequence[Claim], lengths: Mapping[int, float], history: Sequence[float], start: float
) -> dict[int, str]:
    known = [length for length in history[-REMEMBERED:] if length > 0]
    whole = {c.task: _whole_lengths(lengths[c.task], c.share) for c in claims}
    if len(lengths) >= FEWEST:
        full = [whole[c.task] for c in claims if c.share >= MOSTLY_WHOLE]
        usual = full if len(full) >= FEWEST else list(whole.values())  # else many small parts would widen the range
        shortest, longest = (median(ends) for ends in zip(*usual, strict=True))
        of_whom, most = "the others", LONGEST
    elif known:
        shortest, longest, of_whom, most = 0.0, median(known), "the rounds before", LONGEST_LATER
    else:
        highest = LONGEST_AT_FIRST * start
        return {
            task: f"it is {length / start:.3g} times as far from the start of the round as that is from zero"
            for task, (length, _) in whole.items()
            if 0 < highest < length
        }
    if longest <= 0:
        return {}
    # One or two workers' deltas become short where a training has converged, so none is too short there.
    return {
        task: f"its delta is {(low if low > longest else high) / longest:.3g} times as long as those of {of_whom}"
        for task, (low, high) in whole.items()
        if not (shortest / most <= high and low <= longest * most)
    }


def _whole_lengths(length: float, share: float) -> tuple[float, float]:
    """Return the least and the greatest length of a delta of all steps that one of `share` of them can stand for."""
    other = length / share if share > 0 else math.inf
    return min(length, other), max(length, other)


def _by_loss(
    claims: Sequence[Claim], lengths: Mapping[int, float], history: Sequence[float], start: float
) -> dict[int, str]:
    if len(claims) < FEWEST:
        return {}
    usual = median(claim.loss for claim in claims)
    return {
        claim.task: f"it reports a loss of {claim.loss:.4g} where the others' is {usual:.4g}"
        for claim in claims
        if not usual / HIGHEST_LOSS - LOSS_MARGIN <= claim.loss <= usual * HIGHEST_LOSS + LOSS_MARGIN
    }


def _by_direction(pairs: Mapping[int, Mapping[int, float]], size: int) -> dict[int, str]:
    """Refuse contributions that agree less with the others than these agree with each other.

    The median over the others is theirs as long as liars are fewer than half, whatever these agree on. Where the
    deltas are mostly noise, near the end of a training, the cosines of honest ones spread around a small value: how far
    is estimated by the median absolute deviation, and by 1 / √size, which is that of random directions.
    """
    if len(pairs) < FEWEST:
        return {}
    own = {task: median(others.values()) for task, others in pairs.items()}
    usual = median(own.values())
    if usual <= 0:
        return {}  # without a common direction there is no outlier
    spread = 1.4826 * median(abs(value - usual) for value in own.values()) + size**-0.5
    lowest = min(LEAST_COSINE * usual, usual - DEVIATIONS * spread)
    return {
        task: f"the cosine of its delta with the others' is {value:.3f}, theirs with each other {usual:.3f}"
        for task, value in own.items()
        if value < lowest
    }


def _by_copy(tasks: Sequence[int], pairs: Mapping[int, Mapping[int, float]]) -> dict[int, str]:
    values = [value for task in tasks for value in pairs[task].values()]
    if len(tasks) < FEWEST or median(values) > NOT_ALIKE:
        return {}
    found: dict[int, str] = {}
    for place, task in enumerate(tasks):
        original = next((one for one in tasks[:place] if pairs[task][one] > COPY and one not in found), None)
        if original is not None:
            found[task] = f"its delta is that of task {original}, which trained on other tokens and was here before"
    return found


def _with_mean(row: int, kept: Sequence[int], products: Sequence[Sequence[float]]) -> float | None:
    along = sum(products[row][other] for other in kept)
    squares = sum(products[one][other] for one in kept for other in kept)
    length = math.sqrt(max(0.0, products[row][row]) * max(0.0, squares))
    return along / length if length > 0 else None
