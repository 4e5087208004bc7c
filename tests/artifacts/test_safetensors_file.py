"""Foreign safetensors files: read as they are, or refused with the tensor's name."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.core.errors import TrustError
from planetary.core.tensors import TensorSpec


def entry(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def written(folder: Path, header: object, body: bytes = b"", *, raw: bytes = b"", length: int | None = None) -> Path:
    text = raw or json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


SIXTEEN = bytes(16)
WRONG = {
    "overlap": ({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24), "'b' overlaps tensor 'a'"),
    "one range twice": ({"a": entry(), "b": entry()}, SIXTEEN, "'b' overlaps tensor 'a'"),
    "gap": ({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36), "'b' begins 4 bytes behind tensor 'a'"),
    "late start": ({"a": entry(offsets=(4, 20))}, bytes(20), "'a' begins 4 bytes behind the header"),
    "rest": ({"a": entry()}, bytes(24), "8 bytes behind tensor 'a'"),
    "cut": ({"a": entry()}, bytes(12), "was cut: tensor 'a'"),
    "wrong length": ({"a": entry("F64")}, SIXTEEN, "'a' takes 16 bytes, and 32"),
    "70 dimensions": ({"a": entry(shape=[1] * 70, offsets=(0, 4))}, bytes(4), "'a' has an impossible shape"),
    "negative": ({"a": entry(shape=(-2, -2))}, SIXTEEN, "'a' has an impossible shape"),
    "fraction": ({"a": entry(shape=(4.9,))}, SIXTEEN, "'a' has an impossible shape"),
    "truth value": ({"a": entry(shape=(True, 4))}, SIXTEEN, "'a' has an impossible shape"),
    "too large": ({"a": entry(shape=(10**40,))}, SIXTEEN, "'a' has an impossible shape"),
    "overflow": ({"a": entry(shape=(2**33, 2**33))}, SIXTEEN, "'a' takes 16 bytes, and"),
    "no extent beside a huge one": ({"a": entry(shape=(0, 2**62), offsets=(0, 0))}, b"", "larger than any array"),
    "reversed": ({"a": entry(offsets=(16, 0))}, SIXTEEN, "'a' takes -16 bytes"),
    "offsets of text": ({"a": entry(offsets=("0", "16"))}, SIXTEEN, "'a' has impossible data_offsets"),
    "element type": ({"a": entry("F8_E4M3", (16,))}, SIXTEEN, "'a' has the element type 'F8_E4M3'"),
    "no object": ({"a": [1]}, SIXTEEN, "'a' has a wrong header"),
    "another key": ({"a": {**entry(), "more": 1}}, SIXTEEN, "'a' has a wrong header"),
    "bytes of truth values": ({"a": entry("BOOL", (16,))}, b"\7" * 16, "'a' of type BOOL has the byte 7"),
    "list": ([1], b"", "expected an object, found a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_tensor_is_named(case: str, tmp_path: Path) -> None:
    header, body, text = WRONG[case]
    with pytest.raises(TrustError) as caught:
        read_safetensors(written(tmp_path, header, body))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"\xff":1}',
        b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}',
    ],
    ids=["name twice", "deep object", "deep list", "no text", "infinite", "digits"],
)
def test_a_malformed_header_is_refused(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(TrustError):
        read_safetensors(written(tmp_path, None, SIXTEEN, raw=raw))


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 1000])
def test_a_header_longer_than_its_file_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="does not fit into"):
        read_safetensors(written(tmp_path, {}, length=length))


def test_own_files_come_back(tmp_path: Path) -> None:
    specs = (TensorSpec("a", "f32", (2, 3)), TensorSpec("none", "f32", (0, 3)), TensorSpec("b", "i1", (3,)))
    specs += (TensorSpec("scalar", "bf16", ()),)
    arrays = {spec.name: np.ones_like(spec.empty()) for spec in specs}
    path = tmp_path / "own.safetensors"
    path.write_bytes(b"".join(safetensors_pieces(specs, arrays, {"format": "pt"})))
    found, tensors = read_safetensors(path)
    assert found == specs
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name], array)


def test_random_changes_of_a_header_raise_nothing_else(tmp_path: Path) -> None:
    source = random.Random(1)
    header = json.dumps({"a": entry(), "b": entry(offsets=(16, 32)), "c": entry("BF16", (8,), (32, 48))}).encode()
    pieces = (b"9", b"-", b"1e9", b"[", b"]", b"null", b'"', b"true", b"\\u0000", b"1e999", b"\xff", b"{")
    refused = 0
    for _ in range(500):
        changed = bytearray(header)
        for _ in range(source.choice((1, 2, 5))):
            at = source.randrange(len(changed))
            changed[at : at + source.choice((0, 1, 1, 3))] = source.choice(pieces)
        try:
            read_safetensors(written(tmp_path, None, bytes(48), raw=bytes(changed)))
        except TrustError:
            refused += 1
    assert refused > 300
