"""Bulk data between processes of one machine by direct reads of the sender's memory.

One copy where a socket makes two. The system must allow it (Linux, the same user, a debugger could attach); whether it
does is found when a connection begins, and otherwise `shared_memory` or the socket itself carries the pieces.

Against stale pieces: after every piece the receiver reads the lender's word. A lender that leaves the ring for good
clears the word before changing any array.

Against forged loans: the word has the value the receiver chose when the connection began. Only a sender with write
access to a process's memory can make the receiver read it, so no sender reaches a foreign process's memory; and a new
process under an ended one's number does not have the word.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from typing import Any

import msgspec
import numpy as np

from planetary.core.errors import PeerError

_WORD_BYTES = CHALLENGE_BYTES = 8


class Loan(msgspec.Struct, frozen=True):
    """A lender's offer: all the facts for reading the lender's memory."""

    pid: int
    word: int  # address of the word


class Lender:
    """The sender's side."""

    def __init__(self) -> None:
        """Nothing can be read before `show`."""
        self._word = np.zeros(1, np.uint64)
        self.loan = Loan(os.getpid(), address_of(self._word))

    def show(self, challenge: bytes) -> None:
        """Let pieces be read by the peer that chose this value, and by no other."""
        self._word[0] = int.from_bytes(challenge, "big")

    def revoke(self) -> None:
        """Make everything not read yet unreadable."""
        self._word[0] = 0


def draw_challenge() -> bytes:
    """Return an unguessable value; all zeros where memory cannot be read."""
    return (
        (secrets.randbits(63) | 1).to_bytes(CHALLENGE_BYTES, "big") if _process_vm_readv() else bytes(CHALLENGE_BYTES)
    )


class Borrower:
    """The receiver's side; one thread uses it."""

    def __init__(self, loan: Loan, challenge: bytes) -> None:
        """Raises `PeerError` where the system does not allow it, or `challenge` is not shown there."""
        self._loan, self._value = loan, int.from_bytes(challenge, "big")
        self._call = _process_vm_readv()
        self._found = np.zeros(1, np.uint64)
        self._local, self._remote = (_Part * 2)(), (_Part * 2)()
        self._local[1] = _Part(address_of(self._found), _WORD_BYTES)
        self._remote[1] = _Part(loan.word, _WORD_BYTES)
        if self._call is None:
            raise PeerError("this system cannot read the memory of another process")
        nothing = np.zeros(1, np.uint64)
        if not self.read(loan.word, nothing.view(np.uint8).data):
            raise PeerError("the memory of that process cannot be read")

    def read(self, address: int, into: memoryview) -> bool:
        """Copy from the lender; false when the memory is gone. Raises `PeerError` when it has left."""
        self._local[0].base, self._local[0].length = address_of(np.frombuffer(into, np.uint8)), len(into)
        self._remote[0].base, self._remote[0].length = address, len(into)
        self._found[0] = 0
        count = self._call(self._loan.pid, self._local, 2, self._remote, 2, 0)
        if count != len(into) + _WORD_BYTES:
            return False
        if self._found[0] != self._value:
            raise PeerError("it has left")
        return True


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def address_of(array: np.ndarray) -> int:
    """Where an array's elements begin."""
    return int(array.__array_interface__["data"][0])


def _process_vm_readv() -> Any:
    """The system's call, which lets other threads run; None where there is none."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is not None:
        parts = ctypes.POINTER(_Part)
        call.restype = ctypes.c_ssize_t
        call.argtypes = (ctypes.c_int, parts, ctypes.c_ulong, parts, ctypes.c_ulong, ctypes.c_ulong)
    return call
