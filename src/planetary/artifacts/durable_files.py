"""The few file operations that checkpoints, journals and blobs are made of, each one replaceable by a failing one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

try:
    from fcntl import F_FULLFSYNC, fcntl  # macOS: its fsync does not reach the disk itself  # pyright: ignore
except ImportError:
    F_FULLFSYNC, fcntl = None, None

Bytes = bytes | bytearray | memoryview


def flush_to_disk(descriptor: int) -> None:
    """Return when the file's data would survive a power cut."""
    if F_FULLFSYNC is not None and fcntl is not None:
        fcntl(descriptor, F_FULLFSYNC)
    else:
        os.fsync(descriptor)


class DurableFiles:
    """Operations on the real disk. All raise `OSError` as the operating system does."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and the ones above it; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def write_file(self, path: Path, chunks: Iterable[Bytes]) -> None:
        """Write a new file and return when it is on the disk (the name in the folder is not yet)."""
        with path.open("wb") as file:
            for chunk in chunks:
                self.append(file, chunk)
            file.flush()
            self.sync_file(file)

    def append(self, file: IO[bytes], chunk: Bytes) -> None:
        """Write one piece of a file."""
        file.write(chunk)

    def sync_file(self, file: IO[bytes]) -> None:
        """Bring an open file's data to the disk."""
        flush_to_disk(file.fileno())

    def open(self, path: Path, flags: int) -> int:
        """Open a file and return the descriptor; child processes do not inherit it.

        Only this user may read a file that is made: journals have configurations and errors, and these passwords.
        """
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)

    def write(self, descriptor: int, chunk: Bytes) -> int:
        """Write with one call of the system and return how many bytes were written."""
        return os.write(descriptor, chunk)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut an open file to `size` bytes."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Bring an open file's data to the disk."""
        flush_to_disk(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor, which also releases the lock."""
        os.close(descriptor)

    def make_temporary(self, folder: Path, prefix: str) -> tuple[IO[bytes], Path]:
        """Make a new empty file, which only this user may read; return it open, and the path."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=prefix)
        return os.fdopen(descriptor, "wb"), Path(name)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file; it takes the place of `target` where that exists."""
        os.replace(source, target)

    def sync_folder(self, path: Path) -> None:
        """Bring the names in a folder to the disk: files made, renamed or removed in it."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; `target` must not exist."""
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int | None:
        """Return how many bytes this user may still write where `path` is; None: it is not known."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def remove_tree(self, path: Path) -> None:
        """Remove a folder of files and folders, one by one."""
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry)
            else:
                self.remove_file(entry)
        self.remove_folder(path)


DISK = DurableFiles()
"""The real disk."""
