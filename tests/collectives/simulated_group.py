"""A group of the collectives in one process: the production master and communicators, each in a simulated process.

A peer runs a program, an ordinary function that makes blocking calls of a `Communicator`. Only the layers below the
ports are simulated: time, threads, connections and the master's disk. Pieces go over connections; shared and lent
memory of one machine are the operating system's, and have no simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from planetary.collectives import Communicator, Master
from planetary.collectives.master.machine import MasterMachine
from planetary.collectives.peer import events as pe
from planetary.collectives.peer.machine import PeerMachine
from planetary.collectives.protocol import messages as m
from planetary.core.errors import PlanetaryError
from planetary.machine import events as k
from planetary.machine.machine import Machine
from planetary.simulation.collectives.machine_ports import simulated_ports
from planetary.simulation.disk import SimulatedDisk
from planetary.simulation.process import Process
from planetary.simulation.simulated_network import HOST
from planetary.simulation.world import World

PORT = 48148
RESTART_S = 0.7  # time until a dead master is started again
MASTER_NODE = "master"


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a simulated group is set up.

    Attributes:
        restarts: whether a master that ended is started again, and peers wait for it.
        preempt_chance: of a thread, before it takes a lock.
        silent_s: until a silent peer is lost.
        grace_s: how long peers wait for a master, and a master for members.
        stall_s: how long a neighbour may send nothing.
        timeout_s: of the peers' calls.
        remeasure_s: from one measurement of a link in the background to the next; 0 for none.
        connections: number of connections to the successor in the ring; None: the default.
        delay_s: the range of one-way delays.
    """

    restarts: bool = False
    preempt_chance: float = 0.0
    silent_s: float = 4.0
    grace_s: float = 10.0
    stall_s: float = 5.0
    timeout_s: float = 60.0
    remeasure_s: float = 0.0
    connections: int | None = None
    delay_s: tuple[float, float] = (0.0002, 0.02)


@dataclass
class GroupObservation:
    """Observations of the machines of a group.

    Attributes:
        events: number of events that machines handled.
        outcomes: (key of the group, number of an operation) -> whether it succeeded, as members saw it.
        decided: (peer, call) of small operations the master let succeed.
        most_operations: most operations that ran in a group at once.
        most_threads: most threads a peer had at once.
    """

    events: int = 0
    outcomes: dict[tuple[str, int], bool] = field(default_factory=dict)
    decided: set[tuple[str, int]] = field(default_factory=set)
    most_operations: int = 0
    most_threads: int = 0


class SimulatedPeer:
    """A process with a communicator.

    Attributes:
        name, node: of the peer and the machine.
        process: that it runs in.
        communicator: made when the process begins.
        ended: how the program ended; "" before.
        machine: decides for the peer; None before the first event.
    """

    def __init__(self, group: SimulatedGroup, name: str, program: Program) -> None:
        self.group, self.name, self.node = group, name, f"node of {name}"
        self.ended = ""
        self.machine: PeerMachine | None = None
        self._program = program
        self._starts: dict[int, int] = {}  # call -> number of the operation
        world, options = group.world, group.options
        self.process = world.start(name, self.node, self._run)
        ports = simulated_ports(
            world,
            self.process,
            group.disk.of(self.process),
            self._observe,
            preempt_chance=options.preempt_chance,
        )
        self.sleep = ports.threads.sleep
        self.communicator = Communicator(
            f"{HOST}:{PORT}",
            name=name,
            connections=options.connections,
            timeout_s=options.timeout_s,
            stall_s=options.stall_s,
            master_grace_s=options.grace_s if options.restarts else 0.0,
            piece_bytes=1,
            transport="tcp",
            ports=ports,
        )

    @property
    def is_over(self) -> bool:
        """Whether the program has ended, or the process is dead."""
        return bool(self.ended) or not self.process.alive

    @property
    def group_key(self) -> str:
        """The key of the group, which is another one when a group began anew; "" outside of any."""
        topology = self.machine.topology if self.machine is not None else None
        return topology.key if topology is not None else ""

    @property
    def threads_left(self) -> list[str]:
        """Names of the threads that have not ended, but for the program's."""
        return [thread.name for thread in self.process.live_threads if thread.name != "program"]

    async def _run(self, process: Process) -> int:
        self.ended = await asyncio.wrap_future(process.threads("program").submit(self._program, self))
        return 0

    def _observe(self, machine: Machine[Any, Any], event: object, instructions: Sequence[object]) -> None:
        with self.group.checking():
            self._check(machine, instructions)

    def _check(self, machine: Machine[Any, Any], instructions: Sequence[object]) -> None:
        assert isinstance(machine, PeerMachine)
        self.machine, observed = machine, self.group.observed
        observed.events += 1
        observed.most_threads = max(observed.most_threads, len(self.process.live_threads))
        machine.validate()
        for instruction in instructions:
            match instruction:
                case pe.BeginTransfer(call, seq):
                    self._starts[call] = seq
                case pe.FinishCall(call, error):
                    seq = self._starts.pop(call, 0)
                    if machine.error is not None or machine.topology is None:
                        continue  # it is out, and cannot know the outcome
                    if seq:
                        key, ok = (machine.topology.key, seq), error is None
                        assert observed.outcomes.setdefault(key, ok) == ok, f"peers differ on the outcome of {key}"
                    elif error is not None:
                        assert (machine.peer, call) not in observed.decided, "failed here, succeeded elsewhere"
                case _:
                    pass


