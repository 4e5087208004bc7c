"""Training of simulated clusters: a model's own step, or a small known function."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.step import StepSpec
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runtime.executor import Executor
from planetary.simulation.executors import Device, View


class Training(Protocol):
    """The part of a simulated run that computes. Equal arguments must give equal bits."""

    @property
    def prepared(self) -> Prepared:
        """Data, initial parameters and signature of the step."""
        ...

    @property
    def cache(self) -> Path | None:
        """Folder with prepared blobs; None: none were prepared."""
        ...

    def prepared_with(self, own: StepRecord | None) -> Prepared:
        """Return the same for a run that goes on with a separate step."""
        ...

    def another_step(self, overrides: Sequence[str]) -> Prepared:
        """Return a step that is to be rolled out. Raises `UserError`."""
        ...

    def artifact(self, store: BlobStore, spec: StepSpec) -> str:
        """Return the digest of the artifact of a step, which the store has."""
        ...

    def open_executor(self, spec: StepSpec) -> Executor:
        """Return a worker's executor of a step."""
        ...


class StepTraining:
    """The training step of a real run, on one executor on which all simulated workers take turns."""

    def __init__(self, prepared: Prepared, cache: Path, executor: Executor) -> None:
        self.prepared, self.cache = prepared, cache
        self._device = Device(executor)

    def under(self, config: Config) -> StepTraining:
        """Return the training of another run of the same step, on the same executor."""
        other = copy.copy(self)
        other.prepared = dataclasses.replace(self.prepared, config=config)
        return other

    def prepared_with(self, own: StepRecord | None) -> Prepared:
        """There is one executor, and one step."""
        return self.prepared

    def another_step(self, overrides: Sequence[str]) -> Prepared:
        raise UserError("the workers of this simulation share one executor, which has one training step")

    def artifact(self, store: BlobStore, spec: StepSpec) -> str:
        return spec.stablehlo_digest

    def open_executor(self, spec: StepSpec) -> Executor:
        return View(self._device)
