"""Whether the checkpoints of a run fit on the gateway's disk, in words."""

from __future__ import annotations

import contextlib
from pathlib import Path

from planetary.artifacts.checkpoint import list_checkpoints
from planetary.artifacts.durable_files import DurableFiles
from planetary.core.errors import ResourceError
from planetary.core.tensors import TensorSpec
from planetary.fleet.gateway.run_files import CHECKPOINTS

PROTECTED = 2  # checkpoints that stay besides the newest: the best held-out loss, the newest sane one


def checkpoint_bytes(params: tuple[TensorSpec, ...], copies: int = 2) -> int:
    """Return the size of a checkpoint: so many float32 copies, such as parameters and velocity."""
    return sum(copies * 4 * spec.size for spec in params)


def room_for(nbytes: int, *, keep: int, there: int, free: int, folder: Path) -> tuple[str, bool]:
    """Return a warning about the disk for the user before a run, and whether all checkpoints fit.

    Args:
        nbytes: of a checkpoint.
        keep: newest ones that are kept.
        there: checkpoints in the folder already.
        free: bytes that are free.
        folder: of the checkpoints.

    Raises:
        ResourceError: not even one fits.
    """
    if free < nbytes:
        raise ResourceError(
            f"a checkpoint of this run takes {_size(nbytes)}, and {folder} has {_size(free)} free: make room there, or "
            "choose another folder with --run-dir"
        )
    most = keep + PROTECTED + 1  # the one that is being written
    missing = max(1, most - there)
    text = f"a checkpoint takes {_size(nbytes)}, up to {most} are on the disk at once, and {_size(free)} are free"
    if free < missing * nbytes:
        return f"{text} in {folder}: the run will pause when a checkpoint does not fit", False
    return text, True


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


class DiskRoom:
    """The disk of a run's checkpoints; they may be on another one than the run's folder.

    Attributes:
        checkpoint_bytes: size of a checkpoint; None before `check`.
        free: bytes that were free when a checkpoint was last written, or could not be; None: not known.
        written_at: Unix time in seconds at which the newest checkpoint was written; None: none since the start.
    """

    def __init__(self, folder: Path, files: DurableFiles) -> None:
        """`folder`: of the run."""
        self._folder, self._files = folder, files
        self.checkpoint_bytes: int | None = None
        self.free: int | None = None
        self.written_at: float | None = None

    def check(self, params: tuple[TensorSpec, ...], keep: int, copies: int = 2) -> tuple[str, bool]:
        """Return `room_for` of this disk; no warning where the size is unknown. Raises `ResourceError`."""
        checkpoints = self._folder / CHECKPOINTS
        self.checkpoint_bytes = checkpoint_bytes(params, copies)
        self.look()
        if self.free is None:
            return "", True
        there = len(list_checkpoints(checkpoints)) if checkpoints.is_dir() else 0
        return room_for(self.checkpoint_bytes, keep=keep, there=there, free=self.free, folder=checkpoints)

    def look(self) -> None:
        """Record the free space."""
        checkpoints = self._folder / CHECKPOINTS
        with contextlib.suppress(OSError):
            self.free = self._files.free_bytes(checkpoints if checkpoints.is_dir() else self._folder)
