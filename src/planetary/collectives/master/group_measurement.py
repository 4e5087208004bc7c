"""The links of one peer group are measured for a better ring, when members ask for one and in the background.

On request unknown links are measured, a solver is asked, and the next vote takes the answer. In the background a ring
follows a changing network, which PCCL's report leaves as future work (the "moonshot"). At most one link of a group is
measured there at a time, for `WATCH_PROBE_S` every `period_s`, and only while no operation of the group runs: a probe
and an operation on one link would each find the other's share of it. A better ring is laid by the next vote, as after
`optimize_topology`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from planetary.collectives.master.events import Solve
from planetary.collectives.master.group_desk import GroupDesk
from planetary.collectives.master.group_links import GroupLinks, Pair
from planetary.collectives.master.ring_order import tour_cost
from planetary.collectives.protocol import messages as m

WATCH_PROBE_S = 0.1
_ANSWER_S = 1.0  # slack of a measurement; a later answer counts as a failure
_WATCH_WORTH = 0.9  # a ring that takes more of the time of the present one is not worth the change
_MOVED = 0.1  # the solver is asked again when a link's time has changed by this share
_LONGEST_PAUSE = 16  # times `period_s`, in a group whose operations leave no time


@dataclass
class _Probe:
    """The measurement under way."""

    pair: Pair
    seq: int
    deadline: float
    disturbed: bool = False  # an operation began meanwhile: the result is invalid


class LinkWatch:
    """Part of a `GroupMachine`.

    The present ring's hops are judged by the best of their last measurements, all others by the worst: noise alone
    does not make another ring look better, and a link that did not answer lately is not taken.
    """

    def __init__(self, desk: GroupDesk, links: GroupLinks, period_s: float) -> None:
        """`period_s`: seconds from one measurement to the next; 0 for none."""
        self._desk, self._links, self._period = desk, links, period_s
        self._probe: _Probe | None = None
        self._due = math.inf  # time of the next measurement; infinite until there is a ring to watch
        self._pause = 1  # times `period_s`
        self._tried: dict[Pair, float] = {}  # when a link was last measured here
        self._solving = False
        self._asked: tuple[tuple[str, ...], tuple[tuple[float, ...], ...]] | None = None  # the solver's last question
        self.better: tuple[str, ...] | None = None

    def check(self, now: float, *, quiet: bool) -> None:
        """Begin the next measurement if it is time. `quiet`: nothing of the group uses the links."""
        if not self._watches():
            self._due = math.inf
            return
        if math.isinf(self._due):
            self._due = now + self._period
        if self._probe is not None:
            self._probe.disturbed |= not quiet
        elif quiet and now >= self._due:
            self._begin(now)

    def measured(self, peer: str, message: m.Measured, now: float) -> None:
        """A peer has measured the way to another one; not every such message is an answer to this part."""
        probe = self._probe
        if probe is None or (probe.seq, probe.pair) != (message.seq, (peer, message.to)):
            return
        self._probe = None
        if probe.disturbed:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = 1
            self._links.sampled(probe.pair, message.bytes_per_s, message.latency_s)
            self._seek()
        self._due = now + self._pause * self._period

    def deadline(self, *, quiet: bool) -> float:
        """When `check` or `expire` has something to do; infinite for never."""
        if self._probe is not None:
            return self._probe.deadline
        return self._due if quiet else math.inf

    def expire(self, now: float) -> None:
        """Record a link not measured in time as unreachable."""
        if self._probe is not None and self._probe.deadline <= now:
            pair, seq = self._probe.pair, self._probe.seq
            self.measured(pair[0], m.Measured(seq=seq, to=pair[1], bytes_per_s=0.0, latency_s=0.0), now)

    def lose(self, peer: str, now: float) -> None:
        """Drop the measurements of a lost peer."""
        for pair in [pair for pair in self._tried if peer in pair]:
            del self._tried[pair]
        if self._probe is not None and peer in self._probe.pair:
            self._probe, self._due = None, now + self._period

    def solved(self, peers: tuple[str, ...], order: tuple[int, ...] | None) -> None:
        """The solver's answer for a ring of `peers`; None: there is no ring."""
        self._solving = False
        if order is None or peers != tuple(self._desk.ring):
            return
        costs = self._links.cautious_costs(self._desk.ring)
        if tour_cost(costs, order) < _WATCH_WORTH * tour_cost(costs, range(len(peers))):
            self.better = tuple(peers[i] for i in order)

    def _watches(self) -> bool:
        """Whether there is a choice: other rings, over links that differ."""
        machines = {self._desk.peers[peer].info.machine for peer in self._desk.ring}
        return self._period > 0 and len(self._desk.ring) >= 3 and len(machines) > 1

    def _begin(self, now: float) -> None:
        desk = self._desk
        there = [peer for peer in desk.ring if desk.peers[peer].connection is not None]
        pairs = [(a, b) for a in there for b in there if a != b]
        if not pairs:  # of a restarted master's members none or one is back
            self._due = now + self._period
            return
        # Links without enough measurements first, then those that were measured longest ago.
        pair = min(pairs, key=lambda pair: (self._links.is_settled(pair), self._tried.get(pair, -math.inf)))
        self._tried[pair] = now
        self._probe = _Probe(pair, desk.next_seq(), now + WATCH_PROBE_S + _ANSWER_S)
        desk.answer(pair[0], m.Probe(seq=self._probe.seq, to=desk.peers[pair[1]].info, seconds=WATCH_PROBE_S))

    def _seek(self) -> None:
        """Ask for a ring when all links are known and have changed since the last question."""
        ring = tuple(self._desk.ring)
        if self._solving or not all(self._links.is_settled((a, b)) for a in ring for b in ring if a != b):
            return
        costs = self._links.cautious_costs(ring)
        if self._asked is not None and self._asked[0] == ring and not _moved(self._asked[1], costs):
            return
        self._asked, self._solving = (ring, costs), True
        self._desk.out.append(Solve(self._desk.number, ring, costs, "watch"))


