"""A slow network in bytes and seconds: how much may enter a link now, and when it comes out. No sockets, no clock.

`shaped_relay` moves real connections through it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from planetary.core.errors import UserError

QUANTUM = 32 << 10
"""Bytes for which it is worth waking up: a flow with room for less waits until there is room for as many. Fast flows
wait for what `_QUANTUM_S` let through.
"""

_QUANTUM_S = 0.003
_BURST_S = 0.005  # what a rested link lets through at once; several ticks of the relay's timer
_LATE_S = 0.2  # how late a sender with more to send may be served without loss; busy machines serve late
_ROUNDING_S = 1e-9  # at the moment that `when` names there is room whatever floats do
_HELD_MOST = 64 << 20  # bytes of one flow on the way; more wait where they come from


class TokenBucket:
    """A limit of bytes per second, with some that may pass at once after a rest. Shared by several flows or not.

    A sender that always has data gets the whole rate even if it is served late; `rested` marks idle time.
    """

    def __init__(self, bytes_per_s: float, *, burst: int | None = None) -> None:
        """Full at the start. `bytes_per_s` may be infinite; `burst` is by default what 5 ms let through.

        Raises `UserError` for a rate or burst that lets nothing pass.
        """
        if not bytes_per_s > 0 or (burst is not None and burst < 1):
            raise UserError(f"a link must let something pass: {bytes_per_s} bytes/s with bursts of {burst} bytes")
        self.bytes_per_s = bytes_per_s
        default = _HELD_MOST if math.isinf(bytes_per_s) else max(bytes_per_s * _BURST_S, 2 * QUANTUM)
        self.burst = float(default if burst is None else burst)
        self._tokens = self.burst
        self._at = -math.inf  # when `_tokens` was right; before the first use it is full whatever the time

    def rested(self, now: float) -> None:
        """The way was idle until now: no more than a burst has come together."""
        self._tokens, self._at = min(self._refilled(now), self.burst), max(now, self._at)

    def room(self, now: float) -> int:
        """Whole bytes that may pass now."""
        return int(self._refilled(now))

    def take(self, count: int, now: float) -> None:
        """`count` bytes pass; more than `room` make those that follow wait longer."""
        self._tokens = self._refilled(now) - count
        self._at = max(now, self._at)

    def when(self, count: int) -> float:
        """The moment at which `count` bytes, or a whole burst if that is less, have room; may lie in the past."""
        missing = min(count, self.burst) - self._tokens
        if missing <= 0 or math.isinf(self.bytes_per_s):
            return self._at
        return self._at + missing / self.bytes_per_s + _ROUNDING_S

    def _refilled(self, now: float) -> float:
        if math.isinf(self.bytes_per_s) or math.isinf(self._at):
            return self.burst
        most = self.burst + _LATE_S * self.bytes_per_s
        return min(self._tokens + max(now - self._at, 0.0) * self.bytes_per_s, most)


@dataclass(frozen=True)
class Way:
    """One direction between two places.

    Attributes:
        delay_s: seconds that a byte travels.
        flow_bytes_per_s: limit of each connection by itself.
        shared: limits that all connections on this way share, e.g. a trunk between two regions.
    """

    delay_s: float = 0.0
    flow_bytes_per_s: float = math.inf
    shared: tuple[TokenBucket, ...] = ()


class Flow:
    """One direction of one connection: bytes enter as the limits allow and come out `delay_s` later, in order.

    It counts them; who uses it keeps them.
    """

    def __init__(self, way: Way, opens_at: float) -> None:
        """Nothing enters before `opens_at`, when the connection is established."""
        self._delay_s, self._opens_at = way.delay_s, opens_at
        self._buckets: Sequence[TokenBucket] = (TokenBucket(way.flow_bytes_per_s), *way.shared)
        slowest = min(bucket.bytes_per_s for bucket in self._buckets)
        worth = QUANTUM if math.isinf(slowest) else max(QUANTUM, int(slowest * _QUANTUM_S))
        self._quantum = min(worth, *(int(bucket.burst) for bucket in self._buckets))
        self._line: deque[tuple[float, int]] = deque()
        self._held = 0
        self._resting = True
        self._ends_at = math.inf
        self.ended = False  # whether the end has entered

    @property
    def held(self) -> int:
        """Bytes that have entered and not come out."""
        return self._held

    def room(self, now: float) -> int:
        """Bytes that may enter now; 0 until there is room for some at once."""
        if self.ended or now < self._opens_at or self._held >= _HELD_MOST:
            return 0
        if self._resting:
            self._buckets[0].rested(now)
        room = min(bucket.room(now) for bucket in self._buckets)
        return room if room >= self._quantum else 0

    def enter(self, count: int, now: float) -> None:
        """Bytes enter; `room` said how many may."""
        self._resting = False
        for bucket in self._buckets:
            bucket.take(count, now)
        self._held += count
        self._line.append((now + self._delay_s, count))

    def end(self, now: float) -> None:
        """The sender has ended the stream."""
        self.ended, self._ends_at = True, now + self._delay_s

    def rest(self) -> None:
        """The sender has nothing to send now."""
        self._resting = True

    def come_out(self, now: float) -> int:
        """Return how many bytes have arrived by now, since the last time."""
        out = 0
        while self._line and self._line[0][0] <= now:
            out += self._line.popleft()[1]
        self._held -= out
        return out

    def over(self, now: float) -> bool:
        """Whether the end has arrived, after all bytes."""
        return self._ends_at <= now and not self._line

    def next_arrival(self) -> float:
        """When something comes out next, the end too; infinite when nothing is on the way."""
        return self._line[0][0] if self._line else self._ends_at

    def next_room(self, now: float) -> float:
        """When something may enter again, if nothing may now; infinite when only an arrival can change that."""
        if self.ended or self._held >= _HELD_MOST:
            return math.inf
        return max(self._opens_at, now, *(bucket.when(self._quantum) for bucket in self._buckets))
