"""Tensor files in the safetensors format, written and read piece by piece.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a JSON header,
little endian; the header, `{name: {"dtype", "shape", "data_offsets"}}`; the tensors' bytes without gaps.
Every framework reads it. Writing it here, and not with its library, lets a checkpoint larger than half the
memory stream to the disk while its digest is computed, and lets tests cut the power between any two pieces.
"""

from __future__ import annotations

import json
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
"""Element type -> its name in the format."""

PIECE_BYTES = 4 << 20
LARGEST_HEADER = 100_000_000  # the format's own limit


def safetensors_pieces(
    specs: Sequence[TensorSpec], tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file with the tensors of `specs`, in that order, in pieces of at most 4 MiB.

    `metadata`: the header's entries about the whole file.

    Raises:
        UserError: an element type has no name in the format.
        ValueError: a tensor does not fit its spec.
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
        TrustError: the file is not well formed or was cut.
        OSError: it cannot be read.
    """
    types = {name: dtype for dtype, name in NAMES.items()}
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise TrustError(f"{path} is no safetensors file: its header does not fit into {size} bytes")
        specs, offsets = [], []
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                specs.append(TensorSpec(name, types[entry["dtype"]], tuple(map(int, entry["shape"]))))
                offsets.append(tuple(map(int, entry["data_offsets"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrustError(f"{path} is no safetensors file: its header is wrong ({error!r})") from None
        tensors = {}
        for spec, (start, end) in zip(specs, offsets, strict=True):
            if any(extent < 0 for extent in spec.shape) or end - start != spec.nbytes:
                raise TrustError(f"{path}: tensor {spec.name!r} takes {end - start} bytes, not {spec.nbytes}")
            if start < 0 or 8 + length + end > size:
                raise TrustError(f"{path} was cut: tensor {spec.name!r} ends at byte {8 + length + end} of {size}")
            array = spec.empty()
            file.seek(8 + length + start)
            file.readinto(array.reshape(-1).view(np.uint8).data)
            tensors[spec.name] = array
    return tuple(specs), tensors
