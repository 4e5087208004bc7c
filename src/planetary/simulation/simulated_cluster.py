"""A whole run in one process: the production shells of gateway, supervisors and workers in a simulated world.

Only the world is simulated: time, connections, processes, faults of a disk, and the duration of a step. The journal,
checkpoints, blobs, payloads and locks are files in a temporary folder. A kind of run derives from `SimulatedCluster`
and makes the gateway and the workers' roles.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.configuration.schema import Config
from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions
from planetary.fleet.gateway.run_files import EVENTS, METRICS
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol.kind_reader import journal_reader
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.system import System
from planetary.fleet.worker.role import Roles
from planetary.machine.machine import Validated
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.simulation.disk import SimulatedDisk, flip_bit
from planetary.simulation.executors import Health
from planetary.simulation.faults import Fault
from planetary.simulation.forgeries import Forgery
from planetary.simulation.node import STEP_S, NodeWork, SimulatedNode
from planetary.simulation.process import Process
from planetary.simulation.simulated_network import HOST, SimulatedLink
from planetary.simulation.world import World
from planetary.wire.protocol import Protocol

PORT = 18010
RESTART_GATEWAY_S = 1.5  # time until a person, or systemd, starts the gateway again with --resume
COMPILE_S = 3.0
THREAD_S = 0.1  # longest time of the gateway's calls in a thread, and as much until it sees the result
RESTART_S = (0.1, 5.0)  # pauses of the supervisors

GatewayT = TypeVar("GatewayT", bound=Gateway[Any])


@dataclass(frozen=True)
class SimMachine:
    """A worker's machine.

    Attributes:
        speed: of the steps; 1: that of a healthy worker on average.
        is_steady: whether each process has just that speed; else up to a quarter more or less.
        link: None: delays are drawn, and bytes are fast.
    """

    speed: float = 1.0
    is_steady: bool = False
    link: SimulatedLink | None = None


@dataclass(frozen=True)
class SimPlace:
    """A cluster's place in the world: the prefix of machine names, and the gateway's port."""

    world: World
    site: str = ""
    port: int = PORT

    @property
    def node(self) -> str:
        """The gateway's machine."""
        return f"{self.site}gateway"


