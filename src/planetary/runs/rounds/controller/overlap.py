"""Training while the contributions to a round are reduced: one object per run, the same for star and ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from planetary.core.configuration.needs import Declares, Need
from planetary.core.configuration.schema import Config
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.sessions import TrainInFlight
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


_DELTAS = Need(
    "sync.compression",
    "workers begin at different places then, and end parameters do not tell how far they moved; take, for example, "
    '"float32"',
    unlike=("none",),
    when={"sync.topology": Declares("in_ring", False)},
)
_DELTAS_IN_RING = Need(
    "sync.precision",
    "that precision sums end parameters, and with overlap the next step is not taken from where they began",
    among=("f32",),
    when={"sync.topology": Declares("in_ring")},
)
_OWN_PART = (
    Need("outer.merge", "a worker cannot tell its own part of it before the others'", having="own_part"),
    Need(
        "outer.merge",
        "a worker cannot tell its own part of it before the others'",
        among=("mean",),
        when={"sync.topology": Declares("in_ring")},
    ),
    Need(
        "outer.optimizer",
        "a worker begins at its own part of the outer step, and a step that is divided by a root has no part of one "
        "worker",
        having="linear",
    ),
)


class Overlap:
    """Lock-step: a round opens when the one before it is finished.

    Attributes:
        overlaps: whether a round opens as soon as the one before it closes.
        carries: whether leases that are not trained when a round closes go on, for the next one.
        keeps_values: whether a worker's next lease starts from its own values.
        gives_early: whether a contributor gets a lease of the next round before this one closes.
        eager: whether a lease may begin with the worker's own part of the round under reduction.
        fragmented: whether a round synchronises one fragment of the parameters.
        relays: whether workers can take the outer step themselves, from all updates of a whole round.
        decide: decides whether the open round closes.
        keys: optional ones of `[sync]` that it uses.
        needs: of the configuration.
    """

    name: ClassVar[str] = "none"
    overlaps: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    keeps_values: ClassVar[bool] = False
    gives_early: ClassVar[bool] = False
    eager: ClassVar[bool] = False
    fragmented: ClassVar[bool] = False
    relays: ClassVar[bool] = True
    decide = staticmethod(decide_round)
    keys: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()

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

    @staticmethod
    def objection(config: Config) -> str:
        """Return why values of the configuration do not suit the overlap, naming the key; "" where they do."""
        return ""


class Delayed(Overlap):
    """A round begins from the newest version, one outer step behind lock-step."""

    name = "async"
    overlaps, relays = True, False
    needs = (_DELTAS_IN_RING, _DELTAS)


class Eager(Delayed):
    """A round begins from the newest version less the worker's own part of the one under reduction.

    arXiv:2502.12996, algorithm 2; see `sync.ring.eager_start`.
    """

    name = "eager"
    eager = relays = True
    needs = (*Delayed.needs, *_OWN_PART)

    def start(self, before: OpenRound | None, own: Sequence[int], behind: Sequence[int], newest: int) -> LeaseStart:
        return LeaseStart(tuple(own), before.tokens) if before is not None and own else LeaseStart()


class Streaming(Delayed):
    """A round goes on from where the worker's last one ended; the fragment under reduction is mixed in on the way.

    arXiv:2501.18512, algorithm 2; see `sync.fragments`. A worker that has contributed to a round goes on at once, for
    the next one: it needs no version before it has trained for τ steps. One that contributed nothing to the round under
    reduction begins at the newest version, with the shared values of all fragments.
    """

    name = "streaming"
    keeps_values = gives_early = fragmented = True
    keys = ("fragments", "delay", "mixing")
    needs = (
        Need("sync.topology", "the workers of a ring have one outer state", lacking="in_ring"),
        Need("fabric.leases", "a fragment is mixed in after a fixed number of a lease's steps", among=("equal",)),
    )

    @staticmethod
    def objection(config: Config) -> str:
        sync, steps = config.sync, config.train.inner_steps
        if sync.delay > steps:
            return (
                f"sync.delay: expected at most train.inner_steps ({steps}), found {sync.delay}: a fragment is taken "
                "before the next one is sent"
            )
        if sync.fragments == 1 and sync.mixing == 0 and sync.delay == steps:
            return (
                f"sync.delay: expected fewer than train.inner_steps ({steps}) with sync.fragments = 1 and sync.mixing "
                "= 0: the shared parameters would replace all that a lease has trained"
            )
        return ""

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

    name = "decoupled"
    carries = True
    decide = staticmethod(decide_quorum)
    keys = (*Streaming.keys, "grace_steps")
    needs = (
        *Streaming.needs,
        Need(
            "sync.compression",
            'end parameters of a worker that missed a version would undo it; take, for example, "float32"',
            unlike=("none",),
        ),
    )

    def stale(self, train: TrainInFlight, policy: ControllerPolicy) -> int:
        """Return the staleness of the fragment that counts, since the worker's version."""
        return policy.missed_of_fragment(max(train.version, train.mixes), train.round)

    def sends(self, train: TrainInFlight | None, version: int) -> bool:
        return train is None or train.mixes == version
