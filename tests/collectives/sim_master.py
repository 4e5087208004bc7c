"""The real master of a simulated group, and the ways between it and the peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from planetary.collectives.master import master_events as me
from planetary.collectives.master.master_machine import MasterMachine
from planetary.collectives.master.ring_order import solve
from planetary.collectives.protocol import messages as m
from planetary.machine import events as k
from planetary.simulation.world import World
from planetary.wire import Inbox, Outbox, Protocol

if TYPE_CHECKING:
    from sim_peer import SimPeer
    from sim_ring import SimGroup

SILENT_S = 4.0
GRACE_S = 10.0


def framed(protocol: Protocol, message: m.Message) -> bytes:
    """Encode a message, as a connection's first."""
    return Outbox(protocol, m.MEMBER).frame_of(message)


class Channel:
    """A first-in first-out way from one to another, with random delays, until it breaks."""

    def __init__(self, world: World, deliver: Callable[[Any], None], slowest_s: float) -> None:
        self._world, self._deliver, self._slowest = world, deliver, slowest_s
        self._last = 0.0
        self.open = True

    def put(self, item: Any) -> None:
        if self.open:
            at = max(self._world.now + self._world.random.uniform(0.0002, self._slowest), self._last)
            self._last = at
            self._world.at(at, lambda: self._deliver(item) if self.open else None)


class SimMaster:
    def __init__(self, group: SimGroup) -> None:
        self.group, self.dead = group, False
        count = iter(range(1, 1_000_000))
        life = group.lives
        self.machine = MasterMachine(
            lambda: str(life * 1_000_000 + next(count)), silent_s=SILENT_S, remeasure_s=group.remeasure_s
        )
        self.machine.restore(group.journal, group.world.now, GRACE_S)
        group.journal = self.machine.records()
        self.connections: dict[int, tuple[SimPeer, Channel]] = {}
        self._wakes: float | None = None
        self._schedule()

    def handle(self, event: k.Event) -> None:
        if self.dead:
            return
        found = self.machine.handle(event, self.group.world.now)
        self.machine.validate()
        for instruction in found:
            match instruction:
                case k.Send(number, message):
                    if number in self.connections:
                        if isinstance(message, m.Contributions):
                            self.group.story.decided.add((self.connections[number][0].name, message.call))
                        self.connections[number][1].put(
                            Inbox(m.COLLECTIVES, m.MEMBER).feed(framed(m.COLLECTIVES, message))[0].message
                        )
                case k.Close(number, reason):
                    closed = self.connections.pop(number, None)
                    if closed is not None:
                        closed[1].put(reason)  # a string: the end of the stream
                case k.Append(record):
                    self.group.journal.append(record)
                case me.Solve(number, peers, costs, purpose):
                    found = me.Solved(number, peers, solve(costs), purpose)
                    self.group.world.after(0.05, partial(self.handle, found))
        self._schedule()

    def _schedule(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._wakes is None or deadline < self._wakes):
            self._wakes = deadline
            self.group.world.at(deadline, lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._wakes == deadline:
            self._wakes = None
            self.handle(k.Tick())
