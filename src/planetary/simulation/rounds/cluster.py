"""A simulated run in rounds.

What is computed is behind `simulation.training.Training`: a real training step, or `small_training`, whose parameters
at the end can be computed again from the journal alone and must be equal bit for bit, whatever went wrong on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planetary.core.config import Config
from planetary.core.step import StepSpec
from planetary.fabric.controller.controller import Controller
from planetary.fabric.gateway.gateway import GatewayOptions, Security
from planetary.fabric.gateway.gateway_topology import GatewayTopology, RingGateway, StarGateway
from planetary.fabric.gateway.rounds_gateway import RoundsGateway
from planetary.fabric.gateway.rounds_start import policy_of
from planetary.fabric.preparation.compiling import PublishedArtifact
from planetary.fabric.preparation.preparation import Prepared
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.policy import ControllerPolicy
from planetary.fabric.protocol.records import AnyRecord
from planetary.fabric.shell.system import System
from planetary.fabric.worker.role import Roles
from planetary.fabric.worker.training_role import TrainingLoader
from planetary.machine.machine import Validated
from planetary.simulation.executors import Health, TimedExecutor
from planetary.simulation.faults import Fault
from planetary.simulation.lies import DoubtfulExecutor, Gossip
from planetary.simulation.node import STEP_S
from planetary.simulation.process import Process
from planetary.simulation.rounds.ring import SimulatedCommunicator, SimulatedMaster, make_master
from planetary.simulation.rounds.training import Training
from planetary.simulation.simulated_cluster import COMPILE_S, SimMachine, SimPlace, SimulatedCluster
from planetary.simulation.simulated_network import HOST

MOST_VERSIONS = 4  # of the parameters, that the gateway keeps


class SimCluster(SimulatedCluster[RoundsGateway]):
    """A run in rounds; see `SimulatedCluster`.

    Attributes:
        training: what is computed.
        gossip: what liars hear of the others.
        most_kept: most versions and most results that the gateway kept at once.
    """

    records = AnyRecord
    protocol = m.FABRIC

    def __init__(
        self,
        seed: int,
        training: Training,
        nodes: int,
        plan: Sequence[Fault] = (),
        *,
        place: SimPlace | None = None,
        make: Callable[..., RoundsGateway] = RoundsGateway,
        machines: Sequence[SimMachine] = (),
        step_s: float = STEP_S,
    ) -> None:
        """Start everything at time 0; `plan` names nodes by number, `make` makes the gateway as its class does."""
        self.training, self.gossip, self.most_kept = training, Gossip(), (0, 0)
        self._master: SimulatedMaster | None = None
        self._make = make
        self.contributors = nodes  # to a round
        config, cache = training.prepared.config, training.cache
        super().__init__(seed, config, nodes, plan, cache=cache, step_s=step_s, place=place, machines=machines)

    @property
    def policy(self) -> ControllerPolicy:
        """The constants of the run, but for those of its topology."""
        return policy_of(self.config, self.training.prepared)

    @property
    def controller(self) -> Controller:
        """Return the controller of the gateway that runs, or ran last."""
        found = super().controller
        assert isinstance(found, Controller)
        return found

    def _make_gateway(self, process: Process, options: GatewayOptions, system: System) -> RoundsGateway:
        async def compile_for(prepared: Prepared, *_: object) -> PublishedArtifact:
            await asyncio.sleep(COMPILE_S)
            return PublishedArtifact(self.training.artifact(gateway.store, prepared.step.spec), 1, "simulated")

        async def export_step(_config: Config, overrides: Sequence[str], _cache: Path) -> Prepared:
            await asyncio.sleep(COMPILE_S)
            return self.training.another_step(overrides)

        def topology(*_: object) -> GatewayTopology:
            if self.config.sync.topology == "star":
                return StarGateway(self.config.sync.compression)
            overlap = self.config.sync.overlap != "none"

            def master(*args: Any, **kwargs: Any) -> SimulatedMaster:
                self._master = make_master(self.world, process, overlap=overlap)(*args, **kwargs)
                return self._master

            return RingGateway(self.config, HOST, None, make_master=master)

        gateway = self._make(
            self.config,
            options,
            Security(),
            system=system,
            prepare=lambda config, cache, stage, own: self.training.prepared_with(own),
            compile_for=compile_for,
            topology=topology,
            export_step=export_step,
        )
        return gateway

    def _roles(self, number: int, process: Process, health: Health) -> Roles:
        def open_executor(_path: Path, spec: StepSpec, **__: object) -> TimedExecutor:
            inner = DoubtfulExecutor(self.training.open_executor(spec), number, self.gossip)
            return TimedExecutor(inner, health)

        loader = TrainingLoader(
            open_executor=open_executor,
            make_communicator=lambda address, group, *, name, timeout_s, **_: SimulatedCommunicator(
                lambda: self._master, process, health, group, name=name, timeout_s=timeout_s
            ),
        )
        return {m.TrainingJob: loader}

    def _lost_gateway(self) -> None:
        self._master = None

    def _check(self, gateway: RoundsGateway, machine: Validated) -> None:
        """The gateway keeps a few versions, and one result of each worker of each round under way."""
        if gateway.controller is not machine:
            return
        versions, results = gateway.parameters.kept()
        self.most_kept = max(self.most_kept[0], versions), max(self.most_kept[1], results)
        assert versions <= MOST_VERSIONS, f"the gateway keeps the parameters of {versions} rounds"
        most = 2 * (self.contributors + 1)
        assert results <= most, f"the gateway keeps {results} results of {self.contributors} workers"

    def _lie(self, fault: Fault) -> bool:
        self.gossip.lies[fault.worker] = fault.lie
        self.world.after(fault.seconds, lambda: self.gossip.lies.pop(fault.worker, None))
        return True
