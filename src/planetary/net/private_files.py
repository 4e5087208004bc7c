"""Files with secrets, which only their user may read, and which exist once however many processes want to make them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from planetary.core.errors import TrustError


def read_private(path: Path) -> bytes:
    """Return a file's contents. Raises `TrustError` when others can read it too, `OSError` when it is unreadable."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise TrustError(
            f"{path} must be readable by its owner only, its mode is {mode:o}. If no other user read it, "
            f"run: chmod 600 {path}"
        )
    return path.read_bytes()


def create_once(path: Path, make: Callable[[], bytes]) -> Path:
    """Make a private file unless it is there. Of processes that try at once, the first one's stays."""
    if not path.exists():
        temporary = write_private(path, make())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink()
    return path


def write_private(beside: Path, data: bytes) -> Path:
    """Write a private temporary file into the folder of `beside`, on the disk when this returns; return the path."""
    descriptor, name = tempfile.mkstemp(dir=beside.parent, prefix=f".{beside.name}.")  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
