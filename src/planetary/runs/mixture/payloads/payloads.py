"""Payloads that composers, syncer and expert workers exchange through the store, as bytes and back.

A reader gets the same bits a writer had. Claims in the bytes are checked where they are used: a sketch's digest by
`sketch.decode`, a surrogate's checksum by `surrogate.newer_surrogate`, a payload's own digest by the store.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed, pack_arrays, unpack_arrays
from planetary.core import decoding
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors
from planetary.runs.mixture.methods.codec import FourBitRows
from planetary.runs.mixture.methods.sketch import EncodedSketch

Fields = TypeVar("Fields")

_ROWS = ("inputs", "output_gradients")


class _SketchFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer: int
    step: int
    composer: int
    digest: str
    widths: tuple[int, int]  # widths of four-bit rows; 0: floats


def sketch_bytes(sketch: EncodedSketch) -> memoryview:
    """Return a sketch as a payload of kind `sketch`."""
    arrays: dict[str, np.ndarray] = {"ids": sketch.ids, "gates": sketch.gates}
    widths = [0, 0]
    for i, name in enumerate(_ROWS):
        rows = getattr(sketch, name)
        if isinstance(rows, FourBitRows):
            widths[i] = rows.width
            arrays |= {f"{name}.packed": rows.packed, f"{name}.scale": rows.scale}
        else:
            arrays[name] = rows
    fields = _SketchFields(sketch.layer, sketch.step, sketch.composer, sketch.digest, (widths[0], widths[1]))
    return pack_arrays("sketch", fields, arrays)


def sketch_from(data: Packed) -> EncodedSketch:
    """Return the sketch in a payload, or raise `RemoteProtocolError`."""
    raw, arrays = unpack_arrays(data, "sketch")
    fields = payload_fields(raw, _SketchFields, "sketch")

    def rows(name: str, width: int) -> np.ndarray | FourBitRows:
        if not width:
            return arrays[name]
        return FourBitRows(width, arrays[f"{name}.packed"], arrays[f"{name}.scale"])

    try:
        inputs, gradients = (rows(name, width) for name, width in zip(_ROWS, fields.widths, strict=True))
        ids, gates = arrays["ids"], arrays["gates"]
    except KeyError as error:
        raise RemoteProtocolError(f"a sketch lacks its array {error}") from None
    return EncodedSketch(fields.layer, fields.step, fields.composer, inputs, gradients, ids, gates, fields.digest)


def fragment_bytes(tensors: Tensors) -> memoryview:
    """Return the tensors of a fragment as a payload of kind `fragment`."""
    return pack_arrays("fragment", None, tensors)


def fragment_from(data: Packed) -> dict[str, np.ndarray]:
    """Return the tensors in a payload, or raise `RemoteProtocolError`."""
    return unpack_arrays(data, "fragment")[1]


def payload_fields(raw: msgspec.Raw, kind: type[Fields], what: str) -> Fields:
    """Return the fields of a payload that holds `what`, or raise `RemoteProtocolError`."""
    try:
        return decoding.from_json(raw, kind)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"a payload of {what} has other fields: {error}") from None
