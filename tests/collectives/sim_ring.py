"""A simulated group: the real master, peers and operations, on a simulated clock and network, with faults.

Each peer runs the program of a data-parallel trainer: vote, synchronise the state, reduce several arrays at once,
change the state by the results, and again. After every event the invariants are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from planetary.collectives import master_events as me
from planetary.collectives import messages as m
from planetary.collectives import peer_events as pe
from planetary.collectives.errors import AbortedError, RemovedError
from planetary.collectives.master_machine import MasterMachine
from planetary.collectives.operation import Operation, piece_elements
from planetary.collectives.options import Spec, SyncStrategy
from planetary.collectives.peer_machine import PeerMachine
from planetary.collectives.ring_order import solve
from planetary.collectives.ring_plan import plan
from planetary.collectives.shared_state import digest
from planetary.collectives.small_operations import combine, is_small
from planetary.testing.world import World

STALL_S = 5.0
TIMEOUT_S = 60.0
GRACE_S = 10.0
RESTART_S = 0.7
SILENT_S = 4.0
TAGS = 2


@dataclass
class Story:
    """What all peers saw, for the invariants."""

    outcomes: dict[tuple[int, int], bool] = field(default_factory=dict)  # (incarnation of the group, seq)
    results: dict[tuple[int, int], bytes] = field(default_factory=dict)
    states: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)
    decided: set[tuple[str, int]] = field(default_factory=set)  # (peer, call) of small operations that succeeded
    succeeded: int = 0
    small: int = 0  # of these: through the master
    aborted: int = 0
    synced: int = 0
    struck: list[str] = field(default_factory=list)


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
        self.machine = MasterMachine(lambda: str(life * 1_000_000 + next(count)), silent_s=SILENT_S)
        self.machine.restore(group.journal, group.world.now, GRACE_S)
        group.journal = self.machine.records()
        self.connections: dict[int, tuple[SimPeer, Channel]] = {}
        self._wakes: float | None = None
        self._schedule()

    def handle(self, event: me.Event) -> None:
        if self.dead:
            return
        for instruction in self.machine.handle(event, self.group.world.now):
            match instruction:
                case me.Send(number, message):
                    if number in self.connections:
                        if isinstance(message, m.Contributions):
                            self.group.story.decided.add((self.connections[number][0].name, message.call))
                        self.connections[number][1].put(m.Unpacker(at_master=False).feed(m.pack(message))[0])
                case me.Close(number, reason):
                    closed = self.connections.pop(number, None)
                    if closed is not None:
                        closed[1].put(reason)  # a string: the end of the stream
                case me.Append(record):
                    self.group.journal.append(record)
                case me.Solve(number, peers, costs):
                    found = me.Solved(number, peers, solve(costs))
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
            self.handle(me.Tick())


@dataclass
class Running:
    seq: int
    tag: int
    operation: Operation
    neighbours: tuple[str, str]
    begun: float


class SimPeer:
    """The shell around a `PeerMachine`, and the user's program."""

    def __init__(self, group: SimGroup, name: str) -> None:
        self.group, self.world, self.name = group, group.world, name
        self.dead = self.frozen = False
        self._held: list[Callable[[], None]] = []  # what happens to a process that is stopped, in order
        self.finished = ""
        self.machine = PeerMachine(self._hello, grace_s=GRACE_S if group.restarts else 0.0)
        self.connection = 0
        self._up: Channel | None = None
        self._call = 0
        self._then: dict[int, Callable[[pe.Finish], None]] = {}
        self.running: dict[int, Running] = {}  # by call
        self._commenced = 0
        self._early: list[tuple[str, tuple[int, int, int, bytes]]] = []
        self._wakes: float | None = None
        self.state = np.zeros(6, np.float32)
        self.revision = 0
        self._fetched: dict[int, np.ndarray] = {}
        self._synced_at: dict[int, tuple[int, int]] = {}
        self._then[0] = lambda finish: self._vote() if finish.error is None else self._ended(finish)
        self._dial()

    # --- network

    def _dial(self) -> None:
        master = self.group.master
        if self.dead:
            return
        if master is None or master.dead:
            self.world.after(0.05, lambda: self.handle(pe.Disconnected("connection refused")))
            return
        self.group.connections += 1
        number = self.connection = self.group.connections

        def down(item: Any) -> None:
            if self.frozen:
                self._held.append(lambda: down(item))
            elif isinstance(item, str):
                self.broken(number, item)
            elif number == self.connection:
                self.handle(pe.FromMasterReceived(item))

        channel = Channel(self.world, down, self.group.slowest)
        master.connections[number] = (self, channel)

        def up(item: Any) -> None:
            if number in master.connections:
                if item is None:
                    del master.connections[number]
                    master.handle(me.Closed(number, "connection reset"))
                else:
                    master.handle(me.Received(number, m.Unpacker(at_master=True).feed(item)[0], "10.0.0.1"))

        self._up = Channel(self.world, up, self.group.slowest)
        self.world.after(0.001, lambda: self.handle(pe.Connected()) if number == self.connection else None)

    def broken(self, number: int, reason: str) -> None:
        if number == self.connection and not self.dead:
            self.connection = 0
            self.handle(pe.Disconnected(reason))

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
        for instruction in self.machine.handle(event, self.world.now):
            self._carry_out(instruction)
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._wakes is None or deadline < self._wakes):
            self._wakes = deadline
            self.world.at(deadline, lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._wakes == deadline:
            self._wakes = None
            self.handle(pe.PeerTick())

    def _carry_out(self, instruction: pe.Instruction) -> None:
        match instruction:
            case pe.SendMaster(message):
                assert self._up is not None
                self._up.put(m.pack(message))
            case pe.Reconnect(after_s):
                self.connection = 0
                self.world.after(after_s, self._dial)
            case pe.BeginTransfer(call, seq):
                self._begin(call, seq)
            case pe.BeginFetch():
                self._fetch(instruction)
            case pe.Finish(call):
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

    def _finish(self, finish: pe.Finish) -> None:
        then = self._then.pop(finish.call, None)
        if then is not None and not self.dead:
            then(finish)

    def _launch(self, make: Callable[[int], pe.Event], then: Callable[[pe.Finish], None]) -> int:
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

    def _end_operation(self, running: Running, finish: pe.Finish) -> None:
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

    # --- the program

    def _vote(self) -> None:
        self._results: dict[int, np.ndarray] = {}
        self._tag_of: dict[int, int] = {}
        self._reduced: set[int] = set()
        if self.revision >= self.group.steps:
            self.finished = "done"
            self.handle(pe.CallLeave())
            self.dead = True
            return

        self._launch(lambda call: pe.CallVote(call, TIMEOUT_S, self.group.min_world), self._after_vote)

    def _after_vote(self, finish: pe.Finish) -> None:
        if self._again(finish, self._vote):
            if self.group.optimizes and self.machine.counts.votes % 2:  # the same on all members
                self._optimize()
            else:
                self._sync()

    def _optimize(self) -> None:
        self._launch(
            lambda call: pe.CallOptimize(call, TIMEOUT_S),
            lambda f: self._sync() if self._again(f, self._optimize) else None,
        )

    def _sync(self) -> None:
        entries = (m.Entry("w", "f32", len(self.state), digest("blake2b", self.state)),)
        self._launch(
            lambda call: pe.CallSync(call, TIMEOUT_S, self.revision, SyncStrategy.ENFORCE_POPULAR, entries),
            self._after_sync,
        )

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

    def _after_sync(self, finish: pe.Finish) -> None:
        fetched = self._fetched.pop(finish.call, None)
        at = self._synced_at.pop(finish.call, None)
        if not self._again(finish, self._sync):
            return
        assert at is not None
        if fetched is not None:
            self.state = fetched
        self.revision, seq = at
        story = self.group.story
        story.synced += 1
        content = (self.revision, self.state.tobytes())
        assert story.states.setdefault((self.group.generation(self), seq), content) == content, f"states of {at} differ"
        for tag in range(TAGS):
            self._reduce(tag)

    def _reduce(self, tag: int) -> None:
        spec, topology = self._spec(), self.machine.topology
        self._tag_of[self._call + 1] = tag
        small = self.group.small and topology is not None and is_small(spec, len(topology.ring))
        data = self.inputs(self.revision, tag).tobytes() if small else None
        self._launch(
            lambda call: pe.CallCollective(call, TIMEOUT_S, tag, spec, data),
            lambda finish: self._after_reduce(tag, finish),
        )

    def _spec(self) -> Spec:
        group = self.group
        return Spec(kind="all_reduce", dtype="f32", count=group.count, op="sum", bits=group.bits, algorithm="min_max")

    def _after_reduce(self, tag: int, finish: pe.Finish) -> None:
        if not self._again(finish, lambda: self._reduce(tag)):
            return
        self._reduced.add(tag)
        if len(self._reduced) < TAGS:
            return
        change = sum(float(result.astype(np.float64).sum()) for result in self._results.values())
        self.state = self.state * np.float32(0.5) + np.float32(change % 1000)
        self.revision += 1
        if self.group.asks:
            self._ask()
        else:
            self._vote()

    def _ask(self) -> None:
        self._launch(lambda call: pe.CallPending(call, TIMEOUT_S), self._after_ask)

    def _after_ask(self, finish: pe.Finish) -> None:
        if self._again(finish, self._ask):
            self._vote()

    def _again(self, finish: pe.Finish, retry: Callable[[], None]) -> bool:
        """Whether the call succeeded; otherwise it is made again where that can help."""
        if finish.error is None:
            return True
        if self.machine.error is not None or isinstance(finish.error, RemovedError):
            self._ended(finish)
        elif isinstance(finish.error, AbortedError):
            # The master may be away: a moment later it is back, or this peer is out.
            self.world.after(0.05, retry)
        else:
            raise AssertionError(f"{self.name}: {finish.error}")
        return False

    def _ended(self, finish: pe.Finish) -> None:
        self.finished = self.finished or f"out: {finish.error}"


class SimGroup:
    """A master, its journal and some peers."""

    def __init__(self, seed: int, peers: int, *, steps: int = 3, restarts: bool = False, min_world: int = 1) -> None:
        self.world = World(seed)
        random = self.world.random
        self.steps, self.restarts, self.min_world = steps, restarts, min_world
        self.count = random.choice([0, 1, 5, 40, 7000])
        self.bits = random.choice([0, 0, 0, 8, 4])
        self.slowest = random.choice([0.001, 0.02, 0.1])
        self.small = random.random() < 0.3
        self.asks, self.optimizes = random.random() < 0.3, random.random() < 0.15
        self.story = Story()
        self.journal: list[me.Record] = []
        self.connections = self.lives = self._done = 0
        self._data: dict[tuple[int, int], Channel] = {}
        self.master: SimMaster | None = SimMaster(self)
        self.peers: list[SimPeer] = []
        self._names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        for _ in range(peers):
            self.join()

    def join(self) -> SimPeer:
        peer = SimPeer(self, f"peer-{next(self._names)}")
        self.peers.append(peer)
        return peer

    def by_id(self, peer: str) -> SimPeer | None:
        return next((p for p in self.peers if p.machine.peer == peer), None)

    def generation(self, peer: SimPeer) -> int:
        """Which life of the group a peer is in: its numbers start again when everybody is gone."""
        return -1 - self.peers.index(peer) if peer.machine.topology is None else int(peer.machine.topology.key)

    def data_channel(self, a: SimPeer, b: SimPeer) -> Channel:
        key = (id(a), id(b))
        if key not in self._data or not self._data[key].open:
            self._data[key] = Channel(self.world, lambda item: b.piece(*item), self.slowest)
        return self._data[key]

    # --- faults

    def strike(self, kind: str) -> None:
        """Let something go wrong; remembered when it hit."""
        alive = [p for p in self.peers if not p.dead and not p.finished]
        hit = bool(alive)
        match kind:
            case "kill" if alive:
                self.world.random.choice(alive).kill()
            case "freeze" if alive:
                victim = self.world.random.choice(alive)
                victim.frozen = True
                self.world.after(self.world.random.choice([0.5, 20.0]), victim.thaw)
            case "link" if alive and self._data:
                channel = self.world.random.choice(list(self._data.values()))
                channel.open = False
                for peer in alive:
                    for call, running in list(peer.running.items()):
                        fault = pe.LocalFault(call, "link reset", running.neighbours[0])
                        self.world.after(0.01, lambda p=peer, f=fault: p.handle(f))
            case "join":
                hit = True
                self.join()
            case "master" if self.restarts and self.master is not None:
                self._restart_master()
            case _:
                hit = False
        if hit:
            self.story.struck.append(kind)

    def _restart_master(self) -> None:
        master = self.master
        assert master is not None
        master.dead = True
        self.master = None
        self.lives += 1
        for number, (peer, channel) in master.connections.items():
            # What was sent may still arrive; then the stream ends.
            channel.put("connection reset")
            del number, peer

        def again() -> None:
            self.master = SimMaster(self)

        self.world.after(RESTART_S, again)

    def run(self, limit_s: float) -> bool:
        """Go on until every peer is done, out or dead; false when that takes too long: a hang."""

        def over() -> bool:  # asked after every event; who is done stays so
            while self._done < len(self.peers) and (self.peers[self._done].dead or self.peers[self._done].finished):
                self._done += 1
            return self._done == len(self.peers)

        return self.world.run(over, limit_s)


def scenario(seed: int) -> SimGroup:
    """Draw a group and its faults from a seed, and run it to the end. Raises when an invariant breaks."""
    draw = World(seed).random
    restarts = draw.random() < 0.3
    # The pieces of one operation go as the square of the peers: many large groups cost more than they tell.
    peers = draw.choices([1, 2, 3, 4, 5, 8, 16], [8, 22, 30, 16, 14, 7, 3])[0]
    group = SimGroup(seed, peers, restarts=restarts)
    kinds = ["kill", "kill", "freeze", "link", "join", "join", "master"]
    for _ in range(draw.randrange(6)):
        kind = draw.choice(kinds)
        group.world.at(draw.uniform(0.0, 3.0), lambda kind=kind: group.strike(kind))
    assert group.run(600.0), f"seed {seed}: not all peers came to an end"
    return group
