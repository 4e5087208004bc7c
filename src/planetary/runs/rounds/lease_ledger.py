"""Which leases are free, held or trained: pure and replayable. `data.slices` says which tokens a lease stands for."""

from __future__ import annotations

from bisect import bisect_left, insort

import msgspec

from planetary.core.errors import LocalProtocolError


class LeaseLedger(msgspec.Struct):
    """Which leases are free, held, or trained. Every lease is in exactly one of these states.

    Leases below `next` were handed out at least once; of these, `returned` are free again, `held` are being trained,
    and all others are trained. A trained lease is never handed out again unless the result is lost (`retract`), so
    every token counts once. The whole state is three JSON fields and depends only on the calls made, so replaying the
    calls rebuilds it.
    """

    next: int = 0  # the first lease that was never handed out
    returned: list[int] = []  # free again, ascending
    held: list[int] = []  # ascending

    @property
    def trained(self) -> int:
        """Number of leases that were completed."""
        return self.next - len(self.returned) - len(self.held)

    def peek(self) -> int:
        """Return the next lease of `take`: the oldest returned one, else a new one."""
        return self.returned[0] if self.returned else self.next

    def free(self, count: int) -> list[int]:
        """Return the leases of the next `count` calls of `take`."""
        old = self.returned[:count]
        return [*old, *range(self.next, self.next + count - len(old))]

    def take(self) -> int:
        """Hand out the oldest free lease."""
        lease = self.peek()
        if self.returned:
            del self.returned[0]
        else:
            self.next += 1
        insort(self.held, lease)
        return lease

    def give_back(self, lease: int) -> None:
        """Make a held lease free again, untrained.

        Raises:
            LocalProtocolError: it has no holder.
        """
        self._release(lease, "given back")
        insort(self.returned, lease)

    def complete(self, lease: int) -> None:
        """Count a held lease as trained, for good.

        Raises:
            LocalProtocolError: it has no holder.
        """
        self._release(lease, "completed")

    def retract(self, lease: int) -> None:
        """Make a trained lease a held one again: the training is lost before it counted.

        Raises:
            LocalProtocolError: it is not trained.
        """
        if lease >= self.next or lease in self.returned or lease in self.held:
            raise LocalProtocolError(f"lease {lease} cannot be retracted: it is not trained")
        insort(self.held, lease)

    def copy(self) -> LeaseLedger:
        """Return an independent copy."""
        return LeaseLedger(self.next, list(self.returned), list(self.held))

    def _release(self, lease: int, what: str) -> None:
        position = bisect_left(self.held, lease)
        if position == len(self.held) or self.held[position] != lease:
            state = "free" if lease >= self.next or lease in self.returned else "trained already"
            raise LocalProtocolError(f"lease {lease} cannot be {what}: no worker holds it, it is {state}")
        del self.held[position]


def check_ledger(ledger: LeaseLedger) -> str:
    """Return the defect of a ledger read from a file, or "" when it is consistent."""
    for name, leases in (("returned", ledger.returned), ("held", ledger.held)):
        if leases != sorted(set(leases)) or (leases and not 0 <= leases[0] <= leases[-1] < ledger.next):
            return f"its {name} leases are not ascending numbers below {ledger.next}"
    if set(ledger.returned) & set(ledger.held):
        return "a lease is both held and returned"
    return ""
