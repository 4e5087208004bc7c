"""A header and named arrays as one run of bytes, for payloads that are made and read in memory.

Layout: eight bytes with the length of a JSON header, little endian; the header; each array's bytes from a multiple of
eight on. Reading copies nothing: the arrays are read-only views of the bytes. Writing copies every array once, and lets
other threads run meanwhile: numpy's copies release the interpreter's lock, where `tobytes` and `join` would hold it for
as long as hundreds of megabytes take, in which no connection of the process is served.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.errors import RemoteProtocolError, UserError
from planetary.core.tensors import DTYPE_NAMES, Tensors, TensorSpec, host_dtype

Packed = bytes | memoryview
"""Packed bytes, wherever they lie: read from a file, received, or just packed. They are never written to."""

_LENGTH = 8


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    fields: msgspec.Raw
    arrays: tuple[TensorSpec, ...]


def pack_arrays(what: str, fields: object, arrays: Tensors) -> memoryview:
    """Return the bytes of `fields` (anything that msgspec writes as JSON) and arrays; `what` names the contents."""
    specs = tuple(TensorSpec(name, DTYPE_NAMES[array.dtype], array.shape) for name, array in arrays.items())
    header = msgspec.json.encode(_Header(what, msgspec.Raw(msgspec.json.encode(fields)), specs))
    header += b" " * (-len(header) % _LENGTH)
    begin = _LENGTH + len(header)
    packed = np.empty(begin + sum(_padded(spec.nbytes) for spec in specs), np.uint8)
    packed[:begin] = np.frombuffer(len(header).to_bytes(_LENGTH, "little") + header, np.uint8)
    for spec, array in zip(specs, arrays.values(), strict=True):
        end = begin + spec.nbytes
        np.copyto(packed[begin:end].view(array.dtype).reshape(spec.shape), array)
        begin += _padded(spec.nbytes)
        packed[end:begin] = 0
    packed.flags.writeable = False
    return packed.data


def unpack_arrays(data: Packed, what: str) -> tuple[msgspec.Raw, dict[str, np.ndarray]]:
    """Return the fields, still as JSON, and the arrays of bytes that `pack_arrays` made.

    Raises:
        RemoteProtocolError: they are something else, cut, or too long.
    """
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    try:
        header = decoding.from_json(data[_LENGTH:end], _Header)
        sizes = [spec.nbytes for spec in header.arrays]
        wrong = any(extent < 0 for spec in header.arrays for extent in spec.shape)
    except (msgspec.DecodeError, UserError, RecursionError) as error:
        raise RemoteProtocolError(f"expected a {what} of {len(data)} bytes, found no header: {error}") from None
    names = [spec.name for spec in header.arrays]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RemoteProtocolError(f"expected a {what}, found one with two arrays named {twice[:80]!r}")
    padded = [_padded(size) for size in sizes]
    if header.what != what or wrong or end + sum(padded) != len(data):
        raise RemoteProtocolError(
            f"expected a {what}, found a {header.what[:40]!r} whose header asks for {end + sum(padded)} bytes; there "
            f"are {len(data)}"
        )
    arrays: dict[str, np.ndarray] = {}
    for spec, size, step in zip(header.arrays, sizes, padded, strict=True):
        flat = np.frombuffer(data, np.uint8, size, end).view(host_dtype(spec.dtype))
        try:
            arrays[spec.name] = flat.reshape(spec.shape)
        except ValueError as error:  # extents whose product is 0 may each be larger than any array
            raise RemoteProtocolError(f"a {what} has an array of shape {list(spec.shape)}: {error}") from None
        end += step
    return header.fields, arrays


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _LENGTH
