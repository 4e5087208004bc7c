"""The simulated parts of each kind of run: real functions on XLA's CPU backend, data and gateway."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import Config
from planetary.core.step import StepSpec
from planetary.fleet.gateway.run_files import CHECKPOINTS
from planetary.runs.mixture.preparation import PreparedMixture, prepare_mixture
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runtime.device_program import DeviceProgram, open_on_xla
from planetary.runtime.executor import Executor
from planetary.simulation.faults import Fault
from planetary.simulation.mixtures.mixture_cluster import MixtureCluster
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.rounds.training import StepTraining
from planetary.simulation.simulated_cluster import SimMachine, SimulatedCluster


class Simulation(Protocol):
    """A prepared run of some kind."""

    @property
    def config(self) -> Config:
        """Fitted to the data."""
        ...

    def cluster(
        self, seed: int, plan: Sequence[Fault], machines: Sequence[SimMachine], step_s: float
    ) -> SimulatedCluster[Any]:
        """Return the run in a simulated world, which has not begun to move; arguments as of `SimulatedCluster`."""
        ...

    def params(self, cluster: SimulatedCluster[Any]) -> Mapping[str, np.ndarray]:
        """Return the parameters with which a run has ended, float32, by their dotted names."""
        ...


class SimulatedRounds:
    """A run in rounds; see `Simulation`."""

    def __init__(self, config: Config, cache: Path) -> None:
        """Prepare data and training step. Raises as `prepare_run`."""
        self._prepared, self._cache = prepare_run(config, cache, lambda stage: None), cache

    @property
    def config(self) -> Config:
        return self._prepared.config

    def cluster(self, seed: int, plan: Sequence[Fault], machines: Sequence[SimMachine], step_s: float) -> SimCluster:
        spec = self._prepared.step.spec
        executor = _executor(BlobStore(self._cache / "blobs").path(spec.stablehlo_digest), spec)
        training = StepTraining(self._prepared, self._cache, executor)
        workers = self.config.fabric.workers
        return SimCluster(seed, training, workers, plan, machines=machines, step_s=step_s)

    def params(self, cluster: SimulatedCluster[Any]) -> Mapping[str, np.ndarray]:
        assert isinstance(cluster, SimCluster)
        return cluster.parameters.state.params


class SimulatedMixture:
    """A mixture; see `Simulation`. All simulated workers share one copy of the functions, which keep no state."""

    cache: Path

    def __init__(self, config: Config, cache: Path) -> None:
        """Prepare data and functions. Raises as `prepare_mixture`."""
        self.cache, self.prepared = cache, prepare_mixture(config, cache, lambda stage: None)

    @property
    def config(self) -> Config:
        return self.prepared.config

    def artifact(self, store: BlobStore) -> str:
        return self.prepared.program.digest

    def open_program(self) -> DeviceProgram:
        return _program(self.prepared)

    def cluster(
        self, seed: int, plan: Sequence[Fault], machines: Sequence[SimMachine], step_s: float
    ) -> MixtureCluster:
        workers = self.config.fabric.workers
        return MixtureCluster(seed, self, workers, plan, machines=machines, step_s=step_s)

    def params(self, cluster: SimulatedCluster[Any]) -> Mapping[str, np.ndarray]:
        """Those of the last checkpoint, with all experts."""
        if not (cluster.run_folder / CHECKPOINTS).is_dir():
            return {}
        return load_latest(cluster.run_folder / CHECKPOINTS).params


@functools.lru_cache(maxsize=1)  # compiling it takes longer than many a simulation
def _executor(artifact: Path, spec: StepSpec) -> Executor:
    from planetary.runtime.executor import open_executor

    return open_executor(artifact, spec, backend="pjrt:cpu")


_PROGRAMS: dict[str, DeviceProgram] = {}  # at most one runner, by digest


def _program(prepared: PreparedMixture) -> DeviceProgram:
    digest = prepared.program.digest
    if digest not in _PROGRAMS:
        _PROGRAMS.clear()
        _PROGRAMS[digest] = open_on_xla(prepared.program)
    return _PROGRAMS[digest]
