"""What a gateway tells the process that started it: where it listens, and a token to join with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec


class Announcement(msgspec.Struct, frozen=True):
    """The content of the file. It holds a secret, so only its owner can read it."""

    host: str
    port: int
    dashboard: str  # URL
    token: str
    folder: str  # of the run


def write_announcement(path: Path, announcement: Announcement) -> None:
    """Write the file, whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".announce-")  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(announcement))
    os.replace(temporary, path)


def read_announcement(path: Path) -> Announcement | None:
    """Return the announcement; None while it is not there yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Announcement)
    except FileNotFoundError:
        return None