class SimulatedCluster(ABC, Generic[GatewayT]):
    """A gateway and some nodes, with faults.

    Attributes:
        protocol: of the run.
        config: of the run.
        world: they are in.
        disk: of the gateway's machine.
        gateway: the one that runs, None while it is down.
        nodes: the workers' machines.
        finished: the end of the run, None before.
        struck: kinds of effective faults, in order.
        failures: of processes that ended with an exception, and of machines in an impossible state.
        events: how many events machines handled.
        waits_for: the unmet condition of a run that did not end in time.
        step_s: seconds a step of a healthy worker takes.
        local_threads: see `GatewayOptions`.
        forgery: of the workers.
    """

    protocol: ClassVar[Protocol]
    local_threads: int | None = None

    def __init__(
        self,
        seed: int,
        config: Config,
        nodes: int,
        plan: Sequence[Fault] = (),
        *,
        cache: Path | None = None,
        step_s: float = STEP_S,
        place: SimPlace | None = None,
        machines: Sequence[SimMachine] = (),
    ) -> None:
        """Start everything at time 0.

        Args:
            seed: of all that is random.
            config: of the run.
            nodes: how many machines with a worker.
            plan: faults; they name nodes by number.
            cache: folder with prepared blobs; None: none were prepared.
            step_s: of a healthy worker.
            place: in a world that has other clusters, of another `seed`; None: a separate world.
            machines: of the workers, by number; those beyond are as `SimMachine()`.
        """
        self.config, self.step_s = config, step_s
        self._machines = tuple(machines)
        self.place = place or SimPlace(World(seed))
        self.forgery = Forgery(seed)
        self.world = self.place.world
        self.folder = Path(tempfile.mkdtemp(prefix="planetary-simulated-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._cache = cache or self.folder / "cache"
        self.struck: list[str] = []
        self.failures: list[BaseException] = []
        self.events = 0
        self.finished: e.Finish | None = None
        self.disk = SimulatedDisk(self.world.random, self.struck.append, self.world.clock)
        self.gateway: GatewayT | None = None
        self._gateways = 0
        self._closing = False
        self._was_stopped = False
        self.waits_for = ""
        self.process = self._start_gateway()
        self.nodes = [self._node(number) for number in range(nodes)]
        for fault in plan:
            self.world.at(fault.at_s, lambda fault=fault: self.strike(fault))

    # --- methods of a kind of run -----------------------------------------------------------------------------

    @abstractmethod
    def _make_gateway(self, process: Process, options: GatewayOptions, system: System) -> GatewayT: ...

    @abstractmethod
    def _roles(self, number: int, process: Process, health: Health) -> Roles:
        """Return the makers of the roles of node `number`'s worker process."""

    def _check(self, gateway: GatewayT, machine: Validated) -> None:
        """Assert the invariants of a gateway after each event of a machine."""

    # --- results for tests --------------------------------------------------------------------------------------

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def journal(self) -> list[Any]:
        """All records; `t` in simulated seconds since the start."""
        path, start = self.run_folder / EVENTS, self.world.clock.wall() - self.world.now
        reader = journal_reader(path)
        records = () if reader is None else read_json_lines(path, reader.records)
        return [msgspec.structs.replace(record, t=record.t - start) for record in records]

    @property
    def metrics(self) -> dict[int, RoundMetrics]:
        """The lines of the finished rounds, by round."""
        path = self.run_folder / METRICS
        lines = list(read_json_lines(path, RoundMetrics)) if path.exists() else []
        found = {line.round: line for line in lines}
        assert len(found) == len(lines), "a round has two lines of metrics"
        return found

    @property
    def controller(self) -> Any:
        """Return the controller of the gateway that runs, or ran last."""
        assert self.gateway is not None, "the gateway is down"
        assert self.gateway.controller is not None, "the gateway has not begun"
        return self.gateway.controller

    def run(self, limit_s: float, follow: Callable[[], object] = lambda: None) -> bool:
        """Run until the run has ended; false when it did not within `limit_s` simulated seconds.

        `follow` is called after everything that happens. Then the world stands still for good.
        """

        def until() -> bool:
            follow()
            return self.finished is not None

        try:
            return self.advance(until, limit_s)
        finally:
            self.close()

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until` is true; false when it was not before simulated second `limit_s`.

        Raises the error of a failed process.
        """
        reached = self.world.run(lambda: until() or bool(self.failures), limit_s)
        if self.failures:
            raise self.failures[0]
        assert not self.world.loop.errors, self.world.loop.errors
        return reached

    def close(self) -> None:
        """End the world: all processes are killed."""
        self.leave()
        self.world.close()

    def leave(self) -> None:
        """Record the world is about to end: processes that end from now on have not failed."""
        self.waits_for = "" if self.finished is not None else self._why_not_ended()
        self._closing = True

    def _why_not_ended(self) -> str:
        """Return the condition that the run waits for."""
        gateway = self.gateway
        if gateway is None:
            return "the gateway is down"
        return gateway.controller.stalls.why if gateway.controller is not None else gateway.stage

    # --- nodes --------------------------------------------------------------------------------------------------

    def add_node(self, name: str = "", roles: tuple[str, ...] = ()) -> SimulatedNode:
        """Let another machine join.

        Args:
            name: of the worker.
            roles: allowed by the operator; empty: all.
        """
        node = self._node(len(self.nodes), name, roles)
        self.nodes.append(node)
        return node

    def _node(self, number: int, name: str = "", roles: tuple[str, ...] = ()) -> SimulatedNode:
        timings = self.config.timings
        machine = self._machines[number] if number < len(self._machines) else SimMachine()
        if machine.link is not None:
            self.world.network.connect(f"{self.place.site}node-{number}", machine.link)
        return SimulatedNode(
            self.world,
            number,
            Address(HOST, self.place.port, "", timings.connect_s),
            name=name,
            site=self.place.site,
            folder=self.folder / "nodes",
            shutdown_s=timings.shutdown_s,
            restart_s=RESTART_S,
            step_s=self.step_s / machine.speed,
            spread=(1.0, 1.0) if machine.is_steady else (0.8, 1.25),
            work=NodeWork(self.protocol, lambda process, health: self._roles(number, process, health), roles),
            forgery=self.forgery,
            observe=self._observe,
            struck=self.struck.append,
            ended=self._ended,
        )

    # --- the gateway's process ----------------------------------------------------------------------------------

    def _start_gateway(self) -> Process:
        self._gateways += 1
        process = self.world.start(f"{self.place.site}gateway #{self._gateways}", self.place.node, self._serve)
        process.thread_s = THREAD_S
        process.on_exit.append(self._gateway_ended)
        return process

    async def _serve(self, process: Process) -> int:
        events = self.run_folder / EVENTS
        options = GatewayOptions(
            folder=self.run_folder,
            cache=self._cache,
            host=HOST,
            port=self.place.port,
            resume=events.exists() and b"\n" in events.read_bytes(),
            local_threads=self.local_threads,
        )
        system = System(
            clock=self.world.clock,
            network=self.world.network.of(process),
            files=self.disk.of(process),
            threads=process.threads,
            aside=process.aside,
            pid=lambda: process.pid,
            entropy=self.world.random.randbytes,
            memory=lambda: None,
            observe=self._observe,
        )
        gateway = self._make_gateway(process, options, system)
        self.gateway = gateway
        try:
            await gateway.start()
            finished = await gateway.run()
        except ResourceError:
            return 7  # the disk is full; it is started again
        if finished.kind != "stopped" or not self._was_stopped:
            self.finished = finished
        return 0

    def _ended(self, process: Process) -> None:
        """No process may end with an exception other than a shell's regular end.

        Supervisors leave a stopped run, and join the resumed run again.
        """
        if process.error is not None and not self._closing:
            self.failures.append(process.error)
        for node in self.nodes:
            if node.supervisor is process and self._was_stopped and self.finished is None and not self._closing:
                self.world.after(RESTART_GATEWAY_S, node.join)

    def _gateway_ended(self, process: Process) -> None:
        if self.finished is not None or self._closing:
            return
        self.gateway = None
        if process.error is None:
            self.world.after(RESTART_GATEWAY_S, self._restart_gateway)
        self._ended(process)

    def _restart_gateway(self) -> None:
        self.process = self._start_gateway()

    def _observe(self, machine: Validated) -> None:
        self.events += 1
        try:
            machine.validate()
            if self.gateway is not None:
                self._check(self.gateway, machine)
        except (LocalProtocolError, AssertionError) as error:
            self.failures.append(error)  # even if the shell handles it
            raise

    # --- faults -------------------------------------------------------------------------------------------------

    def kill_gateway(self) -> bool:
        """SIGKILL the gateway, which is started again; false when there is none, or the run has ended."""
        hit = self.gateway is not None and self.finished is None
        if hit:
            self.process.kill()
            self.struck.append("kill_gateway")
        return hit

    def strike(self, fault: Fault) -> None:
        """Inject a fault now."""
        node, network, disk = self.nodes[fault.worker], self.world.network, self.disk
        hit = True
        match fault.kind:
            case "kill_worker":
                hit = node.kill_worker()
            case "drop_link":
                hit = network.drop(node.node) > 0
            case "partition":
                network.partition(node.node, fault.seconds)
            case "mute_node":
                network.cut(node.node, "*", fault.seconds)
            case "deafen_node":
                network.cut("*", node.node, fault.seconds)
            case "repeat_result":
                hit = node.repeat_result()
            case "flip_blob":
                hit = bool(node.cached())
                if hit:
                    flip_bit(self.world.random.choice(node.cached()), self.world.random)
            case "hang_worker" | "slow_worker" | "poison_worker" | "flip_bit":
                hit = node.is_up
                if hit:
                    node.health.is_hung |= fault.kind == "hang_worker"
                    node.health.is_poisoned |= fault.kind == "poison_worker"
                    node.health.flips |= fault.kind == "flip_bit"
                    node.health.step_s *= 5.0 if fault.kind == "slow_worker" else 1.0
            case "lie":
                hit = self._lie(fault)
            case "forge":
                self.forgery.forgers.add(node.name)
                self.world.after(fault.seconds, lambda: self.forgery.forgers.discard(node.name))
            case "let_go":
                hit = self.gateway is not None and self.finished is None
                if self.gateway is not None:
                    self.gateway.let_go(node.name, "another run needs it")
            case "stop_gateway":
                hit = self.gateway is not None and self.finished is None
                if self.gateway is not None:
                    self._was_stopped = hit
                    self.gateway.stop("the operator stops it")
            case "kill_gateway" | "cut_power":
                hit = self.gateway is not None and self.finished is None
                if hit:
                    self.process.kill() if fault.kind == "kill_gateway" else disk.cut_power(self.process)
            case "kill_gateway_writing":  # the following ones count when they happen
                disk.dies_after, hit = self.world.random.randint(0, 40), False
            case "torn_write":
                disk.torn, hit = True, False
            case "full_disk":
                disk.full, hit = disk.full + 1, False
            case "no_space":
                disk.no_space, hit = True, False
                self.world.after(fault.seconds, disk.make_room)
        if hit:
            self.struck.append(fault.kind)

    def _lie(self, fault: Fault) -> bool:
        """Let a worker forge results; return whether it can."""
        return False
