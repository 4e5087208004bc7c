"""SparseLoCo: the largest numbers of each chunk, in two bits (arXiv:2508.15706).

A matrix is cut into tiles of 64 × 64, anything else into runs of 64 (tiles and runs at the edges are smaller). Of a
chunk with n numbers the round(n·K / 4096) of largest magnitude are kept, at least one; among equal magnitudes those
with the lowest index. Their places travel in 12 bits each. Kept values of a tensor become one of four buckets around
their mean, 6/4 of a standard deviation wide, and a bucket stands for the mean of the values: the table of four travels
as float32. With K = 64 a large matrix has 1.56 % of the numbers in 14 bits each: 146 times fewer bytes than float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planetary.core.errors import ProtocolError
from planetary.core.quantisers import pack, unpack
from planetary.core.tensors import TensorSpec
from planetary.sync.codecs import tensor_codec
from planetary.sync.codecs.tensor_codec import Codec, CodecInput

SIDE = 64
_CHUNK = SIDE * SIDE
_TABLE = 16  # bytes: four float32
_SIGMAS = 6.0  # range of the four buckets, in standard deviations


class TopK(Codec):
    """The codec of SparseLoCo: each chunk's largest numbers in two bits; error feedback with the paper's β, 0.95."""

    name, decay, sparse = "sparse", 0.95, True

    def __init__(self, kept: int = 64) -> None:
        """`kept`: K, of 4096 numbers."""
        self._kept = kept

    def nbytes(self, spec: TensorSpec) -> int:
        count = sum(chunks.count * self._kept_of(chunks.length) for chunks in _chunks(spec.shape))
        return _TABLE + -(-count * 12 // 8) + -(-count * 2 // 8)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        places: list[np.ndarray] = []
        kept: list[np.ndarray] = []
        for chunks in _chunks(values.shape):
            rows = chunks.cut(values)
            columns = _largest(rows, self._kept_of(chunks.length))
            places.append(columns.reshape(-1))
            kept.append(np.take_along_axis(rows, columns, axis=1).reshape(-1))
        _write(places, kept, out)

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        groups = list(_chunks(spec.shape))
        count = sum(chunks.count * self._kept_of(chunks.length) for chunks in groups)
        middle = _TABLE + -(-count * 12 // 8)
        table = data[:_TABLE].view("<f4")
        where, what = _unpack12(data[_TABLE:middle], count), table[unpack(data[middle:], 2, count)]
        if not np.isfinite(table).all():
            raise ProtocolError(f"tensor {spec.name!r}: its table of values contains NaN or infinite numbers")
        out, begin = np.zeros(spec.shape, np.float32), 0
        for chunks in groups:
            end = begin + chunks.count * self._kept_of(chunks.length)
            part = slice(begin, end)
            if not _put(chunks, where[part].reshape(chunks.count, -1), what[part].reshape(chunks.count, -1), out):
                raise ProtocolError(
                    f"tensor {spec.name!r}: places in a chunk of {chunks.length} numbers are not ascending"
                )
            begin = end
        return out

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        kernels = tensor_codec.compiled()
        if kernels is None:
            return super().compress(spec, update, out)
        left, groups = np.empty(spec.size, np.float32), list(_chunks(spec.shape))
        given = *update.flat(), np.float32(self.decay), left
        places = [np.empty((chunks.count, self._kept_of(chunks.length)), np.uint16) for chunks in groups]
        kept = [np.empty(where.shape, np.float32) for where in places]
        for chunks, where, what in zip(groups, places, kept, strict=True):
            if not kernels.largest_compress(given, chunks.grid, (where, what)):
                return None
        sent, begin = _write(places, kept, out), 0
        for chunks, where in zip(groups, places, strict=True):
            values, begin = sent[begin : begin + where.size].reshape(where.shape), begin + where.size
            if not kernels.largest_subtract(where, values, chunks.grid, left):
                return None
        return left.reshape(spec.shape)

    def _kept_of(self, length: int) -> int:
        """Return how many of a chunk's numbers are kept."""
        return min(length, max(1, round(length * self._kept / _CHUNK)))


