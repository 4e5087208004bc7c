"""A limit on how often one client may ask: so many requests a second on average, with a burst at the beginning.

The generic cell rate algorithm in the virtual-scheduling form (ITU-T I.371, annex A): a client has one number, the time
at which all requests are paid for. It is apart from the queue of a served model (`serve.queue`), which bounds the texts
that wait for workers, of all clients together.
"""

from __future__ import annotations

import math

MOST_CLIENTS = 4096
"""Clients remembered at once; beyond, the one that has not asked for longest is forgotten."""


class RateLimit:
    """One per server. Times are monotonic, in seconds."""

    def __init__(self, per_second: float, burst: int) -> None:
        """Allow `burst` requests at once, and `per_second` on average after them; both above 0."""
        self._interval, self._burst = 1.0 / per_second, burst
        self._paid: dict[str, float] = {}  # client -> when its requests are paid for

    def wait(self, client: str, now: float) -> float:
        """Count a request of a client; return 0.0, or the seconds to wait, and then it is not counted."""
        paid = max(now, self._paid.get(client, -math.inf))
        late = paid - (now + (self._burst - 1) * self._interval)
        if late > 1e-9:
            return late
        self._paid.pop(client, None)  # the place is that of the newest request
        if len(self._paid) >= MOST_CLIENTS:
            del self._paid[next(iter(self._paid))]
        self._paid[client] = paid + self._interval
        return 0.0
