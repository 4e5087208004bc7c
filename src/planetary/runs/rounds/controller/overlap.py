"""Training while the contributions to a round are reduced: one object per run, the same for star and ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planetary.fleet.protocol.policy import ControllerPolicy
from planetary.fleet.protocol.sessions import TrainInFlight
from planetary.runs.rounds.state import OpenRound
from planetary.sync.rounds import decide_quorum, decide_round


class LeaseStart(msgspec.Struct, frozen=True):
    """Where a lease begins, beside the newest version.

    Attributes:
        ahead: the worker's own tasks of the round under reduction, whose part it begins with.
        ahead_tokens: behind all contributions to that round.
        after: streaming: the worker's own task whose end parameters it goes on from; 0: from the newest version.
        missed: decoupled: versions since the worker's own values, whose fragments are mixed in at the start.
        mixes: streaming: the version whose fragment is mixed in during the lease; -1: none.
    """

    ahead: tuple[int, ...] = ()
    ahead_tokens: int = 0
    after: int = 0
    missed: tuple[int, ...] = ()
    mixes: int = -1


class Overlap:
    """Lock-step: a round opens when the one before it is finished.

    Attributes:
        overlaps: whether a round opens as soon as the one before it closes.
        carries: whether leases that are not trained when a round closes go on, for the next one.
        keeps_values: whether a worker's next lease starts from its own values.
        gives_early: whether a contributor gets a lease of the next round before this one closes.
        decide: decides whether the open round closes.
    """

    overlaps = False
    carries = keeps_values = gives_early = False
    decide = staticmethod(decide_round)

    def start(self, before: OpenRound | None, own: Sequence[int], behind: Sequence[int], newest: int) -> LeaseStart:
        """Return where a worker begins the next lease.

        Args:
            before: the round before the lease's, under reduction or still open; None: it is finished.
            own: the worker's tasks that contributed to it.
            behind: versions up to the newest that are not in the worker's own values.
            newest: version.
        """
        return LeaseStart()

    def stale(self, train: TrainInFlight, policy: ControllerPolicy) -> int:
        """Return the staleness of a contribution in versions, where it lowers the weight."""
        return 0

    def sends(self, train: TrainInFlight | None, version: int) -> bool:
        """Whether a version is sent to a worker with this lease as soon as it exists."""
        return True


class Delayed(Overlap):
    """A round begins from the newest version, one outer step behind lock-step."""

    overlaps = True


class Eager(Delayed):
    """A round begins from the newest version less the worker's own part of the one under reduction.

    arXiv:2502.12996, algorithm 2; see `sync.ring.eager_start`.
    """

    def start(self, before: OpenRound | None, own: Sequence[int], behind: Sequence[int], newest: int) -> LeaseStart:
        return LeaseStart(tuple(own), before.tokens) if before is not None and own else LeaseStart()


class Streaming(Delayed):
    """A round goes on from where the worker's last one ended; the fragment under reduction is mixed in on the way.

    arXiv:2501.18512, algorithm 2; see `sync.fragments`. A worker that has contributed to a round goes on at once, for
    the next one: it needs no version before it has trained for τ steps. One that contributed nothing to the round under
    reduction begins at the newest version, with the shared values of all fragments.
    """

    keeps_values = gives_early = True

    def start(self, before: OpenRound | None, own: Sequence[int], behind: Sequence[int], newest: int) -> LeaseStart:
        if before is None:
            return LeaseStart()
        missed = tuple(behind) if own else ()
        return LeaseStart(after=max(own, default=0), missed=missed, mixes=newest + 1)


class Decoupled(Streaming):
    """Streaming in which a quorum closes a round, and the others' leases go on (arXiv:2604.21428).

    A continued lease counts in the round open at its end, for that round's fragment. A worker in such a lease gets no
    version before the end of it. The grace time after a quorum is the one for which workers that have contributed can
    go on without a version.
    """

    carries = True
    decide = staticmethod(decide_quorum)

    def stale(self, train: TrainInFlight, policy: ControllerPolicy) -> int:
        """Return the staleness of the fragment that counts, since the worker's version."""
        return policy.missed_of_fragment(max(train.version, train.mixes), train.round)

    def sends(self, train: TrainInFlight | None, version: int) -> bool:
        return train is None or train.mixes == version


OVERLAPS: Mapping[str, type[Overlap]] = {
    "none": Overlap,
    "async": Delayed,
    "eager": Eager,
    "streaming": Streaming,
    "decoupled": Decoupled,
}
"""By the values of `sync.overlap`."""
