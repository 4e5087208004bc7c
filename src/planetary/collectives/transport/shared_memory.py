"""Bulk data between peers on one machine: slots of a shared file the sender fills and the receiver reads in place.

Headers still travel over the connection, so order, deadlines and the death of either side are as without it. A slot
is lent to the receiver with a header and comes back with one byte.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import time
from collections import deque
from pathlib import Path

import numpy as np

from planetary.core.errors import RemoteProtocolError

FOLDER = Path("/dev/shm")
SLOTS = 4
_NAME = re.compile(r"planetary-ring-[0-9a-f]{32}")
_SLOT_MOST = 64 << 20
_STALE_S = 60.0  # much longer than a name is needed


class SlotWriter:
    """The sender's side.

    Attributes:
        name: of the file, until `unlink`.
        free: numbers of the slots that may be filled.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Make a file of `SLOTS` slots. Raises `OSError` where there is no room, or no such folder."""
        remove_stale()
        self.slot_bytes = slot_bytes
        self.name = f"planetary-ring-{secrets.token_hex(16)}"
        descriptor = os.open(FOLDER / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SLOTS * slot_bytes)  # without room: an error now, not a signal later
            self._map = mmap.mmap(descriptor, SLOTS * slot_bytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.free = deque(range(SLOTS))

    def fill(self, slot: int, data: memoryview) -> None:
        """Copy into a slot; lets other threads run meanwhile."""
        start = slot * self.slot_bytes
        self._bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def unlink(self) -> None:
        """Remove the name: open handles stay valid, and from then on a death leaves nothing behind."""
        with contextlib.suppress(OSError):
            os.unlink(FOLDER / self.name)


def remove_stale() -> None:
    """Remove the files of processes that died before they could; those of other users stay."""
    for path in FOLDER.glob("planetary-ring-*"):
        with contextlib.suppress(OSError):  # it went by itself, or is not ours
            found = path.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _STALE_S:
                path.unlink()


class SlotReader:
    """The receiver's side."""

    def __init__(self, name: str, slot_bytes: int) -> None:
        """Open a sender's file. Raises `OSError`, or `RemoteProtocolError` for one that cannot be a sender's."""
        if not _NAME.fullmatch(name) or not 0 < slot_bytes <= _SLOT_MOST:
            raise RemoteProtocolError(f"shared memory named {name!r} with slots of {slot_bytes} bytes was announced")
        descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_size < SLOTS * slot_bytes:
                raise RemoteProtocolError(f"{FOLDER / name} is another user's, or shorter than announced")
            self._map = mmap.mmap(descriptor, SLOTS * slot_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._slot_bytes = slot_bytes
        self._view = memoryview(self._map)

    def view(self, slot: int, length: int) -> memoryview:
        """Return the bytes in a slot. Raises `RemoteProtocolError` for an impossible slot or length."""
        if slot >= SLOTS or length > self._slot_bytes:
            raise RemoteProtocolError(f"{length} bytes in slot {slot} were announced")
        return self._view[slot * self._slot_bytes : slot * self._slot_bytes + length]