Program = Callable[[SimulatedPeer], str]
"""Work of a peer; returns how it ended."""


class SimulatedGroup:
    """A master, a journal and some peers.

    Attributes:
        world: they are in.
        disk: of the master's machine.
        observed: see there.
        peers: all that ever joined.
        master: the one that runs; None while it is down.
        master_machine: that decides for it, or did last.
        struck: kinds of effective faults, in order.
    """

    def __init__(self, seed: int, options: GroupOptions) -> None:
        """Start the master at time 0."""
        self.options = options
        self.world = World(seed)
        self.world.network.delay_s = options.delay_s
        self.folder = Path(tempfile.mkdtemp(prefix="planetary-simulated-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.struck: list[str] = []
        self.disk = SimulatedDisk(self.world.random, self._disk_struck, self.world.clock)
        self.observed = GroupObservation()
        self.peers: list[SimulatedPeer] = []
        self.failures: list[BaseException] = []
        self.master: Master | None = None
        self.master_machine: MasterMachine | None = None
        self._lives = self._done = 0
        self._closing = False
        self.master_process = self._start_master()

    # --- processes

    def join(self, program: Program) -> SimulatedPeer:
        """Start a peer."""
        peer = SimulatedPeer(self, f"peer-{len(self.peers)}", program)
        peer.process.on_exit.append(self._exited)
        self.peers.append(peer)
        return peer

    def _start_master(self) -> Process:
        self._lives += 1
        process = self.world.start(f"master #{self._lives}", MASTER_NODE, self._serve)
        process.on_exit.append(self._master_exited)
        return process

    async def _serve(self, process: Process) -> int:
        options = self.options
        ports = simulated_ports(
            self.world,
            process,
            self.disk.of(process),
            self._observe_master,
            preempt_chance=options.preempt_chance,
        )
        master = Master(
            f"{HOST}:{PORT}",
            journal=self.folder / "journal.jsonl" if options.restarts else None,
            grace_s=options.grace_s,
            silent_s=options.silent_s,
            remeasure_s=options.remeasure_s,
            ports=ports,
        )

        def serve() -> None:
            master.start()
            self.master = master
            master.wait()

        try:
            await asyncio.wrap_future(process.threads("master").submit(serve))
        except PlanetaryError:
            return 1  # the disk is full; it is started again
        return 0

    def _observe_master(self, machine: Machine[Any, Any], event: object, instructions: Sequence[object]) -> None:
        with self.checking():
            self._check_master(machine, instructions)

    def _check_master(self, machine: Machine[Any, Any], instructions: Sequence[object]) -> None:
        assert isinstance(machine, MasterMachine)
        self.master_machine, observed = machine, self.observed
        observed.events += 1
        machine.validate()
        for made in machine.groups.values():
            observed.most_operations = max(observed.most_operations, len(made.operations.running))
        for instruction in instructions:
            if isinstance(instruction, k.Send) and isinstance(instruction.message, m.Contributions):
                call = instruction.message.call
                observed.decided.update(
                    (peer, call)
                    for made in machine.groups.values()
                    for peer, known in made.desk.peers.items()
                    if known.connection == instruction.session
                )

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Record an exception, so the shells, which handle it, do not hide it."""
        try:
            yield
        except Exception as error:
            self.failures.append(error)
            raise

    def _disk_struck(self, kind: str) -> None:
        self.struck.append("kill_master_writing" if kind == "kill_gateway_writing" else kind)

    def _exited(self, process: Process) -> None:
        if process.error is not None and not self._closing:
            self.failures.append(process.error)

    def _master_exited(self, process: Process) -> None:
        self._exited(process)
        self.master = None
        if self.options.restarts and not self._closing:
            self.world.after(RESTART_S, self._restart_master)

    def _restart_master(self) -> None:
        self.master_process = self._start_master()

    # --- running

    @property
    def is_over(self) -> bool:
        """Whether every program has ended, or the process is dead. An ended one stays so."""
        while self._done < len(self.peers) and self.peers[self._done].is_over:
            self._done += 1
        return self._done == len(self.peers)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until` is true, or something failed, which is raised here; false when that takes too long."""
        ended = self.world.run(lambda: until() or bool(self.failures), limit_s)
        if self.failures:
            raise self.failures[0]
        for context in self.world.loop.errors:
            raise context.get("exception") or AssertionError(context)
        return ended

    def close(self) -> None:
        """End the world: nothing happens any more."""
        self._closing = True
        self.world.close()


GroupFault = Literal[
    "kill",  # a peer's process dies at once, as by SIGKILL
    "stop",  # a peer's process stands still, as by SIGSTOP, for a moment or for longer than the master waits
    "hang_thread",  # one thread of a peer does nothing for a while
    "drop_links",  # all connections of a peer's machine break
    "cut_pair",  # nothing arrives from one peer's machine at another one's for a while; both reach the master
    "mute",  # nothing a peer's machine sends arrives for a while; it still receives
    "deafen",  # nothing arrives at a peer's machine for a while; outgoing messages arrive
    "slow_node",  # packets from and to a peer's machine take fifty times as long for a while
    "join",  # a peer is started
    "kill_master",  # the master dies, and is started again
    "stop_master",  # the master stands still for a while
    "kill_master_writing",  # it dies before one of the next operations on the disk
    "torn_write",  # it dies in the midst of a journal line
    "no_space",  # nothing can be written for a while: the master fails, and is started again until it can go on
]

KINDS: tuple[GroupFault, ...] = get_args(GroupFault)
OF_PEERS: tuple[GroupFault, ...] = KINDS[: KINDS.index("kill_master")]
LATER = {"kill_master_writing", "torn_write", "no_space"}
"""Faults that are counted when they strike, at the next use of the disk."""


def strike(group: SimulatedGroup, kind: GroupFault, program: Program) -> None:
    """Let something go wrong now; kept in `struck` when it hit. `program`: of a peer that joins."""
    source = group.world.random
    seconds = source.choice((0.5, 2.0, 8.0))
    alive = [peer for peer in group.peers if not peer.is_over]
    victim = source.choice(alive) if alive else None
    hit = victim is not None
    if kind == "join":
        group.join(program)
        hit = True
    elif kind not in OF_PEERS:
        hit = group.options.restarts and group.master is not None
        if hit:
            _strike_master(group, kind, seconds)
    elif victim is not None:
        hit = _strike_peer(group, victim, kind, seconds)
    if hit and kind not in LATER:
        group.struck.append(kind)


def _strike_peer(group: SimulatedGroup, victim: SimulatedPeer, kind: GroupFault, seconds: float) -> bool:
    source, network = group.world.random, group.world.network
    match kind:
        case "kill":
            victim.process.kill()
        case "stop":
            victim.process.stop(source.choice((0.5, 20.0)))
        case "hang_thread":
            threads = victim.process.live_threads
            if not threads:
                return False
            source.choice(threads).hang(seconds)
        case "drop_links":
            return network.drop(victim.node) > 0
        case "cut_pair":
            others = [peer for peer in group.peers if not peer.is_over and peer is not victim]
            if not others:
                return False
            network.cut(victim.node, source.choice(others).node, seconds)
        case "mute":
            network.cut(victim.node, "*", seconds)
        case "deafen":
            network.cut("*", victim.node, seconds)
        case _:
            network.slow(victim.node, 50.0, seconds)
    return True


def _strike_master(group: SimulatedGroup, kind: GroupFault, seconds: float) -> None:
    disk, process = group.disk, group.master_process
    match kind:
        case "kill_master":
            process.kill()
        case "stop_master":
            process.stop(seconds)
        case "kill_master_writing":
            disk.dies_after = group.world.random.randint(0, 10)
        case "torn_write":
            disk.torn = True
        case _:
            disk.no_space = True
            group.world.after(seconds, disk.make_room)