def _moved(before: tuple[tuple[float, ...], ...], after: tuple[tuple[float, ...], ...]) -> bool:
    pairs = zip((cost for row in before for cost in row), (cost for row in after for cost in row), strict=True)
    return any(a != b and not abs(a - b) < _MOVED * min(a, b) for a, b in pairs)


@dataclass
class ProbeRound:
    """Progress of the measurements: remaining rounds, and measurements under way."""

    rounds: list[list[Pair]]
    seq: int = 0
    deadline: float = 0.0
    outstanding: set[Pair] = field(default_factory=set)


def schedule(peers: Sequence[str], known: Collection[Pair]) -> list[list[Pair]]:
    """Return rounds of (from, to) for every ordered pair that is not known (the circle method of tournaments)."""
    places: list[str | None] = [*peers]
    if len(places) % 2:
        places.append(None)  # the peer without a partner rests
    rounds: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        pairs = [(places[i], places[-1 - i]) for i in range(len(places) // 2)]
        for backward in (False, True):
            directed = [(b, a) if backward else (a, b) for a, b in pairs if a is not None and b is not None]
            left = [(a, b) for a, b in directed if a is not None and b is not None and (a, b) not in known]
            if left:
                rounds.append(left)
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


_PROBE_S = 0.4
_PROBE_SLACK_S = 5.0
_WORTH = 0.99  # a ring that takes more of the time of the present one is not worth the change


class RingMeasurement:
    """Part of a `GroupMachine`."""

    def __init__(self, desk: GroupDesk, links: GroupLinks) -> None:
        """Start without a measurement."""
        self._desk, self._links = desk, links
        self._probe: ProbeRound | None = None
        self._callers: dict[str, m.Optimize] = {}
        self.better: tuple[str, ...] | None = None

    @property
    def under_way(self) -> bool:
        """Whether links are being measured."""
        return self._probe is not None

    def begin(self, callers: Mapping[str, m.Optimize]) -> None:
        """All members have called `optimize_topology`."""
        self._callers = dict(callers)
        self._probe = ProbeRound(schedule(self._desk.ring, self._links.known()))

    def check(self, now: float) -> bool:
        """Go on when the present measurements are over; true when something has happened."""
        probe, desk = self._probe, self._desk
        if probe is None or probe.outstanding:
            return False
        if probe.rounds:
            probe.seq, probe.deadline = desk.next_seq(), now + _PROBE_S + _PROBE_SLACK_S
            pairs = [(a, b) for a, b in probe.rounds.pop(0) if a in desk.ring and b in desk.ring]
            probe.outstanding = set(pairs)
            for a, b in pairs:
                desk.answer(a, m.Probe(seq=probe.seq, to=desk.peers[b].info, seconds=_PROBE_S))
            return True
        self._probe = None
        if self._callers:
            desk.out.append(Solve(desk.number, tuple(desk.ring), self._links.costs(desk.ring), "better"))
        return True

    def measured(self, peer: str, message: m.Measured) -> None:
        """A peer has measured the way to another one."""
        probe = self._probe
        if probe is None or message.seq != probe.seq or (peer, message.to) not in probe.outstanding:
            return
        probe.outstanding.discard((peer, message.to))
        self._links.measured((peer, message.to), message.bytes_per_s, message.latency_s)

    def deadline(self) -> float:
        """When `expire` has something to do; infinite for never."""
        return self._probe.deadline if self._probe is not None and self._probe.outstanding else math.inf

    def expire(self, now: float) -> None:
        """Mark links that could not be measured in time as unusable."""
        if self._probe is not None and self._probe.deadline <= now:
            for pair in list(self._probe.outstanding):
                self._links.unusable(pair)
                self._probe.outstanding.discard(pair)

    def lose(self, peer: str) -> None:
        """Drop the outstanding measurements of a lost peer."""
        self._callers.pop(peer, None)
        if self._probe is not None:
            self._probe.outstanding = {pair for pair in self._probe.outstanding if peer not in pair}

    def solved(self, peers: tuple[str, ...], order: tuple[int, ...] | None) -> None:
        """The solver's answer for a ring of `peers`; None: there is no ring."""
        desk, gain = self._desk, 1.0
        if order is not None and peers == tuple(desk.ring):
            costs = self._links.costs(desk.ring)
            before, after = tour_cost(costs, range(len(peers))), tour_cost(costs, order)
            if after < _WORTH * before:
                self.better = tuple(peers[i] for i in order)
                gain = before / after if math.isfinite(before) else math.inf
        desk.count(optimizes=desk.counts.optimizes + 1)
        for peer, request in self._callers.items():
            desk.answer(peer, m.Optimized(call=request.call, counts=desk.counts, gain=min(gain, 1e9)))
        self._callers = {}
