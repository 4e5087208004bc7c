"""What is trained while the contributions to a round are reduced: one object per run, the same for star and ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planetary.fabric.protocol.state import OpenRound


class LeaseStart(msgspec.Struct, frozen=True):
    """Where a lease begins, beside the newest version.

    Attributes:
        ahead: the worker's own tasks of the round under reduction, whose part it begins with.
        ahead_tokens: behind all contributions to that round.
        after: streaming: the worker's own task whose end parameters it goes on from; 0: from the newest version.
        mixes: streaming: the version whose fragment is mixed in during the lease; -1: none.
    """

    ahead: tuple[int, ...] = ()
    ahead_tokens: int = 0
    after: int = 0
    mixes: int = -1


class Overlap:
    """Lock-step: a round opens when the one before it is finished.

    Attributes:
        overlaps: whether a round opens as soon as the one before it closes.
    """

    overlaps = False

    def start(self, closing: OpenRound | None, own: Sequence[int]) -> LeaseStart:
        """Return where a worker begins its next lease.

        Args:
            closing: the round under reduction, if any.
            own: the worker's tasks that contributed to it.
        """
        return LeaseStart()


class Delayed(Overlap):
    """A round begins from the newest version, one outer step behind lock-step."""

    overlaps = True


class Eager(Delayed):
    """A round begins from the newest version less the worker's own part of the one under reduction.

    arXiv:2502.12996, algorithm 2; see `diloco.ring.eager_start`.
    """

    def start(self, closing: OpenRound | None, own: Sequence[int]) -> LeaseStart:
        """See `Overlap`."""
        return LeaseStart(tuple(own), closing.tokens) if closing is not None and own else LeaseStart()


class Streaming(Delayed):
    """A round goes on from where the worker's last one ended; the fragment under reduction is mixed in on the way.

    arXiv:2501.18512, algorithm 2; see `diloco.fragments`. A worker that contributed nothing to the round under
    reduction begins at the newest version, with the shared values of all fragments.
    """

    def start(self, closing: OpenRound | None, own: Sequence[int]) -> LeaseStart:
        """See `Overlap`."""
        return LeaseStart() if closing is None else LeaseStart(after=max(own, default=0), mixes=closing.round)


OVERLAPS: Mapping[str, type[Overlap]] = {
    "none": Overlap,
    "async": Delayed,
    "eager": Eager,
    "streaming": Streaming,
}
"""By the values of `sync.overlap`."""
