"""A simulated run in rounds.

`simulation.rounds.training.Training` computes: a real training step, or a known function, whose parameters at the end
can be computed again from the journal alone and must be equal bit for bit, despite all faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from planetary.collectives import Communicator, Master
from planetary.collectives.peer.work import Work
from planetary.collectives.transport.ports import Ports
from planetary.core.configuration.schema import Config
from planetary.core.extension_points import TOPOLOGIES
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.gateway.parts import Setup
from planetary.fleet.preparation.compiling import PublishedArtifact, StepToCompile
from planetary.fleet.shell.system import System
from planetary.fleet.worker.role import Roles
from planetary.machine.machine import Validated
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.gateway.gateway import RoundsSetup
from planetary.runs.rounds.gateway.topology import GatewayTopology, RingGateway, StarGateway
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.start import policy_of
from planetary.runs.rounds.worker.role import TrainingLoader
from planetary.simulation.collectives.machine_ports import simulated_ports
from planetary.simulation.executors import Health, TimedExecutor
from planetary.simulation.faults import Fault
from planetary.simulation.lies import DoubtfulExecutor, Gossip
from planetary.simulation.node import STEP_S
from planetary.simulation.process import Process, sleep
from planetary.simulation.rounds.training import Training
from planetary.simulation.simulated_cluster import COMPILE_S, SimMachine, SimPlace, SimulatedCluster
from planetary.simulation.simulated_network import HOST

MOST_VERSIONS = 4  # parameter versions at the gateway
REDUCE_S = (0.0, 0.3)  # time for a worker without a given link to read a share from the device
OVERLAPPED_S = (0.0, 2.0)  # time with overlap: sometimes longer than a lease takes


class DoubtfulWork:
    """A sum as a worker gets it: a flip strikes the sum that ends next. See `Work`."""

    def __init__(self, work: Work, array: np.ndarray, health: Health, sums: list[np.ndarray]) -> None:
        self._work, self._array, self._health, self._sums = work, array, health, sums
        self.world_size = self.sent_bytes = self.received_bytes = 0

    def wait(self) -> None:
        work = self._work
        work.wait()
        self.world_size, self.sent_bytes, self.received_bytes = work.world_size, work.sent_bytes, work.received_bytes
        self._sums.append(self._array.copy())
        if self._health.flips:
            self._health.flips = False
            self._array[0] += 1


class DoubtfulCommunicator(Communicator):
    """The production communicator of a worker whose device takes time and may make mistakes."""

    def __init__(
        self,
        health: Health,
        device_s: Callable[[], float],
        sums: dict[bytes, list[np.ndarray]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Make a peer.

        Args:
            health: of the worker.
            device_s: draws the seconds until the device has given a share.
            sums: gets each sum, under the bytes of the worker's own share.
            args, kwargs: as of `Communicator`.
        """
        super().__init__(*args, **kwargs)
        self._health, self._device_s, self._sums = health, device_s, sums

    def all_reduce_async(self, array: np.ndarray, **options: Any) -> Any:
        sleep(self._device_s())
        sums = self._sums.setdefault(array.tobytes(), [])
        return DoubtfulWork(super().all_reduce_async(array, **options), array, self._health, sums)


