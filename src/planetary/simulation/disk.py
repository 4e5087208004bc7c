"""A machine's disk: files in a real folder, which outlive simulated processes, and the faults of disks.

Nothing is really synced to the device, so a simulation is fast on any disk; the simulated disk counts synced bytes
instead, and `cut_power` takes back unsynced appended bytes, and files made or renamed in unsynced folders.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from planetary.artifacts.durable_files import Bytes, DurableFiles
from planetary.core.clock import Clock
from planetary.simulation.event_loop import ProcessKilled
from planetary.simulation.process import Process

KEPT_NAMES = 0.25
"""Probability with which a name that was not synced outlasts a power cut."""


class SimulatedDisk:
    """The state of a disk, and the next faults.

    Attributes:
        full: how many of the next large files (those of a checkpoint) find no space; small ones still fit.
        no_space: whether nothing fits.
        unwritable: a folder in which no file can be written; None: none.
        was_short: whether an operation has failed for lack of space.
        torn: whether the process dies in the midst of the next append, leaving half of it.
        dies_after: operations until the process dies before the next one; None: it does not.
        lies: whether a power cut loses synced bytes, too.
        struck: is called with the kind of a fault that happens.
    """

    def __init__(self, source: random.Random, struck: Callable[[str], None], clock: Clock) -> None:
        """`clock`: files written whole have this clock's time."""
        self.full = 0
        self.no_space = self.was_short = False
        self.unwritable: Path | None = None
        self.torn = False
        self.dies_after: int | None = None
        self.lies = False
        self.struck = struck
        self.clock = clock
        self._source = source
        self._synced: dict[Path, int] = {}  # files appended to -> bytes that would survive
        self._unsynced: dict[Path, dict[str, Path | None]] = {}  # folder -> name in it -> former name; None: new

    def of(self, process: Process) -> SimulatedFiles:
        """Return the disk as a process uses it."""
        files = SimulatedFiles(self, process)
        process.on_exit.append(files.release)
        return files

    def cut_power(self, process: Process) -> None:
        """Kill the process; of the bytes appended since the last sync some part or nothing is left."""
        process.kill()
        for path, synced in self._synced.items():
            size = path.stat().st_size if path.exists() else 0
            if size > synced:
                os.truncate(path, self._source.randint(synced, size))
        self._forget_names()

    def _forget_names(self) -> None:
        """Lose some names in folders that were not synced, those in the deepest folders first."""
        for folder in sorted(self._unsynced, reverse=True):
            for name, before in self._unsynced[folder].items():
                path = folder / name
                if not path.exists() or self._source.random() < KEPT_NAMES:
                    continue
                if before is None:
                    path.unlink()
                elif not before.exists():
                    path.rename(before)
        self._unsynced.clear()

    def named(self, path: Path, before: Path | None = None) -> None:
        """A name was given in a folder: to a new file, or to the one whose name was `before`."""
        if before is not None:
            if before in self._unsynced:  # a folder, with the names
                self._unsynced[path] = self._unsynced.pop(before)
            if before.name in (siblings := self._unsynced.get(before.parent, {})):
                before = siblings.pop(before.name)
        self._unsynced.setdefault(path.parent, {})[path.name] = before

    def synced_folder(self, path: Path) -> None:
        """The names in a folder are safe."""
        self._unsynced.pop(path, None)

    def make_room(self) -> None:
        """End the lack of space."""
        self.no_space = self.was_short = False

    def opened(self, path: Path) -> None:
        """A file will be appended to; present bytes are safe."""
        self._synced[path] = path.stat().st_size

    def synced(self, path: Path) -> None:
        """A file was synced."""
        if path in self._synced and not self.lies:
            self._synced[path] = path.stat().st_size

    def replaced(self, path: Path) -> None:
        """A file was replaced by one that is safe."""
        if path in self._synced:
            self._synced[path] = path.stat().st_size


class SimulatedFiles(DurableFiles):
    """The operations of one process; those of a process that is not alive unwind it."""

    def __init__(self, disk: SimulatedDisk, process: Process) -> None:
        self._disk, self._process = disk, process
        self._open: dict[int, Path] = {}

    def release(self, _: Process) -> None:
        """Close the process's open files, as the system does: locks are released."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _begin(self, grows: bool = False) -> None:
        """An operation begins; `grows`: it needs space."""
        disk = self._disk
        if not self._process.alive:
            raise ProcessKilled
        if disk.dies_after is not None:
            disk.dies_after -= 1
            if disk.dies_after < 0:
                disk.dies_after = None
                disk.struck("kill_gateway_writing")
                self._die()
        if grows and disk.no_space:
            if not disk.was_short:
                disk.was_short = True
                disk.struck("no_space")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _die(self) -> None:
        self._process.kill()
        raise ProcessKilled

    # --- see `DurableFiles` -------------------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        self._begin()
        super().make_folder(path)

    def write_file(self, path: Path, chunks: Iterable[Bytes]) -> None:
        self._begin(grows=True)
        if self._disk.full > 0:
            self._disk.full -= 1
            self._disk.struck("full_disk")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        is_new = not path.exists()
        super().write_file(path, chunks)
        if is_new:
            self._disk.named(path)

    def append(self, file: IO[bytes], chunk: Bytes) -> None:
        self._begin(grows=True)
        super().append(file, chunk)

    def sync_file(self, file: IO[bytes]) -> None:
        self._begin()

    def open(self, path: Path, flags: int) -> int:
        self._begin()
        is_new = not path.exists()
        descriptor = super().open(path, flags)
        self._open[descriptor] = path
        if is_new:
            self._disk.named(path)
        if flags & os.O_APPEND:
            self._disk.opened(path)
        return descriptor

    def write(self, descriptor: int, chunk: Bytes) -> int:
        self._begin(grows=True)
        if self._disk.torn and self._open[descriptor].suffix == ".jsonl":
            self._disk.torn = False
            super().write(descriptor, memoryview(chunk)[: len(chunk) // 2])
            self._disk.struck("torn_write")
            self._die()
        return super().write(descriptor, chunk)

    def truncate(self, descriptor: int, size: int) -> None:
        self._begin()
        super().truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._begin()
        self._disk.synced(self._open[descriptor])

    def close(self, descriptor: int) -> None:
        self._begin()
        del self._open[descriptor]
        super().close(descriptor)

    def make_temporary(self, folder: Path, prefix: str) -> tuple[IO[bytes], Path]:
        self._begin(grows=True)
        if self._disk.unwritable is not None and folder.is_relative_to(self._disk.unwritable):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().make_temporary(folder, prefix)

    def replace(self, source: Path, target: Path) -> None:
        self._begin()
        super().replace(source, target)
        now = self._disk.clock.wall()
        os.utime(target, (now, now))
        self._disk.replaced(target)

    def sync_folder(self, path: Path) -> None:
        self._begin()
        self._disk.synced_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._begin()
        super().rename(source, target)
        self._disk.named(target, source)

    def remove_file(self, path: Path) -> None:
        self._begin()
        super().remove_file(path)

    def free_bytes(self, path: Path) -> int | None:
        """None: the disk has no size, and is full by faults only."""
        return None

    def remove_folder(self, path: Path) -> None:
        self._begin()
        super().remove_folder(path)


def flip_bit(path: Path, source: random.Random) -> None:
    """Change one bit of a file, without a trace in the file system."""
    times = path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    with contextlib.suppress(PermissionError):
        path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(times, times))
