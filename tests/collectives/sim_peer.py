"""A peer of a simulated group: the real machine and operations on the simulated network. It calls: `sim_trainer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sim_master import GRACE_S, SILENT_S, Channel, framed

from planetary.collectives.peer import peer_events as pe
from planetary.collectives.peer.peer_machine import FIRST_SESSION, PeerMachine
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.options import Spec
from planetary.collectives.reduction.operation import Operation, piece_elements
from planetary.collectives.reduction.ring_plan import plan
from planetary.collectives.reduction.small_operations import combine
from planetary.collectives.transport.shared_state import digest
from planetary.wire import Inbox

if TYPE_CHECKING:
    from sim_ring import SimGroup

STALL_S = 5.0


@dataclass
class Running:
    seq: int
    tag: int
    operation: Operation
    neighbours: tuple[str, str]
    begun: float


class SimPeer(ABC):
    """The shell around a `PeerMachine`."""

    def __init__(self, group: SimGroup, name: str) -> None:
        self.group, self.world, self.name = group, group.world, name
        self.dead = self.frozen = False
        self._freezes = 0
        self._held: list[Callable[[], None]] = []  # what happens to a process that is stopped, in order
        self.finished = ""
        self.machine = PeerMachine(self._hello, grace_s=GRACE_S if group.restarts else 0.0)
        self.connection = self._session = 0
        self._up: Channel | None = None
        self._call = 0
        self._then: dict[int, Callable[[pe.FinishCall], None]] = {}
        self.running: dict[int, Running] = {}  # by call
        self._commenced = 0
        self._early: list[tuple[str, tuple[int, int, int, bytes]]] = []
        self._wakes: float | None = None
        self.state = np.zeros(6, np.float32)
        self.revision = 0
        self._fetched: dict[int, np.ndarray] = {}
        self._synced_at: dict[int, tuple[int, int]] = {}
        self._results: dict[int, np.ndarray] = {}  # of this step, by tag
        self._tag_of: dict[int, int] = {}  # by call
        self._then[0] = self.registered
        self._dial(FIRST_SESSION)

    @abstractmethod
    def registered(self, finish: pe.FinishCall) -> None:
        """The first call has ended: what the peer does now."""

    # --- network

    def _dial(self, session: int) -> None:
        master = self.group.master
        if self.dead:
            return
        if master is None or master.dead:
            self.world.after(0.05, lambda: self.handle(pe.Closed(session, "connection refused")))
            return
        self.group.connections += 1
        number = self.connection = self.group.connections
        self._session = session

        def down(item: Any) -> None:
            if self.frozen:
                self._held.append(lambda: down(item))
            elif isinstance(item, str):
                self.broken(number, item)
            elif number == self.connection:
                self.handle(pe.Received(session, item))

        channel = Channel(self.world, down, self.group.slowest)
        master.connections[number] = (self, channel)

        def up(item: Any) -> None:
            if number in master.connections:
                if item is None:
                    del master.connections[number]
                    master.handle(pe.Closed(number, "connection reset"))
                else:
                    master.handle(
                        pe.Received(number, Inbox(m.COLLECTIVES, m.MEMBER).feed(item)[0].message, host="10.0.0.1")
                    )

        self._up = Channel(self.world, up, self.group.slowest)
        self.world.after(0.001, lambda: self.handle(pe.Opened(session)) if number == self.connection else None)

    def broken(self, number: int, reason: str) -> None:
        if number == self.connection and not self.dead:
            self.connection = 0
            self.handle(pe.Closed(self._session, reason))

    def kill(self) -> None:
        self.dead = True
        if self._up is not None:
            self._up.put(None)
        for other in self.group.peers:
            if not other.dead and other is not self:
                peer = self.machine.peer
                self.world.after(
                    self.world.random.uniform(0.0005, 0.02), lambda o=other, p=peer: o.link_fault(p, "reset")
                )

    def freeze(self, for_s: float) -> None:
        """Stop as a process does; the master's side of the connection notices that it is silent."""
        self.frozen = True
        self._freezes += 1
        which = self._freezes
        self.world.after(for_s, self.thaw)
        self.world.after(SILENT_S, lambda: self._silent() if self.frozen and which == self._freezes else None)

    def _silent(self) -> None:
        master, number = self.group.master, self.connection
        if master is None or number not in master.connections or self.dead:
            return
        _, channel = master.connections.pop(number)
        if self.machine.peer:  # registered
            channel.put(m.Removed(reason="it was silent"))
        channel.put("the master closed the connection")
        master.handle(pe.Closed(number, f"was silent for {SILENT_S} s"))

    def thaw(self) -> None:
        self.frozen = False
        held, self._held = self._held, []
        for action in held:
            action()

    def _hello(self) -> m.Register:
        return m.Register(
            protocol=m.PROTOCOL,
            group=0,
            name=self.name,
            host="10.0.0.1",
            port=1,
            machine=self.name[-1],
            digests=("blake2b",),
        )

    # --- the machine

    def handle(self, event: pe.Event) -> None:
        if self.dead:
            return
        if self.frozen:
            self._held.append(lambda: self.handle(event))
            return
        found = self.machine.handle(event, self.world.now)
        self.machine.validate()
        for instruction in found:
            self._carry_out(instruction)
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._wakes is None or deadline < self._wakes):
            self._wakes = deadline
            self.world.at(deadline, lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._wakes == deadline:
            self._wakes = None
            self.handle(pe.Tick())

    def _carry_out(self, instruction: pe.Instruction) -> None:
        match instruction:
            case pe.Send():
                assert self._up is not None
                self._up.put(framed(m.COLLECTIVES, instruction.message))
            case pe.Dial(session):
                self._dial(session)
            case pe.BeginTransfer(call, seq):
                self._begin(call, seq)
            case pe.BeginFetch():
                self._fetch(instruction)
            case pe.FinishCall(call):
                self.world.after(0, lambda: self._finish(instruction))
                running = self.running.pop(call, None)
                if running is not None:
                    self._end_operation(running, instruction)
                elif isinstance(instruction.value, m.Contributions):
                    self._end_small(call, instruction.value)
                elif instruction.error is not None and self.machine.error is None:
                    assert (self.name, call) not in self.group.story.decided, "failed here, succeeded elsewhere"
            case pe.RunProbe(probe):
                speed = 1e6 * (1 + len(probe.to.name))
                done = pe.LinkMeasured(probe.seq, probe.to.peer, speed, 0.01)
                self.world.after(0.1, lambda: self.handle(done))
            case pe.UseTopology():
                for early in [item for item in self._early if item[1][0] <= self._commenced]:
                    self._early.remove(early)
            case pe.Hangup():
                if not self.finished:
                    self.finished = f"out: {instruction.error}"

    def _finish(self, finish: pe.FinishCall) -> None:
        then = self._then.pop(finish.call, None)
        if then is not None and not self.dead:
            then(finish)

    def _launch(self, make: Callable[[int], pe.Event], then: Callable[[pe.FinishCall], None]) -> int:
        self._call += 1
        self._then[self._call] = then
        self.handle(make(self._call))
        return self._call

    # --- collectives

    def inputs(self, step: int, tag: int) -> np.ndarray:
        """Small integers in float32, so that the sum is exact in any order."""
        return ((np.arange(self.group.count) * 7 + step * 3 + tag + ord(self.name[-1])) % 23).astype(np.float32)

    def _begin(self, call: int, seq: int) -> None:
        topology = self.machine.topology
        assert topology is not None
        ring, rank, world = topology.ring, self.machine.rank, len(topology.ring)
        tag = self._tag_of[call]
        work = self.inputs(self.revision, tag)
        piece = piece_elements("f32", 1)
        operation = Operation(
            self._spec(), plan("all_reduce", rank, world, count=len(work), piece=piece), work, work, np.empty_like(work)
        )
        neighbours = (ring[(rank - 1) % world].peer, ring[(rank + 1) % world].peer)
        running = self.running[call] = Running(seq, tag, operation, neighbours, self.world.now)
        self._commenced = max(self._commenced, seq)
        for outgoing in operation.begin():
            self._send(running, outgoing.stage, outgoing.index, bytes(operation.payload(outgoing)))
        if operation.announce():
            self.world.after(0, lambda: self.handle(pe.PiecesComplete(call)))
        self._watch(call, operation, -1)
        early, self._early = self._early, []
        for sender, frame in early:
            self.piece(sender, frame)

    def _watch(self, call: int, operation: Operation, received: int) -> None:
        def look() -> None:
            running = self.running.get(call)
            if running is None or running.operation is not operation or operation.complete:
                return
            if operation.received == received:
                self.handle(pe.LocalFault(call, f"nothing came for {STALL_S} s", running.neighbours[0]))
            else:
                self._watch(call, operation, operation.received)

        self.world.after(STALL_S, look)

    def _send(self, running: Running, stage: int, index: int, data: bytes) -> None:
        target = self.group.by_id(running.neighbours[1])
        if target is None or target.dead:
            call = next((c for c, r in self.running.items() if r is running), 0)
            fault = pe.LocalFault(call, "connection refused", running.neighbours[1])
            self.world.after(0.001, lambda: self.handle(fault))
            return
        self.group.data_channel(self, target).put((self.machine.peer, (running.seq, stage, index, data)))

    def piece(self, sender: str, frame: tuple[int, int, int, bytes]) -> None:
        if self.dead:
            return
        if self.frozen:
            self._held.append(lambda: self.piece(sender, frame))
            return
        seq, stage, index, data = frame
        if seq > self._commenced:
            self._early.append((sender, frame))
            return
        found = next(((c, r) for c, r in self.running.items() if r.seq == seq), None)
        if found is None or found[1].neighbours[0] != sender:
            return  # stale
        call, running = found
        assert running.operation.wire_bytes(stage, index) == len(data)
        target = running.operation.target(stage, index)
        if target is not None:
            target[:] = data
        passed = running.operation.arrived(stage, index, None if target is not None else memoryview(data))
        if passed is not None:
            assert passed.data is not None
            self._send(running, passed.stage, passed.index, bytes(passed.data))
        if running.operation.announce():
            self.handle(pe.PiecesComplete(call))

    def link_fault(self, peer: str, reason: str) -> None:
        for call, running in list(self.running.items()):
            if peer in running.neighbours:
                self.handle(pe.LocalFault(call, reason, peer))

    def _end_operation(self, running: Running, finish: pe.FinishCall) -> None:
        operation, story = running.operation, self.group.story
        operation.close()
        key = (self.group.generation(self), running.seq)
        ok = finish.error is None
        # A peer that is out of the group cannot know the outcome; everybody else must agree.
        if self.machine.error is None:
            assert story.outcomes.setdefault(key, ok) == ok, f"peers differ on the outcome of {key}"
        if ok:
            story.succeeded += 1
            result = operation.work.tobytes()
            assert story.results.setdefault(key, result) == result, f"results of {key} differ"
            self._results[running.tag] = operation.work
        else:
            story.aborted += 1
            operation.restore()
            np.testing.assert_array_equal(operation.work, self.inputs(self.revision, running.tag))

    def _end_small(self, call: int, contributions: m.Contributions) -> None:
        story, tag = self.group.story, self._tag_of[call]
        work = self.inputs(self.revision, tag)
        parts = [np.frombuffer(part, np.float32) for part in contributions.data]
        assert any(np.array_equal(part, work) for part in parts), "the own part is missing"
        combine(self._spec(), contributions.data, work)
        np.testing.assert_array_equal(work, sum(parts, np.zeros_like(work)))
        story.succeeded += 1
        story.small += 1
        self._results[tag] = work

    def _fetch(self, begin: pe.BeginFetch) -> None:
        self._commenced = max(self._commenced, begin.seq)
        self._synced_at[begin.call] = (begin.revision, begin.seq)

        def look() -> None:
            if not begin.fetch:
                self.handle(pe.PiecesComplete(begin.call))
                return
            for donor in begin.fetch[0].donors:
                other = self.group.by_id(donor)
                if other is not None and not other.dead and digest("blake2b", other.state) == begin.fetch[0].digest:
                    self._fetched[begin.call] = other.state.copy()
                    self.handle(pe.PiecesComplete(begin.call))
                    return
            self.handle(pe.LocalFault(begin.call, "no donor is left"))

        self.world.after(self.world.random.uniform(0.001, 0.1), look)

    def _spec(self) -> Spec:
        group = self.group
        return Spec(kind="all_reduce", dtype="f32", count=group.count, op="sum", bits=group.bits, algorithm="min_max")
