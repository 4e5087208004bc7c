"""Codecs: how one float32 tensor travels as bytes, in a number set by the shape. Those here send every number.

float32 as it is, bfloat16, integers of 8 and 4 bits per block, and FP4 with exponents alone. `sign_codec` sends one bit
of each, `sparse_codec` few.
"""

from __future__ import annotations

import numpy as np

from planetary.collectives.protocol.options import QuantizationAlgorithm
from planetary.collectives.reduction import quantise
from planetary.core.quantisers import from_bfloat16, pack, to_bfloat16, unpack
from planetary.core.tensors import TensorSpec
from planetary.sync.codecs import tensor_codec
from planetary.sync.codecs.tensor_codec import NOTHING, Codec, CodecInput, check_finite, read_only


class Float32(Codec):
    """The numbers themselves."""

    name, lossy = "float32", False

    def nbytes(self, spec: TensorSpec) -> int:
        return 4 * spec.size

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        out.view("<f4")[:] = values.reshape(-1)

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        given, out, kernels = data.view("<f4"), np.empty(spec.size, np.float32), tensor_codec.compiled()
        if kernels is None:
            out[:] = given
            check_finite(spec, bool(np.isfinite(out).all()))
        else:
            check_finite(spec, kernels.difference(read_only(given), NOTHING, out))
        return out.reshape(spec.shape)

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        kernels = tensor_codec.compiled()
        if kernels is None:
            return super().compress(spec, update, out)
        return NOTHING if kernels.difference(*update.flat()[:2], out.view("<f4")) else None


class BFloat16(Codec):
    """Rounded to bfloat16, ties to even."""

    name, starts_runs = "bf16", True
    _TOGETHER = 1 << 16  # numbers that numpy works on at a time: 256 KiB

    def nbytes(self, spec: TensorSpec) -> int:
        return 2 * spec.size

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        flat, bits = values.reshape(-1), out.view("<u2")
        for first in range(0, flat.size, self._TOGETHER):
            bits[first : first + self._TOGETHER] = to_bfloat16(flat[first : first + self._TOGETHER])

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        given, kernels = data.view("<u2"), tensor_codec.compiled()
        if kernels is None:
            values = from_bfloat16(given)
            check_finite(spec, bool(np.isfinite(values).all()))
        else:
            values = np.empty(spec.size, np.float32)
            check_finite(spec, kernels.bfloat16_decode(read_only(given), values.view(np.uint32)))
        return values.reshape(spec.shape)

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        kernels = tensor_codec.compiled()
        if kernels is None:
            return super().compress(spec, update, out)
        left = np.empty(spec.size, np.float32)
        given = *update.flat(), np.float32(self.decay), left
        finite = kernels.bfloat16_compress(given, out.view("<u2"))
        return left.reshape(spec.shape) if finite else None


class Int8(Codec):
    """Whole steps between the least and the largest number of a block, as the ring's quantised sums send them."""

    name, starts_runs = "int8", True
    _bits = 8

    def nbytes(self, spec: TensorSpec) -> int:
        return quantise.encoded_bytes(spec.size, self._bits)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        flat = np.ascontiguousarray(values.reshape(-1))
        quantise.encode(flat, self._bits, QuantizationAlgorithm.MIN_MAX, out.data)

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        check_finite(spec, quantise.is_finite(data.data, self._bits, spec.size))
        out = np.empty(spec.size, np.float32)
        quantise.decode(data.data, self._bits, out)
        return out.reshape(spec.shape)

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        if quantise.compiled() is None:
            return super().compress(spec, update, out)
        left = np.empty(spec.size, np.float32)
        finite = quantise.feed_back(update.flat(), self._bits, left, out.data)
        return left.reshape(spec.shape) if finite else None


class Int4(Int8):
    """As `Int8`, in four bits."""

    name, starts_runs = "int4", False
    _bits = 4


class Exponents(Codec):
    """FP4 E3M0 (Streaming DiLoCo, arXiv:2501.18512, section 4.3): a sign, and one of seven powers of two or zero.

    A block of 128 numbers has the largest magnitude as float32. Code 7 stands for it, 6 for a half of it, 1 for 1/64
    and 0 for zero. Numbers are rounded to the nearest, ties to the larger magnitude.
    """

    name = "fp4"
    _BLOCK = 128
    _LEVELS = np.array([0.0, *(2.0**power for power in range(-6, 1))], np.float32)
    _LEAST = _LEVELS[1] / np.float32(2)  # smallest magnitude not rounded to zero
    _TOGETHER = 512  # blocks that numpy works on at a time: 256 KiB

    def nbytes(self, spec: TensorSpec) -> int:
        return 4 * self._blocks(spec.size) + -(-spec.size // 2)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        flat, heads = values.reshape(-1), 4 * self._blocks(values.size)
        largest, packed = out[:heads].view("<f4"), out[heads:]
        for first in range(0, len(largest), self._TOGETHER):
            part = flat[first * self._BLOCK : (first + self._TOGETHER) * self._BLOCK]
            rows = np.append(part, np.zeros(-part.size % self._BLOCK, np.float32)).reshape(-1, self._BLOCK)
            ratio = np.abs(rows)
            most = largest[first : first + self._TOGETHER] = ratio.max(axis=1)
            # Division is exact to the last bit on every machine; a product with an inverse would round twice.
            np.divide(ratio, np.where(most > 0, most, np.float32(1))[:, None], out=ratio)
            # Half of a step of the exponent is added, since 1.5 lies between two powers; below the least there is zero.
            bits = ratio.view(np.int32)
            codes = np.maximum(((bits + (1 << 22)) >> 23) - 120, ratio >= self._LEAST)
            bytes_of = pack((codes | (rows < 0) << 3).astype(np.uint8).reshape(-1)[: part.size], 4)
            begin = first * self._BLOCK // 2
            packed[begin : begin + len(bytes_of)] = bytes_of

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        blocks, kernels = self._blocks(spec.size), tensor_codec.compiled()
        largest, packed = data[: 4 * blocks].view("<f4"), data[4 * blocks :]
        check_finite(spec, bool(np.isfinite(largest).all()))
        if kernels is not None:
            out = np.empty(spec.size, np.float32)
            kernels.exponents_decode(read_only(largest), read_only(packed), out)
            return out.reshape(spec.shape)
        codes = np.zeros(blocks * self._BLOCK, np.uint8)
        codes[: 2 * len(packed)] = unpack(packed, 4, 2 * len(packed))
        levels = np.concatenate([self._LEVELS, -self._LEVELS])[codes].reshape(blocks, self._BLOCK)
        return (levels * largest[:, None]).reshape(-1)[: spec.size].reshape(spec.shape)

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        kernels, heads = tensor_codec.compiled(), 4 * self._blocks(spec.size)
        if kernels is None:
            return super().compress(spec, update, out)
        left, encoded = np.empty(spec.size, np.float32), (out[:heads].view("<f4"), out[heads:])
        given = *update.flat(), np.float32(self.decay), left
        finite = kernels.exponents_compress(given, encoded)
        return left.reshape(spec.shape) if finite else None

    def _blocks(self, size: int) -> int:
        return -(-size // self._BLOCK)
