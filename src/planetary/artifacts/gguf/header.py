"""Reading a GGUF file's header: metadata and the tensors' places, all checked against the file's size.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little endian: `GGUF`, version, numbers of
tensors and of metadata entries; the entries, each key, type and value; the tensors' names, dimensions (the fastest
first), types and offsets; padding to `general.alignment`; the tensors' bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.core.errors import TrustError, UserError

MAGIC = b"GGUF"
VERSION, ALIGNMENT = 3, 32
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: Mapping[int, str] = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "u1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
"""Type of a metadata value -> numpy's name."""


class BlockKind(msgspec.Struct, frozen=True):
    """One element type: `size` numbers are `nbytes` bytes."""

    name: str
    size: int
    nbytes: int


KINDS: Mapping[int, BlockKind] = {
    0: BlockKind("f32", 1, 4),
    1: BlockKind("f16", 1, 2),
    2: BlockKind("q4_0", 32, 18),
    3: BlockKind("q4_1", 32, 20),
    6: BlockKind("q5_0", 32, 22),
    7: BlockKind("q5_1", 32, 24),
    8: BlockKind("q8_0", 32, 34),
    10: BlockKind("q2_k", 256, 84),
    11: BlockKind("q3_k", 256, 110),
    12: BlockKind("q4_k", 256, 144),
    13: BlockKind("q5_k", 256, 176),
    14: BlockKind("q6_k", 256, 210),
    30: BlockKind("bf16", 1, 2),
}
_OTHERS = {
    **{9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s"},
    **{22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m"},
    **{34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4"},
}
_MOST_DIMENSIONS, _LARGEST = 4, 2**62
_LONGEST_NAME = 65_535  # bytes of a metadata key, as the format says


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor's place.

    Attributes:
        shape: the slowest dimension first, as in numpy.
        start: first byte in the file.
    """

    name: str
    kind: BlockKind
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.size * self.kind.nbytes


class GgufHeader(msgspec.Struct, frozen=True):
    """The header of a file: metadata by key, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


class _Bytes:
    """A file's bytes, read from the start; nothing is taken that is not there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place = path, data, 0

    def take(self, count: int, subject: str) -> bytes:
        if count > len(self.data) - self.place:
            raise TrustError(
                f"{self.path} was cut, or its header is wrong: {subject} takes {count} bytes at {self.place} of "
                f"{len(self.data)}"
            )
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self, code: str, subject: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code), subject))[0]

    def count(self, subject: str, least: int) -> int:
        """Return a number of things that take `least` bytes each, or more."""
        found = self.number("<Q", f"the number of {subject}")
        if found * least > len(self.data) - self.place:
            raise TrustError(f"{self.path} was cut, or its header is wrong: {found} {subject} do not fit into it")
        return found

    def text(self, subject: str) -> str:
        raw = self.take(self.number("<Q", subject), subject)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise TrustError(f"{self.path}: {subject} is no UTF-8 text: {error}") from None

    def value(self, kind: int, subject: str) -> Any:
        if kind == STRING:
            return self.text(subject)
        if kind in NUMBERS:
            found = np.frombuffer(self.take(np.dtype(NUMBERS[kind]).itemsize, subject), NUMBERS[kind])[0].item()
            return bool(found) if kind == BOOL else found
        if kind != ARRAY:
            raise TrustError(f"{self.path}: {subject} has the unknown type {kind}")
        inner = self.number("<I", subject)
        if inner == STRING:
            return [self.text(subject) for _ in range(self.count(f"entries of {subject}", 8))]
        if inner not in NUMBERS:
            raise TrustError(f"{self.path}: {subject} is a list of the type {inner}: expected numbers or texts")
        width = np.dtype(NUMBERS[inner]).itemsize
        raw = self.take(self.count(f"entries of {subject}", width) * width, subject)
        return np.frombuffer(raw, NUMBERS[inner]).tolist()


def read_header(path: Path) -> GgufHeader:
    """Return the header of a file.

    Raises:
        UserError: it cannot be read, or has tensors of an element type that is not known here.
        TrustError: it is no GGUF file, was cut, or its header contradicts itself or the file's size.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise TrustError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(_Bytes(path, data))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _header(data: _Bytes) -> GgufHeader:
    data.take(4, "the beginning")
    version = data.number("<I", "the version")
    if version not in (2, VERSION):
        raise TrustError(f"{data.path} is a GGUF file of version {version}: expected 2 or {VERSION}, little endian")
    count = data.count("tensors", 24)
    metadata: dict[str, Any] = {}
    for _ in range(data.count("metadata entries", 13)):
        key = data.text("a metadata key")
        if key in metadata or len(key) > _LONGEST_NAME:
            raise TrustError(f"{data.path}: the metadata key {key[:80]!r} is there twice, or too long")
        metadata[key] = data.value(data.number("<I", key), key)
    listed = [_tensor(data) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise TrustError(f"{data.path}: general.alignment is {alignment!r}: expected a multiple of 8")
    start = -(-data.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end, before = start, "the header"
    for one in sorted(listed, key=lambda tensor: tensor.start):
        placed = msgspec.structs.replace(one, start=start + one.start)
        if one.name in tensors:
            raise TrustError(f"{data.path}: the tensor {one.name!r} is there twice")
        if placed.start < end or one.start % alignment:
            raise TrustError(f"{data.path}: tensor {one.name!r} at {placed.start} overlaps {before}, or is not aligned")
        end, before = placed.start + placed.nbytes, f"tensor {one.name!r}"
        if end > len(data.data):
            raise TrustError(f"{data.path} was cut: tensor {one.name!r} ends at byte {end} of {len(data.data)}")
        tensors[one.name] = placed
    return GgufHeader(data.path, metadata, tensors)


def _tensor(data: _Bytes) -> GgufTensor:
    name = data.text("a tensor's name")
    subject = f"tensor {name[:80]!r}"
    dimensions = data.number("<I", subject)
    if dimensions > _MOST_DIMENSIONS:
        raise TrustError(f"{data.path}: {subject} has {dimensions} dimensions: expected at most {_MOST_DIMENSIONS}")
    shape = tuple(data.number("<Q", subject) for _ in range(dimensions))[::-1]
    number = data.number("<I", subject)
    offset = data.number("<Q", subject)
    if number not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        raise UserError(
            f"{data.path}: {subject} has elements of type {_OTHERS.get(number, number)}: expected one of {known}. "
            "Quantise the model to one of them"
        )
    kind = KINDS[number]
    if math.prod(shape) > _LARGEST or not shape or min(shape) < 1 or shape[-1] % kind.size:
        raise TrustError(f"{data.path}: {subject} has the impossible shape {list(shape)} for {kind.name}")
    return GgufTensor(name, kind, shape, offset)
