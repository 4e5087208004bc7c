"""What the master of a group knows about the links between peers: measured, broken, or slower than they were."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

Pair = tuple[str, str]  # from, to

_FAULTS_MOST = 2  # of one link, before the ring is laid another way
_PROBE_BYTES = 1 << 20  # what a hop is judged by
_DROP = 0.5  # of the best speed that operations had over a link
_SLOW_MOST = 5  # operations in a row below that, before what was measured is forgotten


class GroupLinks:
    """Holds no decisions about the ring."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._measured: dict[Pair, tuple[float, float]] = {}  # bytes/s and seconds
        self._faults: Counter[Pair] = Counter()
        self._best: dict[Pair, float] = {}  # bytes/s of operations
        self._slow: Counter[Pair] = Counter()

    def known(self) -> set[Pair]:
        """The links that need not be measured."""
        return {pair for pair, (speed, _) in self._measured.items() if speed > 0}

    def measured(self, pair: Pair, bytes_per_s: float, latency_s: float) -> None:
        """A link was measured; numbers that cannot be mean that it is of no use."""
        usable = math.isfinite(bytes_per_s) and bytes_per_s > 0 and latency_s >= 0
        self._measured[pair] = (bytes_per_s, latency_s) if usable else (0.0, math.inf)

    def unusable(self, pair: Pair) -> None:
        """A link could not be measured, or broke again and again."""
        self._measured[pair] = (0.0, math.inf)

    def observed(self, pair: Pair, bytes_per_s: float) -> None:
        """An operation moved its pieces over a link at this speed.

        When that has dropped for a while, what was measured is forgotten: the next optimisation measures it again.
        """
        if not math.isfinite(bytes_per_s) or bytes_per_s <= 0:
            return
        if bytes_per_s >= _DROP * self._best.get(pair, 0.0):
            self._best[pair] = max(bytes_per_s, self._best.get(pair, 0.0))
            self._slow.pop(pair, None)
            return
        self._slow[pair] += 1
        if self._slow[pair] >= _SLOW_MOST:
            del self._slow[pair]
            self._best[pair] = bytes_per_s
            self._measured.pop(pair, None)

    def blame(self, pair: Pair) -> bool:
        """Count a fault of a link; true when there were so many that the ring should avoid it."""
        self._faults[pair] += 1
        return self._faults[pair] >= _FAULTS_MOST

    def give_up(self, pair: Pair) -> None:
        """Avoid a link from now on."""
        del self._faults[pair]
        self.unusable(pair)

    def forgive(self) -> None:
        """An operation succeeded: faults before it are forgotten."""
        self._faults.clear()

    def forget(self, peer: str) -> None:
        """A peer is gone."""
        for table in (self._measured, self._faults, self._best, self._slow):
            for pair in [pair for pair in table if peer in pair]:
                del table[pair]

    def costs(self, ring: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """Seconds for a piece over each hop; unknown hops cost as much as the mean of the known ones."""

        def cost(link: tuple[float, float]) -> float:
            return link[1] + _PROBE_BYTES / link[0] if link[0] > 0 else math.inf

        known = {pair: cost(link) for pair, link in self._measured.items()}
        unknown = _mean(value for value in known.values() if math.isfinite(value))
        return tuple(tuple(0.0 if a == b else known.get((a, b), unknown) for b in ring) for a in ring)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 1.0
