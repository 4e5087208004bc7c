"""How one peer group finds a better ring when its members ask for it: unknown links are measured, a solver is asked,
and the next vote takes its answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from planetary.collectives.master.group_desk import GroupDesk
from planetary.collectives.master.group_links import GroupLinks
from planetary.collectives.master.master_events import Solve
from planetary.collectives.master.probe_schedule import ProbeRound, schedule
from planetary.collectives.master.ring_order import tour_cost
from planetary.collectives.protocol import messages as m

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
        """A peer is gone; nobody waits for its measurements."""
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
