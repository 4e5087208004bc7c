"""A whole fabric in one process: the production shells of gateway, supervisors and workers in a simulated world.

Only the world is simulated: time, connections, processes, what can go wrong on a disk, and how long a step takes. The
journal, checkpoints, blobs and locks are files in a temporary folder. What is computed is behind
`simulation.training.Training`: a real training step, or `small_training`, whose parameters at the end can be computed
again from the journal alone and must be equal bit for bit, whatever went wrong on the way.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.errors import ResourceError
from planetary.fabric.controller.controller import Controller
from planetary.fabric.gateway.gateway import GatewayOptions, Security
from planetary.fabric.gateway.rounds_gateway import RoundsGateway
from planetary.fabric.gateway.rounds_start import policy_of
from planetary.fabric.gateway.run_files import EVENTS, METRICS
from planetary.fabric.gateway.topology import GatewayTopology, RingGateway, StarGateway
from planetary.fabric.preparation.compiling import Published
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.policy import ControllerPolicy
from planetary.fabric.protocol.records import AnyRecord
from planetary.fabric.protocol.status import RoundMetrics
from planetary.fabric.shell.shell import Address
from planetary.fabric.shell.system import System
from planetary.machine.machine import Machine
from planetary.simulation.disk import SimulatedDisk, flip_bit
from planetary.simulation.faults import Fault
from planetary.simulation.lies import DoubtfulExecutor, Gossip
from planetary.simulation.network import HOST
from planetary.simulation.node import SimulatedNode
from planetary.simulation.process import Process
from planetary.simulation.ring import SimulatedMaster, make_master
from planetary.simulation.training import Training
from planetary.simulation.world import World

PORT = 18010
RESTART_GATEWAY_S = 1.5  # until a person, or systemd, starts it again with --resume
COMPILE_S = 3.0
THREAD_S = 0.1  # at most, for whatever the gateway does in a thread, and as much until it sees the result
MOST_VERSIONS = 4  # of the parameters, that the gateway keeps
RESTART_S = (0.1, 5.0)  # pauses of the supervisors


class SimCluster:
    """A gateway and some nodes, with faults.

    Attributes:
        world: they are in.
        disk: of the gateway's machine.
        gateway: the one that runs, None while it is down.
        nodes: the workers' machines.
        finished: the end of the run, None before.
        struck: kinds of the faults that really hit something, in that order.
        failures: of processes that ended with an exception.
        events: how many events machines handled.
        most_kept: most versions and most results that the gateway kept at once.
        waits_for: what the run waited for that did not end in time.
    """

    def __init__(self, seed: int, training: Training, nodes: int, plan: Sequence[Fault] = ()) -> None:
        """Start everything at time 0; `plan` names nodes by number."""
        self.training = training
        self.config = training.prepared.config
        self.world = World(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="planetary-simulated-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.struck: list[str] = []
        self.failures: list[BaseException] = []
        self.gossip = Gossip()
        self.events = 0
        self.finished: e.Finish | None = None
        self.disk = SimulatedDisk(self.world.random, self.struck.append)
        self.gateway: RoundsGateway | None = None
        self._master: SimulatedMaster | None = None
        self._gateways = 0
        self._closing = False
        self._was_stopped = False
        self.waits_for = ""
        self.most_kept = (0, 0)
        self._process = self._start_gateway()
        timings = self.config.timings
        self.nodes = [
            SimulatedNode(
                self.world,
                number,
                Address(HOST, PORT, "", timings.connect_s),
                folder=self.folder / "nodes",
                shutdown_s=timings.shutdown_s,
                restart_s=RESTART_S,
                open_executor=lambda number=number: DoubtfulExecutor(training.open_executor(), number, self.gossip),
                master=lambda: self._master,
                observe=self._observe,
                struck=self.struck.append,
                ended=self._ended,
            )
            for number in range(nodes)
        ]
        for fault in plan:
            self.world.at(fault.at_s, lambda fault=fault: self.strike(fault))

    # --- what a test asks ---------------------------------------------------------------------------------------

    @property
    def run_folder(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    @property
    def journal(self) -> list[AnyRecord]:
        """All records; `t` in simulated seconds since the start."""
        path, start = self.run_folder / EVENTS, self.world.clock.wall() - self.world.now
        records = read_json_lines(path, AnyRecord) if path.exists() else ()
        return [_at(record, record.t - start) for record in records]

    @property
    def metrics(self) -> dict[int, RoundMetrics]:
        """The lines of the finished rounds, by round."""
        path = self.run_folder / METRICS
        lines = list(read_json_lines(path, RoundMetrics)) if path.exists() else []
        found = {line.round: line for line in lines}
        assert len(found) == len(lines), "a round has two lines of metrics"
        return found

    @property
    def policy(self) -> ControllerPolicy:
        """The constants of the run, but for those of its topology."""
        return policy_of(self.config, self.training.prepared)

    @property
    def controller(self) -> Controller:
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
            return self.finished is not None or bool(self.failures)

        try:
            ended = self.world.run(until, limit_s)
            self.waits_for = "" if ended else self._why_not_ended()
        finally:
            self._closing = True
            self.world.close()
        if self.failures:
            raise self.failures[0]
        assert not self.world.loop.errors, self.world.loop.errors
        return ended

    def _why_not_ended(self) -> str:
        """Return what the run waits for."""
        gateway = self.gateway
        if gateway is None:
            return "the gateway is down"
        return gateway.controller.stalls.why if gateway.controller is not None else gateway.stage

    # --- the gateway's process ----------------------------------------------------------------------------------

    def _start_gateway(self) -> Process:
        self._gateways += 1
        process = self.world.start(f"gateway #{self._gateways}", "gateway", self._serve)
        process.thread_s = THREAD_S
        process.on_exit.append(self._gateway_ended)
        return process

    async def _serve(self, process: Process) -> int:
        events = self.run_folder / EVENTS
        options = GatewayOptions(
            folder=self.run_folder,
            cache=self.training.cache or self.folder / "cache",
            host=HOST,
            port=PORT,
            resume=events.exists() and b"\n" in events.read_bytes(),
        )
        system = System(
            clock=self.world.clock,
            network=self.world.network.of(process),
            files=self.disk.of(process),
            threads=process.threads,
            aside=process.aside,
            pid=lambda: process.pid,
            observe=self._observe,
        )

        async def compile_for(*_: object) -> Published:
            await asyncio.sleep(COMPILE_S)
            return Published(self.training.artifact(gateway.store), 1, "simulated")

        def topology(*_: object) -> GatewayTopology:
            if self.config.sync.topology == "star":
                return StarGateway()
            overlap = self.config.sync.overlap == "async"

            def master(*args: Any, **kwargs: Any) -> SimulatedMaster:
                self._master = make_master(self.world, process, overlap=overlap)(*args, **kwargs)
                return self._master

            return RingGateway(self.config, HOST, None, make_master=master)

        gateway = RoundsGateway(
            self.config,
            options,
            Security(),
            system=system,
            prepare=lambda *_: self.training.prepared,
            compile_for=compile_for,
            topology=topology,
        )
        self.gateway = gateway
        try:
            await gateway.start()
            finished = await gateway.run()
        except ResourceError:
            return 7  # its disk is full; it is started again
        if finished.kind != "stopped" or not self._was_stopped:
            self.finished = finished
        return 0

    def _ended(self, process: Process) -> None:
        """No process may end with an exception that is not the way in which its shell ends.

        The supervisors leave a run that is stopped, and whoever resumes it lets them join again.
        """
        if process.error is not None and not self._closing:
            self.failures.append(process.error)
        for node in self.nodes:
            if node.supervisor is process and self._was_stopped and self.finished is None and not self._closing:
                self.world.after(RESTART_GATEWAY_S, node.join)

    def _gateway_ended(self, process: Process) -> None:
        if self.finished is not None or self._closing:
            return
        self.gateway, self._master = None, None
        if process.error is None:
            self.world.after(RESTART_GATEWAY_S, self._restart_gateway)
        self._ended(process)

    def _restart_gateway(self) -> None:
        self._process = self._start_gateway()

    def _observe(self, machine: Machine[Any, Any]) -> None:
        self.events += 1
        machine.validate()
        if isinstance(machine, Controller) and self.gateway is not None and self.gateway.controller is machine:
            self._check_memory(machine)

    def _check_memory(self, controller: Controller) -> None:
        """The gateway keeps a few versions, and one result of each worker of each round under way."""
        assert self.gateway is not None
        versions, results = self.gateway.parameters.kept()
        self.most_kept = max(self.most_kept[0], versions), max(self.most_kept[1], results)
        assert versions <= MOST_VERSIONS, f"the gateway keeps the parameters of {versions} rounds"
        most = 2 * (len(self.nodes) + 1)
        assert results <= most, f"the gateway keeps {results} results of {len(self.nodes)} workers"

    # --- faults -------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Let something go wrong now."""
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
                self.gossip.lies[fault.worker] = fault.lie
                self.world.after(fault.seconds, lambda: self.gossip.lies.pop(fault.worker, None))
            case "stop_gateway":
                hit = self.gateway is not None and self.finished is None
                if self.gateway is not None:
                    self._was_stopped = hit
                    self.gateway.stop("the operator stops it")
            case "kill_gateway" | "cut_power":
                hit = self.gateway is not None and self.finished is None
                if hit:
                    self._process.kill() if fault.kind == "kill_gateway" else disk.cut_power(self._process)
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


def _at(record: AnyRecord, t: float) -> AnyRecord:
    return msgspec.structs.replace(record, t=t)
