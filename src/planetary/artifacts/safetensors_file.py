"""Tensor files in the safetensors format, written and read piece by piece.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a JSON header, little
endian; the header, `{name: {"dtype", "shape", "data_offsets"}}`; the tensors' bytes without gaps. Every framework reads
it. Writing it here, and not with its library, lets a checkpoint larger than half the memory stream to the disk while
the digest is computed, and lets tests cut the power between any two pieces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from planetary.core.errors import TrustError, UserError
from planetary.core.tensors import Tensors, TensorSpec, host_dtype

NAMES: Mapping[str, str] = {
    "f64": "F64",
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "i64": "I64",
    "i32": "I32",
    "i16": "I16",
    "i8": "I8",
    "ui64": "U64",
    "ui32": "U32",
    "ui16": "U16",
    "ui8": "U8",
    "i1": "BOOL",
}
"""Element type -> name in the format."""

PIECE_BYTES = 4 << 20
LARGEST_HEADER = 100_000_000  # the format's own limit
LARGEST = 2**62  # of an extent, and of a place in a file
MOST_DIMENSIONS = 32  # numpy's limit, in all versions


def safetensors_pieces(
    specs: Sequence[TensorSpec], tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file with the tensors of `specs`, in that order, in pieces of at most 4 MiB.

    `metadata`: the header's entries about the whole file.

    Raises:
        UserError: an element type has no name in the format.
        ValueError: a tensor does not fit the spec.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for spec in specs:
        if spec.dtype not in NAMES:
            raise UserError(f"tensor {spec.name!r} of element type {spec.dtype} cannot be kept in a safetensors file")
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for spec in specs:
        array = tensors[spec.name]
        if array.shape != spec.shape or array.dtype != host_dtype(spec.dtype):
            raise ValueError(f"{spec.name}: {array.dtype}{array.shape} is not {spec.dtype}{spec.shape}")
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, raw.size, PIECE_BYTES):
            yield raw[start : start + PIECE_BYTES].data


def read_safetensors(path: Path) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray]]:
    """Return the specs in file order, and the tensors as new host arrays.

    Raises:
        TrustError: the file is not well formed or was cut; it names the tensor.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise TrustError(f"{path} is no safetensors file: its header does not fit into {size} bytes")
        entries = _entries(path, file.read(length))
        _check_places(path, entries, size - 8 - length)
        tensors = {}
        for spec, start, _ in entries:
            array = spec.empty()
            file.seek(8 + length + start)
            raw = array.reshape(-1).view(np.uint8)
            if file.readinto(raw.data) != spec.nbytes:
                raise TrustError(f"{path} was cut while it was read, in tensor {spec.name!r}")
            if spec.dtype == "i1" and raw.size and raw.max() > 1:
                raise TrustError(
                    f"{path}: tensor {spec.name!r} of type BOOL has the byte {raw.max()}, not only 0 and 1"
                )
            tensors[spec.name] = array
    return tuple(spec for spec, _, _ in entries), tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Return the header's entries about the whole file, of a file that `read_safetensors` reads."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header.get("__metadata__") or {}


_Entry = tuple[TensorSpec, int, int]  # and where the bytes begin and end, behind the header


def _entries(path: Path, text: bytes) -> list[_Entry]:
    """Return the header's entries. Raises `TrustError`."""
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
        if not isinstance(header, dict):
            raise ValueError(f"expected an object, found a {type(header).__name__}")
    except (ValueError, RecursionError) as error:
        raise TrustError(f"{path} is no safetensors file: its header is wrong: {error}") from None
    header.pop("__metadata__", None)
    types = {name: dtype for dtype, name in NAMES.items()}
    return [_entry(path, name, entry, types) for name, entry in header.items()]


def _entry(path: Path, name: str, entry: object, types: Mapping[str, str]) -> _Entry:
    what = f"{path}: tensor {name[:80]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TrustError(f"{what} has a wrong header: expected dtype, shape and data_offsets, found {str(entry)[:80]}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in types:
        known = ", ".join(types)
        raise TrustError(f"{what} has the element type {str(kind)[:40]!r}: expected one of {known}; convert the file")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise TrustError(
            f"{what} has an impossible shape {str(shape)[:80]}: expected at most {MOST_DIMENSIONS} extents, each a "
            "whole number of at least 0"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise TrustError(f"{what} has impossible data_offsets {str(offsets)[:80]}: expected two whole numbers")
    (start, end), nbytes = offsets, math.prod(shape) * host_dtype(types[kind]).itemsize
    if end - start != nbytes:
        raise TrustError(f"{what} takes {end - start} bytes, and {nbytes} of {kind}{shape}")
    if max(shape, default=0) * host_dtype(types[kind]).itemsize > LARGEST:  # beside an extent of 0
        raise TrustError(f"{what} has an extent of {max(shape)}, larger than any array")
    return TensorSpec(name, types[kind], tuple(shape)), start, end


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= LARGEST for value in values)


def _check_places(path: Path, entries: Sequence[_Entry], size: int) -> None:
    """Compare the tensors' places with the `size` bytes behind the header: they fill them, one after the other."""
    before, taken = "the header", 0
    for spec, start, end in sorted(entries, key=lambda entry: entry[1:]):
        if start != taken:
            wrong = "overlaps" if start < taken else f"begins {start - taken} bytes behind"
            raise TrustError(f"{path}: tensor {spec.name!r} {wrong} {before}: tensors lie one behind the other")
        if end > size:
            raise TrustError(f"{path} was cut: tensor {spec.name!r} ends at byte {end} of {size}")
        before, taken = f"tensor {spec.name!r}", end
    if taken != size:
        raise TrustError(f"{path} has {size - taken} bytes behind {before}, which belong to no tensor")


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} is there twice")
    return found
