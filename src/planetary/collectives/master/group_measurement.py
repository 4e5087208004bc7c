"""How one peer group finds a better ring when its members ask for it: unknown links are measured, a solver is asked,
and the next vote takes its answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from planetary.collectives.master.group_desk import GroupDesk
from planetary.collectives.master.group_links import GroupLinks
from planetary.collectives.master.master_events import Solve
from planetary.collectives.master.ring_order import tour_cost
from planetary.collectives.protocol import collective_messages as m

Pair = tuple[str, str]


@dataclass
class ProbeRound:
    """Progress of the measurements: what is left, and what is under way."""

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
        """Nothing is measured."""
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
        """Links that could not be measured in time are of no use."""
        if self._probe is not None and self._probe.deadline <= now:
            for pair in list(self._probe.outstanding):
                self._links.unusable(pair)
                self._probe.outstanding.discard(pair)

    def lose(self, peer: str) -> None:
        """A peer is gone; drop its outstanding measurements."""
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
