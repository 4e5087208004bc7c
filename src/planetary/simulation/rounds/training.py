"""What simulated clusters train: a model's own step, or a small known function."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Protocol

from planetary.artifacts.store import BlobStore
from planetary.core.config import Config
from planetary.fabric.preparation.preparation import Prepared
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
        """Folder with the blobs of what was prepared; None: there are none."""
        ...

    def artifact(self, store: BlobStore) -> str:
        """Return the digest of what workers load; the store has it."""
        ...

    def open_executor(self) -> Executor:
        """Return a worker's executor."""
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

    def artifact(self, store: BlobStore) -> str:
        """See `Training`."""
        return self.prepared.step.spec.stablehlo_digest

    def open_executor(self) -> Executor:
        """See `Training`."""
        return View(self._device)