class SimCluster(SimulatedCluster[Gateway[Any]]):
    """A run in rounds; see `SimulatedCluster`.

    Attributes:
        training: the computation of the workers.
        gossip: the liars' knowledge of the other workers.
        sums: of a ring, see `SmallTraining.replay`.
        received: deltas as the gateway decoded them, by task, where they are recorded; see there.
        most_kept: most versions and most results the gateway kept at once.
    """

    protocol = rm.ROUNDS

    def __init__(
        self,
        seed: int,
        training: Training,
        nodes: int,
        plan: Sequence[Fault] = (),
        *,
        place: SimPlace | None = None,
        setup: Callable[[RoundsSetup], Setup[Any, Any]] = lambda rounds: rounds,
        machines: Sequence[SimMachine] = (),
        step_s: float = STEP_S,
    ) -> None:
        """Start everything at time 0; `plan` names nodes by number, `setup` makes the gateway's of that of rounds."""
        self.training, self.gossip, self.most_kept = training, Gossip(), (0, 0)
        self.sums: dict[bytes, list[np.ndarray]] = {}
        self.received: Mapping[int, Tensors] | None = None
        self._setup = setup
        self.contributors = nodes  # contributors to a round
        config, cache = training.prepared.config, training.cache
        super().__init__(seed, config, nodes, plan, cache=cache, step_s=step_s, place=place, machines=machines)

    @property
    def policy(self) -> ControllerPolicy:
        """The constants of the run, but for the topology's."""
        return policy_of(self.config, self.training.prepared)

    @property
    def controller(self) -> Controller:
        """Return the controller of the gateway that runs, or ran last."""
        found = super().controller
        assert isinstance(found, Controller)
        return found

    @property
    def parameters(self) -> ParameterVersions:
        """The parameters at the gateway."""
        assert self.gateway is not None
        return self.gateway.run_parts.run.parameters

    def _make_gateway(self, process: Process, options: GatewayOptions, system: System) -> Gateway[Any]:
        async def compile_for(prepared: StepToCompile, *_: object) -> PublishedArtifact:
            await asyncio.sleep(COMPILE_S)
            return PublishedArtifact(self.training.artifact(gateway.store, prepared.step.spec), 1, "simulated")

        async def export_step(_config: Config, overrides: Sequence[str], _cache: Path) -> Prepared:
            await asyncio.sleep(COMPILE_S)
            return self.training.another_step(overrides)

        # A ring's master starts and stops in a thread, and waits for the event loop there.
        process.calls_in_threads = in_ring = TOPOLOGIES.find(self.config.sync.topology).in_ring

        def topology(*_: object) -> GatewayTopology:
            if not in_ring:
                return StarGateway(self.config.sync.compression)
            return RingGateway(self.config, HOST, None, make_master=partial(Master, ports=self._ports(process)))

        rounds = RoundsSetup(
            prepare=lambda config, cache, stage, own, made: self.training.prepared_with(own),
            compile_for=compile_for,
            topology=topology,
            export_step=export_step,
        )
        gateway = Gateway[Any](self.config, options, Security(), self._setup(rounds), system=system)
        return gateway

    def _roles(self, number: int, process: Process, health: Health) -> Roles:
        seconds = REDUCE_S if self.config.sync.overlap == "none" else OVERLAPPED_S
        network = self.world.network

        def open_executor(_path: Path, spec: StepSpec, **__: object) -> TimedExecutor:
            inner = DoubtfulExecutor(self.training.open_executor(spec), number, self.gossip)
            return TimedExecutor(inner, health)

        loader = TrainingLoader(
            open_executor=open_executor,
            make_communicator=partial(
                DoubtfulCommunicator,
                health,
                lambda: 0.0 if network.has_link(process.node) else self.world.random.uniform(*seconds),
                self.sums,
                ports=self._ports(process),
            ),
        )
        return {rm.TrainingJob: loader}

    def _ports(self, process: Process) -> Ports:
        return simulated_ports(self.world, process, self.disk.of(process), lambda machine, *_: self._observe(machine))

    def _check(self, gateway: Gateway[Any], machine: Validated) -> None:
        """The gateway keeps a few versions, and one result of each worker of each round under way."""
        if gateway.controller is not machine:
            return
        versions, results = self.parameters.kept()
        self.most_kept = max(self.most_kept[0], versions), max(self.most_kept[1], results)
        assert versions <= MOST_VERSIONS, f"the gateway keeps the parameters of {versions} rounds"
        most = 2 * (self.contributors + 1)
        assert results <= most, f"the gateway keeps {results} results of {self.contributors} workers"

    def _lie(self, fault: Fault) -> bool:
        self.gossip.lies[fault.worker] = fault.lie
        self.world.after(fault.seconds, lambda: self.gossip.lies.pop(fault.worker, None))
        return True
