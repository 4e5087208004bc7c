"""The layout of frames: a fixed prefix, a header and a payload, each to and from bytes. Pure functions, no state.

    offset  size  field
         0     4  magic b"PLNT"
         4     1  protocol version
         5     1  kind
         6     2  zero
         8     4  length of the header, in bytes
        12     4  length of the payload, in bytes
        16     4  CRC-32 of the header
        20     4  CRC-32 of the payload
        24     4  CRC-32 of the 24 bytes before

All integers are little endian. The first five bytes keep their meaning in every protocol version, so two versions that
share nothing else still notice each other.

    kind      header                                     payload
    CONTROL   JSON list of the tensors that follow,      JSON of the message
              empty when there are none
    CHUNK     Cap'n Proto `TensorHeader`                 a run of raw bytes of one tensor
    WITHDRAW  Cap'n Proto `TensorHeader`                 none: the sender gave up on the message's tensors
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import capnp as _capnp
import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.core.tensors import DTYPE_NAMES, HOST_DTYPES, TensorSpec
from planetary.wire.limits import Limits

MAGIC = b"PLNT"
_FIELDS = struct.Struct("<4sBBHIIII")
_CHECK = struct.Struct("<I")
START_BYTES = len(MAGIC) + 1
PREFIX_BYTES = _FIELDS.size + _CHECK.size

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The content of a frame."""

    CONTROL = 1
    CHUNK = 2
    WITHDRAW = 3


_KINDS = frozenset(Kind)


class Prefix(NamedTuple):
    """A frame's prefix, checked against the limits."""

    kind: Kind
    header_bytes: int
    payload_bytes: int
    header_crc: int
    payload_crc: int


def encode_prefix(version: int, kind: Kind, header: Buffer, payload: Buffer) -> bytes:
    """Return the prefix of a frame with this header and payload (a buffer of single bytes)."""
    fields = _FIELDS.pack(MAGIC, version, kind, 0, len(header), len(payload), crc32(header), crc32(payload))
    return fields + _CHECK.pack(crc32(fields))


def decode_prefix(data: Buffer, version: int, limits: Limits) -> Prefix:
    """Read `PREFIX_BYTES` bytes. Raises `RemoteProtocolError` for anything that must not be read further."""
    check_start(data, version)
    _, _, kind, zero, header_bytes, payload_bytes, header_crc, payload_crc = _FIELDS.unpack_from(data)
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != crc32(data[: _FIELDS.size]):
        raise RemoteProtocolError("reading a frame: its prefix does not match its checksum; the bytes are damaged")
    if zero or kind not in _KINDS:
        raise RemoteProtocolError(f"reading a frame: expected kind 1, 2 or 3, found {kind} (reserved {zero})")
    prefix = Prefix(Kind(kind), header_bytes, payload_bytes, header_crc, payload_crc)
    _check_lengths(prefix, limits)
    return prefix


def check_start(data: Buffer, version: int) -> None:
    """Raise `RemoteProtocolError` unless a frame begins with our magic and, where it is there, this version."""
    magic = bytes(data[: len(MAGIC)])
    if magic != MAGIC:
        raise RemoteProtocolError(
            f"reading a frame: expected it to start with {MAGIC!r}, found {magic!r}{_guess(magic)}"
        )
    if len(data) >= START_BYTES and data[len(MAGIC)] != version:
        raise RemoteProtocolError(skew_text(data[len(MAGIC)], version))


def skew_text(theirs: int, ours: int) -> str:
    """Say which side of a connection must be upgraded when the two speak different protocol versions."""
    which = "this side" if theirs > ours else "the peer"
    return f"protocol versions differ: this side speaks {ours}, the peer speaks {theirs}; upgrade planetary on {which}"


def verify(what: str, data: Buffer, expected_crc: int) -> None:
    """Raise `RemoteProtocolError` unless the CRC-32 of `data` is the expected one."""
    if crc32(data) != expected_crc:
        raise RemoteProtocolError(f"reading a frame: its {what} does not match its checksum; the bytes are damaged")


def check_chunk_bytes(chunk_bytes: int, limits: Limits) -> None:
    """Raise `LocalProtocolError` unless a sender may cut tensors into runs of this many bytes."""
    if not 0 < chunk_bytes <= limits.chunk_bytes:
        raise LocalProtocolError(f"a tensor chunk has 1 to {limits.chunk_bytes} bytes, not {chunk_bytes}")


def _check_lengths(prefix: Prefix, limits: Limits) -> None:
    header, payload = prefix.header_bytes, prefix.payload_bytes
    if prefix.kind is Kind.CONTROL:
        least_header, most_header, least, most = 0, limits.declaration_bytes, 1, limits.message_bytes
    elif prefix.kind is Kind.CHUNK:
        least_header, most_header, least, most = 1, limits.header_bytes, 1, limits.chunk_bytes
    else:
        least_header, most_header, least, most = 1, limits.header_bytes, 0, 0
    if not least_header <= header <= most_header:
        raise _length_error(prefix.kind, "header", header, least_header, most_header)
    if not least <= payload <= most:
        raise _length_error(prefix.kind, "payload", payload, least, most)


def _length_error(kind: Kind, what: str, length: int, least: int, most: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"reading a {kind.name} frame: its {what} may have {least} to {most} bytes, it has {length}"
    )


