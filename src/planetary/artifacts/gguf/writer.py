"""Writing a GGUF file piece by piece."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from planetary.artifacts.gguf.blocks import encoded_q8_0
from planetary.artifacts.gguf.header import ALIGNMENT, ARRAY, BOOL, KINDS, MAGIC, STRING, VERSION

FILE_TYPES = {"f16": 1, "q8_0": 7}
"""Element type of the matrices -> value of `general.file_type`."""
_NUMBER = {kind.name: number for number, kind in KINDS.items()}
_PIECE = 4 << 20


def gguf_pieces(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kind: str) -> Iterator[bytes]:
    """Yield the bytes of a file.

    Args:
        metadata: texts, numbers, booleans and lists of one of these.
        tensors: float32 by name. Vectors stay float32.
        kind: element type of matrices, `f16` or `q8_0`; rows that are no whole blocks are f16.
    """
    entries = {
        **metadata,
        "general.alignment": ALIGNMENT,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
    }
    kinds = {name: _kind_of(value, kind) for name, value in tensors.items()}
    header = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries))]
    header += [_text(key) + _typed(value) for key, value in entries.items()]
    place = 0
    for name, value in tensors.items():
        one = KINDS[_NUMBER[kinds[name]]]
        sizes = value.shape[::-1]
        header.append(_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, _NUMBER[one.name], place))
        place += _padded(value.size // one.size * one.nbytes)
    whole = b"".join(header)
    yield whole.ljust(_padded(len(whole)), b"\0")
    for name, value in tensors.items():
        written = 0
        rows = value.reshape(-1)
        for start in range(0, rows.size, _PIECE):  # a whole number of blocks
            piece = _encoded(rows[start : start + _PIECE], kinds[name])
            written += len(piece)
            yield piece
        yield b"\0" * (_padded(written) - written)


def _kind_of(value: np.ndarray, kind: str) -> str:
    if value.ndim < 2:
        return "f32"
    return "f16" if value.shape[-1] % KINDS[_NUMBER[kind]].size else kind


def _encoded(values: np.ndarray, kind: str) -> bytes:
    if kind == "q8_0":
        return encoded_q8_0(values).tobytes()
    return values.astype("<f2" if kind == "f16" else "<f4").tobytes()


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        number = _value(value[0])[0] if value else STRING
        parts = [_value(one)[1] for one in value]
        return struct.pack("<IIQ", ARRAY, number, len(value)) + b"".join(parts)
    number, raw = _value(value)
    return struct.pack("<I", number) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """Return a value's type and bytes: whole numbers are unsigned of 32 bits, others float32."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return STRING, _text(value)
