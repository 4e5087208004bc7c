"""One bit a number: signs of a rotated tensor (DRIVE, arXiv:2105.08339, the scale of least error, with error feedback).

A tensor is cut into blocks of 4096 numbers; the rest is filled with zeros to a power of two. The numbers of a block get
random signs, the block is multiplied with the Hadamard matrix, and the signs of the products travel, with their mean
magnitude m as float32. Whatever the numbers are, the products are nearly normal, so ±m leaves a part 1 − 2/π of their
energy, 36 %; large numbers among small ones, which error feedback makes, do not change that. 32 numbers in 33 bits:
31.75 times fewer bytes than float32.

The random signs are those of a seed, the CRC of the tensor's first block, which travels too: with equal signs in every
round the feedback would gather in numbers whose products are small.

Products are sums in a fixed order, scaled by powers of two before, so they neither overflow nor depend on the machine.
The sums that decoding needs are of whole numbers, which is exact in any order. Once they are loaded the loops are
`codec_kernels`'; the bits are the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from planetary.core import quantisers
from planetary.core.errors import ProtocolError
from planetary.core.tensors import TensorSpec
from planetary.sync.codecs import tensor_codec
from planetary.sync.codecs.tensor_codec import Codec, CodecInput, check_finite, read_only

BLOCK = 4096
_SEED = 4  # bytes
_LEAST = 8  # numbers of a block: whole bytes of signs
_TOGETHER = 64  # blocks that numpy works on at a time: 1 MiB


class Signs(Codec):
    """The codec of signs: one bit a number, with error feedback."""

    name = "sign"

    def nbytes(self, spec: TensorSpec) -> int:
        return _SEED + sum(count * (4 + length // 8) for count, length in _blocks(spec.size)) if spec.size else 0

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        flat = np.ascontiguousarray(values.reshape(-1))
        seed = _write_seed(flat[:BLOCK], out)
        for numbers, scales, signs in _runs(flat.size, out):
            length = 8 * signs.shape[1]
            part = flat[numbers]
            rows = np.append(part, np.zeros(signs.size * 8 - part.size, np.float32)).reshape(-1, length)
            _encode(rows, random_signs(seed, length), scales, signs)

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        out, kernels = np.empty(spec.size, np.float32), tensor_codec.compiled()
        for numbers, scales, signs in _runs(spec.size, data):
            if not (np.isfinite(scales).all() and (scales >= 0).all()):
                raise ProtocolError(f"tensor {spec.name!r}: a mean magnitude is negative, NaN or infinite")
            length, part = 8 * signs.shape[1], out[numbers]
            random = random_signs(int(data[:_SEED].view("<u4")[0]), length)
            if kernels is not None:
                kernels.signs_decode(read_only(scales), read_only(signs), random, _height(length), part)
            else:
                part[:] = _decode(signs, scales, random).reshape(-1)[: part.size]
            # A sum of signs is the length at most, and nearly always far less.
            if float(scales.max()) * length > float(np.finfo(np.float32).max):
                check_finite(spec, bool(np.isfinite(part).all()))
        return out.reshape(spec.shape)

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        kernels = tensor_codec.compiled()
        if kernels is None:
            return super().compress(spec, update, out)
        left, decay = np.empty(spec.size, np.float32), np.float32(self.decay)
        seed = _write_seed(update.first(BLOCK).sum(self.decay), out)
        values, base, before = update.flat()
        for numbers, scales, signs in _runs(spec.size, out):
            random = random_signs(seed, 8 * signs.shape[1])
            given = values[numbers], base[numbers], before[numbers], decay, left[numbers]
            if not kernels.signs_compress(given, random, _height(len(random)), (scales, signs)):
                return None
        return left.reshape(spec.shape)


def _write_seed(first: np.ndarray, out: np.ndarray) -> int:
    """Write and return the seed of a tensor whose first block this is."""
    seed = zlib.crc32(first.astype("<f4", copy=False).data)
    if first.size:
        out[:_SEED].view("<u4")[0] = seed
    return seed


def _runs(size: int, data: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield, for blocks of one length, numbers, mean magnitudes, float32, and signs, uint8 [blocks, n].

    `data`: the bytes of a tensor.
    """
    begin, at = 0, _SEED
    for count, length in _blocks(size):
        middle, end = at + 4 * count, at + count * (4 + length // 8)
        taken = min(count * length, size - begin)
        yield slice(begin, begin + taken), data[at:middle].view("<f4"), data[middle:end].reshape(count, -1)
        begin, at = begin + taken, end


def _blocks(size: int) -> list[tuple[int, int]]:
    """Return (how many, numbers in each) of the whole blocks and of the last one."""
    whole, rest = divmod(size, BLOCK)
    last = max(_LEAST, 1 << (rest - 1).bit_length()) if rest else 0
    return [pair for pair in ((whole, BLOCK), (1, last)) if all(pair)]


def random_signs(seed: int, length: int) -> np.ndarray:
    """Return +1 and −1, float32 [length]: the highest bit of a hash of seed and place, in 32-bit integers."""
    mixed = np.arange(length, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * np.uint32(factor)
    return np.float32(1) - np.float32(2) * ((mixed ^ mixed >> np.uint32(16)) >> np.uint32(31)).astype(np.float32)


def _height(length: int) -> int:
    """Return how many rows a block is in a kernel: about the root of the length, so sums go over whole rows."""
    return 1 << length.bit_length() // 2


def hadamard(blocks: np.ndarray) -> np.ndarray:
    """Multiply each block, [count, height, width], with the Hadamard matrix, unscaled; return [count, width, height].

    That of height · width numbers is the one of the height on columns, and then the one of the width on rows.
    """
    for _ in range(2):
        count, height, width = blocks.shape
        columns = np.array(blocks.transpose(1, 0, 2), order="C").reshape(height, -1)
        blocks = quantisers.hadamard(columns).reshape(height, count, width).transpose(1, 2, 0)
    return blocks.transpose(0, 2, 1)


def _encode(rows: np.ndarray, random: np.ndarray, scales: np.ndarray, signs: np.ndarray) -> None:
    """Encode float32 [count, length]: the mean magnitude of each row's products over √length, and their signs."""
    count, length = rows.shape
    small = random / np.float32(length)
    for first in range(0, count, _TOGETHER):
        part = slice(first, first + _TOGETHER)
        blocks = (rows[part] * small).reshape(-1, _height(length), length // _height(length))
        products = hadamard(blocks).reshape(-1, length)
        signs[part] = np.packbits(products < 0, axis=1, bitorder="little")
        sums = np.abs(products).astype(np.float64)
        while sums.shape[1] > 1:  # halves, so the order is one that loops can follow
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        scales[part] = sums[:, 0] / length


def _decode(signs: np.ndarray, scales: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The inverse of `_encode`: float32 [count, length]."""
    length = len(random)
    negative, rows = np.unpackbits(signs, axis=1, bitorder="little"), np.empty((len(signs), length), np.float32)
    for first in range(0, len(rows), _TOGETHER):
        part = slice(first, first + _TOGETHER)
        whole = np.float32(1) - np.float32(2) * negative[part].astype(np.float32)
        sums = hadamard(whole.reshape(-1, length // _height(length), _height(length))).reshape(-1, length)
        with np.errstate(over="ignore"):
            rows[part] = sums * scales[part, None] * random
    return rows
