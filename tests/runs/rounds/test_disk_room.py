"""What is said of the disk before a run, and that a checkpoint does not fill it to the last byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planetary.artifacts.checkpoint import list_checkpoints, write_checkpoint
from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.core.errors import ResourceError
from planetary.core.tensors import TensorSpec
from planetary.runs.rounds.gateway.disk_room import checkpoint_bytes, room_for
from saved_parameters import checkpoint_of

SPECS = (TensorSpec("w", "bf16", (1000, 25)),)
FOLDER = Path("/runs/x")
EACH = 200_000


class Small(DurableFiles):
    """A disk with so many free bytes."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int | None:
        return self.free


def test_a_checkpoint_is_parameters_and_velocity_in_float32() -> None:
    assert checkpoint_bytes(SPECS) == EACH


def test_what_fits_is_said_and_what_will_not_is_a_warning() -> None:
    text, fits = room_for(26_300_000, keep=2, there=0, free=41_200_000_000, folder=FOLDER)
    assert (text, fits) == ("a checkpoint takes 26.3 MB, up to 5 are on the disk at once, and 41.2 GB are free", True)
    text, fits = room_for(26_300_000, keep=2, there=0, free=100_000_000, folder=FOLDER)
    assert not fits
    assert text.endswith("100.0 MB are free in /runs/x: the run will pause when a checkpoint does not fit")
    assert room_for(26_300_000, keep=2, there=3, free=100_000_000, folder=FOLDER)[1]  # a resumed run has most of them


def test_disk_without_room_is_refused_before_training() -> None:
    with pytest.raises(ResourceError, match=r"takes 26\.3 MB, and /runs/x has 20\.0 MB free: make room there"):
        room_for(26_300_000, keep=2, there=0, free=20_000_000, folder=FOLDER)


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    made = checkpoint_of({"w": np.zeros((1000, 25), np.float32)})
    with pytest.raises(ResourceError, match="No space left on device; there is none before it"):
        write_checkpoint(tmp_path, made, keep=1, files=Small(EACH - 1))
    assert list_checkpoints(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert (DISK.free_bytes(tmp_path) or 0) > EACH
