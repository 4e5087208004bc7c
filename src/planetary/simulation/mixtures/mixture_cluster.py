"""A simulated mixture: syncer, composers and expert workers in the production shells, with payloads on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import Config
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.preparation.compiling import PublishedArtifact
from planetary.fleet.shell.system import System
from planetary.fleet.worker.role import Roles
from planetary.machine.machine import Validated
from planetary.runs.mixture.controller.controller import MixtureController
from planetary.runs.mixture.gateway.gateway import MixtureRun, MixtureSetup
from planetary.runs.mixture.loader import MixtureLoader
from planetary.runs.mixture.messages import MIXTURES, MixtureJob
from planetary.runs.mixture.preparation import PreparedMixture
from planetary.runtime.device_program import DeviceProgram
from planetary.simulation.executors import Health
from planetary.simulation.faults import Fault
from planetary.simulation.node import STEP_S
from planetary.simulation.process import Process
from planetary.simulation.simulated_cluster import COMPILE_S, SimMachine, SimulatedCluster
from planetary.simulation.timed_program import TimedProgram

STEPS = {"composer_gradients": 1.0, "expert_gradients": 0.5, "composer_evaluate": 0.5, "whole_evaluate": 0.5}
"""See `TimedProgram`."""


class MixtureTraining(Protocol):
    """The part of a simulated mixture that computes. Equal arguments must give equal bits."""

    @property
    def prepared(self) -> PreparedMixture:
        """Plan, program and initial parameters."""
        ...

    @property
    def cache(self) -> Path | None:
        """Folder with the blobs of the preparation; None: there are none."""
        ...

    def artifact(self, store: BlobStore) -> str:
        """Return the digest of the workers' artifact; the store has it."""
        ...

    def open_program(self) -> DeviceProgram:
        """Return the whole program on a worker's device."""
        ...


class MixtureCluster(SimulatedCluster[Gateway[Any]]):
    """A mixture; see `SimulatedCluster`.

    Attributes:
        training: the numerics.
        run_type: class of the runs.
        most_kept: most results of expert workers the gateway kept at once.
    """

    run_type: ClassVar[type[MixtureRun]] = MixtureRun

    protocol = MIXTURES

    def __init__(
        self,
        seed: int,
        training: MixtureTraining,
        nodes: int,
        plan: Sequence[Fault] = (),
        *,
        step_s: float = STEP_S,
        machines: Sequence[SimMachine] = (),
    ) -> None:
        """Start everything at time 0; `plan` names nodes by number."""
        self.training, self.most_kept = training, 0
        config: Config = training.prepared.config
        super().__init__(seed, config, nodes, plan, cache=training.cache, step_s=step_s, machines=machines)

    @property
    def controller(self) -> MixtureController:
        """Return the controller of the gateway that runs, or ran last."""
        found = super().controller
        assert isinstance(found, MixtureController)
        return found

    def _make_gateway(self, process: Process, options: GatewayOptions, system: System) -> Gateway[Any]:
        async def compile_for(*_: object) -> PublishedArtifact:
            await self._compile()
            return PublishedArtifact(self.training.artifact(gateway.store), 1, "simulated")

        setup = MixtureSetup(
            prepare=lambda *_: self.training.prepared,
            compile_for=compile_for,
            run=self.run_type,
        )
        gateway = Gateway[Any](self.config, options, Security(), setup, system=system)
        return gateway

    async def _compile(self) -> None:
        """Take the time that compiling takes."""
        await asyncio.sleep(COMPILE_S)

    def _roles(self, number: int, process: Process, health: Health) -> Roles:
        def open_program(*_: object, **__: object) -> TimedProgram:
            return TimedProgram(self.training.open_program(), health, STEPS)

        return {MixtureJob: MixtureLoader(open_program)}

    def _check(self, gateway: Gateway[Any], machine: Validated) -> None:
        """The gateway keeps two results of each worker at most: one under judgement, and one just received."""
        if gateway.controller is not machine:
            return
        kept = gateway.run_parts.run.kept_results
        self.most_kept = max(self.most_kept, kept)
        assert kept <= 2 * (len(self.nodes) + 1), f"the gateway keeps {kept} results of {len(self.nodes)} workers"