class _Chunks:
    """The chunks of one size in a tensor: a part of a matrix in tiles, or of a flat tensor in runs.

    Attributes:
        count, length: how many they are, and how many numbers one has.
        grid: index of their first number; how many are below and beside each other; height and width of one; width of
            the matrix.
    """

    def __init__(self, rows: slice, columns: slice, tile: tuple[int, int], width: int) -> None:
        self._rows, self._columns, self._tile, self._width = rows, columns, tile, width
        self._down = (rows.stop - rows.start) // tile[0]
        self._across = (columns.stop - columns.start) // tile[1]
        self.count, self.length = self._down * self._across, tile[0] * tile[1]
        self.grid = (rows.start * width + columns.start, self._down, self._across, *tile, width)

    def cut(self, values: np.ndarray) -> np.ndarray:
        """Return the chunks as rows, [count, length]."""
        part = values.reshape(-1, self._width)[self._rows, self._columns]
        tiles = part.reshape(self._down, self._tile[0], self._across, self._tile[1]).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(tiles).reshape(self.count, self.length)

    def paste(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Put chunks back into a tensor."""
        tiles = rows.reshape(self._down, self._across, *self._tile).transpose(0, 2, 1, 3)
        shape = (self._down * self._tile[0], self._across * self._tile[1])
        out.reshape(-1, self._width)[self._rows, self._columns] = tiles.reshape(shape)


def _chunks(shape: tuple[int, ...]) -> Iterator[_Chunks]:
    """Yield the chunks of a tensor: the whole ones, then those at the right, lower, and both edges."""
    size = int(np.prod(shape))
    if size == 0:
        return
    if len(shape) > 1:
        height, width, tile = shape[0], size // shape[0], (SIDE, SIDE)
    else:
        height, width, tile = 1, size, (1, SIDE)
    down, across = height // tile[0] * tile[0], width // tile[1] * tile[1]
    for rows in (slice(0, down), slice(down, height)):
        for columns in (slice(0, across), slice(across, width)):
            if rows.start < rows.stop and columns.start < columns.stop:
                high = tile[0] if rows.start == 0 and down else rows.stop - rows.start
                wide = tile[1] if columns.start == 0 and across else columns.stop - columns.start
                yield _Chunks(rows, columns, (high, wide), width)


def _largest(rows: np.ndarray, count: int) -> np.ndarray:
    """Return the ascending places of the `count` largest magnitudes of each row; of equal ones the first."""
    size = np.abs(rows)
    length = size.shape[1]
    least = np.partition(size, length - count, axis=1)[:, length - count, None]
    above, equal = size > least, size == least
    missing = count - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= missing))
    return np.nonzero(chosen)[1].reshape(len(rows), count)


def _write(places: list[np.ndarray], kept: list[np.ndarray], out: np.ndarray) -> np.ndarray:
    """Encode kept numbers, float32, and their places, of all chunks into `out`; return the values of their buckets."""
    if not places:
        out[:] = 0
        return np.empty(0, np.float32)
    where = np.concatenate([part.reshape(-1) for part in places])
    what = np.concatenate([part.reshape(-1) for part in kept])
    buckets, table = _buckets(what)
    middle = _TABLE + -(-len(where) * 12 // 8)
    out[:_TABLE].view("<f4")[:] = table
    out[_TABLE:middle] = _pack12(where.astype(np.uint16, copy=False))
    out[middle:] = pack(buckets, 2)
    return table[buckets]


def _put(chunks: _Chunks, places: np.ndarray, values: np.ndarray, out: np.ndarray) -> bool:
    """Put float32 values [chunks, kept] at their places in a tensor of zeros; return whether places are possible."""
    kernels = tensor_codec.compiled()
    if kernels is not None:
        return kernels.largest_decode(places, values, chunks.grid, out.reshape(-1))
    columns = places.astype(np.int64)
    if columns.size and (columns.max() >= chunks.length or (np.diff(columns, axis=1) <= 0).any()):
        return False
    rows = np.zeros((chunks.count, chunks.length), np.float32)
    np.put_along_axis(rows, columns, values, axis=1)
    chunks.paste(rows, out)
    return True


def _buckets(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bucket of each value, uint8, and the mean of each of the four, float32 [4]."""
    wide = values.astype(np.float64)
    centred = wide - wide.mean()
    scale = _SIGMAS / 4 * float(np.sqrt(np.mean(np.square(centred))))
    steps = np.rint(centred / scale + 2) if scale > 0 else np.full(len(values), 2.0)
    buckets = np.clip(steps, 0, 3).astype(np.uint8)
    counts = np.bincount(buckets, minlength=4)
    sums = np.bincount(buckets, weights=wide, minlength=4)
    return buckets, np.divide(sums, counts, out=np.zeros(4), where=counts > 0).astype(np.float32)


def _pack12(values: np.ndarray) -> np.ndarray:
    """uint16 [n] below 4096 -> uint8 [ceil(1.5 n)], two in three bytes, the first in the low bits."""
    even = np.append(values, np.uint16(0)) if len(values) % 2 else values
    low, high = even[0::2].astype(np.uint32), even[1::2].astype(np.uint32)
    both = low | high << np.uint32(12)
    packed = np.stack([both & 255, both >> 8 & 255, both >> 16], axis=1).astype(np.uint8).reshape(-1)
    return packed[: -(-len(values) * 12 // 8)]


def _unpack12(packed: np.ndarray, count: int) -> np.ndarray:
    whole = np.zeros(-(-count // 2) * 3, np.uint32)
    whole[: len(packed)] = packed
    both = whole[0::3] | whole[1::3] << np.uint32(8) | whole[2::3] << np.uint32(16)
    return np.stack([both & 4095, both >> 12], axis=1).astype(np.uint16).reshape(-1)[:count]
