"""Simulated time: a queue of things that will happen, and the clock that they happen on."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from planetary.simulation.clock import FakeClock


class World:
    """Runs scheduled actions in the order of their times; equal times in the order of scheduling.

    Everything random in a simulation is drawn from `random`, so one seed gives one story.
    """

    def __init__(self, seed: int) -> None:
        """Start at time 0."""
        self.clock = FakeClock()
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    @property
    def now(self) -> float:
        """Simulated monotonic seconds."""
        return self.clock.monotonic()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do `action` at `time`, or now when that has passed."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._count), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until` is true. Returns false when nothing is left to happen, or `limit_s` is reached."""
        while not until():
            if not self._queue or self._queue[0][0] > limit_s:
                return False
            time, _, action = heapq.heappop(self._queue)
            self.clock.advance_to(time)
            action()
        return True
