"""Frames between peers: an introduction, and then, on a ring connection, pieces behind a fixed header."""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

import msgspec

from planetary.collectives.transport.direct_memory import Loan
from planetary.core.errors import RemoteProtocolError

INTRODUCTION_BYTES = 4 << 10
PIECE_MOST = 64 << 20
"""Longest accepted piece, in bytes: the limit on a receiver's wait for one frame."""

_HEADER = struct.Struct(">QIII")
HEADER_BYTES = _HEADER.size


class Introduction(msgspec.Struct, frozen=True):
    """First bytes of every connection between peers, as JSON behind the length."""

    purpose: Literal["ring", "state", "probe"]
    peer: str  # id of the connecting peer
    key: str  # secret of the group
    shared: str = ""  # a ring connection within one machine: name of the shared memory; answered by one byte
    slot_bytes: int = 0
    loan: Loan | None = None  # instead: the memory of the sender itself; answered by a challenge, and then one byte


class Request(msgspec.Struct, frozen=True):
    """On a `state` connection: send a part of an array of the shared state."""

    seq: int
    name: str
    offset: int  # bytes
    length: int


class StateAnswer(msgspec.Struct, frozen=True):
    """Answers `Request`; when ok, `length` raw bytes follow."""

    ok: bool
    length: int = 0
    reason: str = ""


class ProbeRequest(msgspec.Struct, frozen=True):
    """On a `probe` connection: `length` raw bytes follow; answer when all came. 0 measures the latency."""

    length: int


class Header(NamedTuple):
    """Before every piece."""

    seq: int  # operation
    stage: int
    piece: int  # index of the piece in the stage's chunk
    length: int  # bytes that follow


IN_SLOT = 1 << 31
"""Set in the stage of a header: the bytes are in a slot of shared memory, whose number follows as one byte."""

ADDRESS = struct.Struct(">Q")
"""Follows the header on a connection whose sender lends memory: where the bytes are. Nothing else follows."""

ACCEPTED, DECLINED = b"y", b"n"
"""The answer to shared memory, or to a loan, that was offered."""


def pack_header(seq: int, stage: int, index: int, length: int) -> bytes:
    """Return the header's bytes."""
    return _HEADER.pack(seq, stage, index, length)


def read_header(data: bytearray) -> Header:
    """Read a header. Raises `RemoteProtocolError` for a piece over the cap."""
    header = Header(*_HEADER.unpack(data))
    if header.length > PIECE_MOST:
        raise RemoteProtocolError(f"a piece may have {PIECE_MOST} bytes, one of {header.length} was announced")
    return header
