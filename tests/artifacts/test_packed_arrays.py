"""Packed arrays: the layout byte by byte, arrays of all kinds, and that readers get views."""

from __future__ import annotations

import json

import numpy as np
import pytest

from planetary.artifacts.packed_arrays import pack_arrays, unpack_arrays
from planetary.core.errors import RemoteProtocolError


def test_the_layout_is_a_length_a_header_and_padded_arrays() -> None:
    packed = bytes(pack_arrays("thing", {"n": 1}, {"a": np.arange(3, dtype=np.uint8), "b": np.array(2.0, np.float32)}))
    length = int.from_bytes(packed[:8], "little")
    header = json.loads(packed[8 : 8 + length])
    assert (header["what"], header["fields"]) == ("thing", {"n": 1})
    assert [(spec["name"], spec["dtype"], spec["shape"]) for spec in header["arrays"]] == [
        ("a", "ui8", [3]),
        ("b", "f32", []),
    ]
    assert length % 8 == 0
    assert packed[8 + length :] == bytes([0, 1, 2, 0, 0, 0, 0, 0]) + np.float32(2).tobytes() + bytes(4)


def test_arrays_come_back_with_their_bits_whatever_their_strides() -> None:
    grid = np.arange(24, dtype=np.float64).reshape(4, 6)
    arrays = {
        "transposed": grid.T,
        "every second": grid[::2, ::-1],
        "empty": np.zeros((3, 0), np.int16),
        "flag": np.array(True),
        "nan": np.array([np.nan, -0.0], np.float32),
        "complex": np.array([1 + 2j], np.complex128),
    }
    fields, found = unpack_arrays(pack_arrays("x", None, arrays), "x")
    assert bytes(fields) == b"null"
    assert {n: (v.dtype, v.shape, v.tobytes()) for n, v in found.items()} == {
        n: (v.dtype, v.shape, v.tobytes()) for n, v in arrays.items()
    }


def test_what_is_packed_and_what_is_read_of_it_cannot_be_written() -> None:
    packed = pack_arrays("x", None, {"a": np.zeros(4)})
    assert packed.readonly
    a = unpack_arrays(packed, "x")[1]["a"]
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 1
    assert np.shares_memory(a, np.frombuffer(packed, np.uint8))


def test_packed_bytes_that_were_cut_or_made_longer_are_refused() -> None:
    packed = bytes(pack_arrays("x", None, {"a": np.zeros(4)}))
    for wrong in (packed[:-1], packed + b"\0", packed[:8], b""):
        with pytest.raises(RemoteProtocolError):
            unpack_arrays(wrong, "x")


def test_an_array_of_impossible_extents_is_refused() -> None:
    packed = bytes(pack_arrays("x", [], {"a": np.zeros((0, 1, 4), np.float32)}))
    header = packed[8:].replace(b"[0,1,4]", b"[0,9223372036854775807,4]").rstrip(b" ")
    header += b" " * (-len(header) % 8)
    with pytest.raises(RemoteProtocolError, match="array of shape"):
        unpack_arrays(len(header).to_bytes(8, "little") + header, "x")