def _guess(magic: bytes) -> str:
    """Return a name for the other side's protocol, as the end of a sentence."""
    if magic[:2] in (b"\x15\x03", b"\x16\x03"):
        return "; the peer speaks TLS and this side does not"
    if magic in (b"GET ", b"HTTP", b"POST", b"HEAD", b"PUT "):
        return "; the peer speaks HTTP: is this the right port?"
    if magic == b"SSH-":
        return "; the peer speaks SSH: is this the right port?"
    if magic[:2] == b"\0\0":
        return "; an older planetary begins its messages with their length: upgrade planetary on the peer"
    return "; the peer does not speak planetary's protocol"


# --- the tensors that follow a message, to and from JSON

_declarations = decoding.json_decoder(tuple[TensorSpec, ...])
_encoder = msgspec.json.Encoder()

_MOST_DIMENSIONS = 32
_LONGEST_NAME = 1024


def declare(tensors: Mapping[str, np.ndarray]) -> tuple[TensorSpec, ...]:
    """Return name, element type and shape of each array, in order.

    The element type is the one whose host type the array has; raw bfloat16 bits are declared as `ui16`. Raises
    `LocalProtocolError` for an array of a type without place on the wire, such as a big-endian one.
    """
    specs = []
    for name, array in tensors.items():
        dtype = DTYPE_NAMES.get(array.dtype)
        if dtype is None:
            raise LocalProtocolError(
                f"sending tensor {name!r}: numpy type {array.dtype.str!r} is none of "
                f"{', '.join(host.str for host in DTYPE_NAMES)}"
            )
        specs.append(TensorSpec(name, dtype, tuple(array.shape)))
    return tuple(specs)


def encode_declaration(specs: tuple[TensorSpec, ...], limits: Limits) -> bytes:
    """Return the JSON of a message's tensors, empty for none. Raises `LocalProtocolError` over a cap."""
    if not specs:
        return b""
    data = _encoder.encode(specs)
    try:
        _check_declaration(specs, limits)
        if len(data) > limits.declaration_bytes:
            raise ValueError(f"their list may have {limits.declaration_bytes} bytes, it has {len(data)}")
    except ValueError as error:
        raise LocalProtocolError(f"sending tensors: {error}") from None
    return data


def decode_declaration(data: bytes | bytearray | memoryview, limits: Limits) -> tuple[TensorSpec, ...]:
    """Read a message's tensors. Raises `RemoteProtocolError` before anything of their size was allocated."""
    if not len(data):
        return ()
    try:
        specs = _declarations.decode(data)
        _check_declaration(specs, limits)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"reading the list of tensors of a message: {error}") from None
    return specs


def _check_declaration(specs: tuple[TensorSpec, ...], limits: Limits) -> None:
    if not 0 < len(specs) <= limits.tensors:
        raise ValueError(f"expected 1 to {limits.tensors} tensors, found {len(specs)}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two tensors of one message have the same name")
    total = 0
    for spec in specs:
        if not 0 < len(spec.name) <= _LONGEST_NAME:
            raise ValueError(f"a tensor's name has 1 to {_LONGEST_NAME} characters, found {len(spec.name)}")
        if len(spec.shape) > _MOST_DIMENSIONS or any(extent < 0 for extent in spec.shape):
            raise ValueError(f"tensor {spec.name!r} has an impossible shape {spec.shape}")
        try:
            # An extent of 0 must not hide one that numpy cannot index.
            spanned = math.prod(max(extent, 1) for extent in spec.shape) * HOST_DTYPES[spec.dtype].itemsize
        except KeyError:
            raise ValueError(f"tensor {spec.name!r} has an unknown element type {spec.dtype!r}") from None
        total += spec.nbytes
        if max(spanned, total) > limits.tensor_bytes:
            raise ValueError(
                f"the tensors of one message may have {limits.tensor_bytes} bytes, "
                f"with {spec.name!r} of shape {spec.shape} they have more"
            )


# --- the header of a tensor frame, `tensor.capnp`

capnp: Any = _capnp  # it has no types for what it defines in C
# pycapnp hooks the import statement to find *.capnp files anywhere on the path. The hook is not wanted here.
capnp.remove_import_hook()
_SCHEMA: Any = capnp.load(str(Path(__file__).with_name("tensor.capnp")))
_TensorHeader: Any = _SCHEMA.TensorHeader


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where a run of tensor bytes belongs."""

    message: int  # id of the message that declared the tensor
    tensor: int  # position in the declaration
    offset: int  # first byte of the run


def encode_tensor_header(header: TensorHeader) -> bytes:
    """Return the header as one Cap'n Proto message."""
    return _TensorHeader.new_message(message=header.message, tensor=header.tensor, offset=header.offset).to_bytes()


def decode_tensor_header(data: bytes) -> TensorHeader:
    """Read a header; every malformation raises `RemoteProtocolError`."""
    try:
        with _TensorHeader.from_bytes(data) as reader:
            return TensorHeader(message=reader.message, tensor=reader.tensor, offset=reader.offset)
    except (capnp.KjException, ValueError, OverflowError, MemoryError) as error:
        # KjException's text spans lines and has a native stack; the first line names the defect.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise RemoteProtocolError(f"reading a tensor frame: its header is malformed: {first_line}") from None
