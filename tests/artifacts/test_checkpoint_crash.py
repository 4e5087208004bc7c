"""The power fails before, and halfway through, every single file operation of a checkpoint."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest

from planetary.artifacts.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    list_checkpoints,
    load_checkpoint,
    load_latest,
    verify_checkpoint,
    write_checkpoint,
)
from planetary.artifacts.durable_files import Bytes, DurableFiles
from planetary.core.errors import ResourceError
from planetary.core.tensors import TensorSpec

SPECS = (TensorSpec("w", "f32", (3,)),)


def make(round_: int, model: str = "first") -> Checkpoint:
    values = np.full(3, round_, np.float32)
    info = CheckpointInfo(
        round=round_,
        config_hash="",
        model=model,
        model_digest="",
        param_specs=SPECS,
        data_key="",
        controller=msgspec.Raw(b"{}"),
        random_state={},
        versions={"planetary": "test"},
    )
    return Checkpoint(info, {"w": values}, {"w": -values})


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the real flushes; what they would have saved is tracked by `DyingFiles`."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("planetary.artifacts.durable_files.flush_to_disk", lambda descriptor: None)


class Killed(BaseException):
    """No handler for errors may run after it, as after `kill -9`."""


class DyingFiles(DurableFiles):
    """Dies at operation number `at`. What was not brought to the disk by then is lost when the power fails
    too.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.story: list[str] = []
        self._unsynced: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def _operation(self, what: str) -> None:
        if len(self.story) == self.at:
            self.story.append(f"died before: {what}")
        if len(self.story) > self.at:
            raise Killed(self.story[-1])
        self.story.append(what)

    def make_folder(self, path: Path) -> None:
        self._operation(f"make {path.name}")
        super().make_folder(path)

    def append(self, file: IO[bytes], chunk: Bytes) -> None:
        self._unsynced.add(Path(file.name))
        file.write(bytes(chunk)[: len(chunk) // 2])
        file.flush()
        self._operation(f"write {Path(file.name).name}")
        file.write(bytes(chunk)[len(chunk) // 2 :])

    def sync_file(self, file: IO[bytes]) -> None:
        self._operation(f"sync {Path(file.name).name}")
        super().sync_file(file)
        self._unsynced.discard(Path(file.name))

    def sync_folder(self, path: Path) -> None:
        self._operation(f"sync {path.name}")
        super().sync_folder(path)
        self._renames = [(a, b) for a, b in self._renames if a.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        self._operation(f"rename {source.name} to {target.name}")
        assert not target.exists()
        super().rename(source, target)
        self._renames.append((source, target))
        self._unsynced = {
            target / path.relative_to(source) if path.is_relative_to(source) else path for path in self._unsynced
        }

    def remove_file(self, path: Path) -> None:
        self._operation(f"remove {path.parent.name}/{path.name}")
        super().remove_file(path)
        self._unsynced.discard(path)

    def remove_folder(self, path: Path) -> None:
        self._operation(f"remove {path.name}")
        super().remove_folder(path)

    def lose_power(self) -> None:
        """Undo what only the operating system's memory knew: unsynced data, then unsynced renames, newest
        first.
        """
        for path in self._unsynced:
            path.write_bytes(path.read_bytes()[:1])
        for source, target in reversed(self._renames):
            if target.exists() and not source.exists():
                target.rename(source)


def prepare_plain(folder: Path) -> Checkpoint:
    for round_ in (1, 2):
        write_checkpoint(folder, make(round_), keep=2)
    return make(3)


def prepare_resumed_from_further_back(folder: Path) -> Checkpoint:
    for round_ in (1, 2, 3, 4):
        write_checkpoint(folder, make(round_), keep=9)
    return make(2, "second")


def prepare_same_and_only_one(folder: Path) -> Checkpoint:
    write_checkpoint(folder, make(5), keep=1)
    return make(5, "second")


def prepare_after_a_crash(folder: Path) -> Checkpoint:
    write_checkpoint(folder, make(1), keep=2)
    files = DyingFiles(9)
    with pytest.raises(Killed):
        write_checkpoint(folder, make(2), keep=2, files=files)
    return make(2)


PREPARATIONS = [
    prepare_plain,
    prepare_resumed_from_further_back,
    prepare_same_and_only_one,
    prepare_after_a_crash,
]


def count_operations(folder: Path, prepare, keep: int) -> int:
    files = DyingFiles(10**9)
    write_checkpoint(folder, prepare(folder), keep=keep, files=files)
    return len(files.story)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("prepare", PREPARATIONS)
def test_a_death_at_any_operation_leaves_a_valid_checkpoint(tmp_path: Path, prepare, keep: int, power: bool) -> None:
    operations = count_operations(tmp_path / "count", prepare, keep)
    assert operations > 15
    outcomes = set()
    for at in range(operations):
        folder = tmp_path / str(at)
        new = prepare(folder)
        valid_before = {(entry.round, load_checkpoint(entry.path).info.model) for entry in list_checkpoints(folder)}
        files = DyingFiles(at)
        with pytest.raises(Killed):
            write_checkpoint(folder, new, keep=keep, files=files)
        assert files.story[-1].startswith("died before")  # the fault did happen
        if power:
            files.lose_power()
        story = "; ".join(files.story[-4:])

        latest = load_latest(folder)  # never refused
        for entry in list_checkpoints(folder):
            assert verify_checkpoint(entry.path) == "", story  # nothing half written is in sight
        found = (latest.info.round, latest.info.model)
        assert found in valid_before | {(new.info.round, new.info.model)}, story
        outcomes.add(found)

        # Life goes on: the next write succeeds and clears up.
        write_checkpoint(folder, make(new.info.round + 1), keep=keep)
        assert load_latest(folder).info.round == new.info.round + 1
        assert not list(folder.glob(".*"))
        assert len(list_checkpoints(folder)) <= keep
    assert outcomes - {(new.info.round, new.info.model)}  # dying early keeps an old one
    if not power:  # a power cut before the very last operation may undo the rename
        assert (new.info.round, new.info.model) in outcomes  # dying late keeps the new one


class FullDisk(DurableFiles):
    """The disk is full from operation number `at` on, for everything that needs room."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.failed = False

    def _need_room(self) -> None:
        if self.left == 0:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= 1

    def make_folder(self, path: Path) -> None:
        self._need_room()
        super().make_folder(path)

    def append(self, file: IO[bytes], chunk: Bytes) -> None:
        self._need_room()
        super().append(file, chunk)

    def sync_file(self, file: IO[bytes]) -> None:
        self._need_room()
        super().sync_file(file)

    def rename(self, source: Path, target: Path) -> None:
        self._need_room()
        super().rename(source, target)


def test_full_disk_leaves_the_previous_checkpoint_and_no_rest(tmp_path: Path) -> None:
    failures = 0
    for at in range(100):
        folder = tmp_path / str(at)
        write_checkpoint(folder, make(1), keep=1)
        files = FullDisk(at)
        text = ""
        try:
            write_checkpoint(folder, make(2), keep=1, files=files)
        except ResourceError as error:
            text = str(error)
        assert files.failed == bool(text)
        if not text:
            break
        failures += 1
        assert not list(folder.glob(".writing-*"))
        if load_latest(folder).info.round == 1:
            assert "writing the checkpoint of round 2" in text
            assert "No space left on device; the checkpoint of round 1 stays valid" in text
            assert "MB are free there: make room" in text
        else:
            assert "is written, but removing older checkpoints failed" in text
    assert failures > 10
    assert load_latest(folder).info.round == 2
