"""The inner optimizer's state on a worker's disk, so it survives the worker's death.

One file per round, named by the round after which the state was current; the two newest are kept, because a round may
have to be trained again after the gateway was restarted. A file counts under the final name: it is written under
another name and renamed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import zipfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from planetary.core.errors import PlanetaryError, ResourceError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.shell.system import System

log = logging.getLogger(__name__)

_KEEP = 2
_NAME = re.compile(r"after-round-(\d+)\.npz")


class InnerStates:
    """The saved states of one worker in one run."""

    def __init__(self, folder: Path, specs: Sequence[TensorSpec]) -> None:
        """`folder` is this worker's alone; `specs` describe the optimizer's state."""
        self._folder = folder
        self._specs = tuple(specs)

    def rounds(self) -> list[int]:
        """The rounds after which a state was saved, newest first."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)

    def save(self, round_: int, state: Tensors) -> None:
        """Save the state after `round_` and forget old ones. Raises `ResourceError`."""
        target = self._path(round_)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                np.savez(file, *(state[spec.name] for spec in self._specs))
            temporary.replace(target)
            for old in self.rounds()[_KEEP:]:
                self._path(old).unlink(missing_ok=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ResourceError(
                f"cannot save the optimizer's state in {self._folder}: {error.strerror or error}; the worker goes on, "
                "but would start with fresh moments after a restart"
            ) from error

    def load(self, before_round: int) -> tuple[int, dict[str, np.ndarray]] | None:
        """Return the newest state from before `before_round` and the state's round, or None.

        A damaged or foreign file is reported, removed, and the next older one is taken.
        """
        for round_ in self.rounds():
            if round_ >= before_round:
                continue
            path = self._path(round_)
            try:
                with np.load(path, allow_pickle=False) as file:
                    arrays = {spec.name: file[f"arr_{i}"] for i, spec in enumerate(self._specs)}
                for spec in self._specs:
                    if arrays[spec.name].shape != spec.shape or arrays[spec.name].dtype != spec.empty().dtype:
                        raise ValueError(f"tensor {spec.name} has another shape or type")
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                log.warning("optimizer state %s is unusable and was removed: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            return round_, arrays
        return None

    def _path(self, round_: int) -> Path:
        return self._folder / f"after-round-{round_}.npz"


class BackgroundSaver:
    """Saves states beside the training, one at a time: a slow disk must not collect them in memory."""

    def __init__(self, system: System) -> None:
        """Start a thread of `system`."""
        self._thread = system.threads("saver")
        self._saving: Future[None] | None = None

    def save(self, states: InnerStates, round_: int, state: Tensors) -> None:
        """Save a state once the one before is saved; a failure is logged."""

        def save() -> None:
            try:
                states.save(round_, state)
            except PlanetaryError as error:
                log.warning("%s", error)

        self.wait()
        self._saving = self._thread.submit(save)

    def wait(self) -> None:
        """Wait for the state that is being saved."""
        if self._saving is not None:
            self._saving.exception()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown(wait=True)
