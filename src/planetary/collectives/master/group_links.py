"""Measurements of the links between a group's peers, as the master has them: speed, faults, lost speed."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

Pair = tuple[str, str]  # from, to

_FAULTS_MOST = 2  # faults of one link until the ring avoids it
_PROBE_BYTES = 1 << 20  # piece whose time is the cost of a hop
_DROP = 0.5  # of the best speed that operations had over a link
_SLOW_MOST = 5  # operations in a row below that until the measurement expires
_SAMPLES = 3  # measurements by which the background measurement judges a link


class GroupLinks:
    """Costs of the links of one group; decides nothing about the ring."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._measured: dict[Pair, tuple[float, float]] = {}  # bytes/s and seconds
        self._samples: dict[Pair, deque[float]] = {}  # seconds for a piece, of the last measurements
        self._faults: Counter[Pair] = Counter()
        self._best: dict[Pair, float] = {}  # bytes/s of operations
        self._slow: Counter[Pair] = Counter()

    def known(self) -> set[Pair]:
        """The links that need not be measured."""
        return {pair for pair, (speed, _) in self._measured.items() if speed > 0}

    def measured(self, pair: Pair, bytes_per_s: float, latency_s: float) -> None:
        """Record a requested measurement; impossible numbers mark the link as unusable."""
        self._measured[pair] = _possible(bytes_per_s, latency_s)
        self._sample(pair, self._measured[pair])

    def sampled(self, pair: Pair, bytes_per_s: float, latency_s: float) -> None:
        """Record a background measurement; a single failure leaves the earlier measurement in place."""
        found = _possible(bytes_per_s, latency_s)
        if found[0] > 0:
            self._measured[pair] = found
        self._sample(pair, found)

    def is_settled(self, pair: Pair) -> bool:
        """Whether a link has been measured often enough to be judged by `cautious_costs`."""
        return len(self._samples.get(pair, ())) == _SAMPLES

    def unusable(self, pair: Pair) -> None:
        """Mark a link that could not be measured, or broke repeatedly."""
        self._measured[pair] = (0.0, math.inf)
        for _ in range(_SAMPLES):
            self._sample(pair, (0.0, math.inf))

    def observed(self, pair: Pair, bytes_per_s: float) -> None:
        """Record the speed of an operation's pieces over a link.

        After a lasting drop the measurement expires: the next optimisation repeats it.
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
            self._samples.pop(pair, None)

    def blame(self, pair: Pair) -> bool:
        """Count a fault of a link; true when the ring should avoid it."""
        self._faults[pair] += 1
        return self._faults[pair] >= _FAULTS_MOST

    def give_up(self, pair: Pair) -> None:
        """Avoid a link from now on."""
        del self._faults[pair]
        self.unusable(pair)

    def forgive(self) -> None:
        """Reset the faults of all links, after an operation that succeeded."""
        self._faults.clear()

    def forget(self, peer: str) -> None:
        """Remove the links of a lost peer."""
        for table in (self._measured, self._samples, self._faults, self._best, self._slow):
            for pair in [pair for pair in table if peer in pair]:
                del table[pair]

    def costs(self, ring: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """Seconds for a piece over each hop; unknown hops cost as much as the mean of the known ones."""
        known = {pair: _seconds(link) for pair, link in self._measured.items()}
        unknown = _mean(value for value in known.values() if math.isfinite(value))
        return tuple(tuple(0.0 if a == b else known.get((a, b), unknown) for b in ring) for a in ring)

    def cautious_costs(self, ring: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """Seconds for a piece over each hop: of the ring's hops the least, of all others the most that was measured.

        A ring that is cheaper by these costs is cheaper despite any noise. Unsettled hops cost infinitely.
        """
        present = set(zip(ring, [*ring[1:], *ring[:1]], strict=True))

        def cost(pair: Pair) -> float:
            if not self.is_settled(pair):
                return math.inf
            return min(self._samples[pair]) if pair in present else max(self._samples[pair])

        return tuple(tuple(0.0 if a == b else cost((a, b)) for b in ring) for a in ring)

    def _sample(self, pair: Pair, link: tuple[float, float]) -> None:
        self._samples.setdefault(pair, deque(maxlen=_SAMPLES)).append(_seconds(link))


def _possible(bytes_per_s: float, latency_s: float) -> tuple[float, float]:
    usable = math.isfinite(bytes_per_s) and bytes_per_s > 0 and latency_s >= 0
    return (bytes_per_s, latency_s) if usable else (0.0, math.inf)


def _seconds(link: tuple[float, float]) -> float:
    bytes_per_s, latency_s = link
    return latency_s + _PROBE_BYTES / bytes_per_s if bytes_per_s > 0 else math.inf


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 1.0
