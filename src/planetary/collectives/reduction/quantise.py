"""Numbers in 4, 8 or 16 bits, per block of `BLOCK` elements, with two float32 for each block.

An encoded run of n elements is the float32 [blocks, 2] of the blocks (offset, step) followed by the codes, uint8 or
little-endian uint16 [n], or two codes of 4 bits per byte, the first in the low half. A code q stands for offset +
q·step, computed in float32 as a product and then a sum, so every machine decodes the same bits. A block that spans more
than float32 can hold is encoded at a sixteenth of the size, and the step is stored negated: a code stands for
16·(offset + q·|step|).

MIN_MAX: offset = min, step = (max − min) / (2^bits − 1). The codes cover the block exactly. ZERO_POINT_SCALE: step =
12σ / (2^bits − 1), σ the block's standard deviation, centred on the mean rounded to whole steps, so 0 is a code's exact
value; values beyond ±6σ saturate. Codes are rounded to nearest, ties to even: no bias.

Once they are loaded the loops are `quantise_kernels`'; the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import numpy as np

from planetary.collectives.protocol.options import Quantization, QuantizationAlgorithm, ReduceOp
from planetary.core import quantisers
from planetary.core.compiled_loops import CompiledLoops
from planetary.core.errors import UserError

BLOCK = 2048
_HEAD = 8  # bytes of offset and step

LOOPS = CompiledLoops("planetary.collectives.reduction.quantise_kernels")


def compiled() -> ModuleType | None:
    """Return `quantise_kernels` once they have been loaded, or None."""
    return LOOPS.loaded


def check(quantization: Quantization, dtype: str, op: str) -> None:
    """Raise `UserError` for a combination that makes no sense."""
    if quantization.bits not in (4, 8, 16):
        raise UserError(f"quantization: expected 4, 8 or 16 bits, found {quantization.bits}")
    if dtype not in ("f16", "bf16", "f32", "f64"):
        raise UserError(
            f"quantization of {dtype} elements: integers would lose their exactness; reduce them without quantization"
        )
    if quantization.algorithm is QuantizationAlgorithm.ZERO_POINT_SCALE and op in (
        ReduceOp.PROD,
        ReduceOp.MIN,
        ReduceOp.MAX,
    ):
        raise UserError(f"ZERO_POINT_SCALE saturates outliers, which makes {op.upper()} wrong; use MIN_MAX")
    _warm_up(quantization.bits)


@functools.cache
def _warm_up(bits: int) -> None:
    """Have the loops compiled before an operation begins: it would look like a stall in the middle of one."""
    if LOOPS.load() is not None:
        values = np.ones(2, np.float32)
        data = memoryview(bytearray(encoded_bytes(2, bits)))
        encode(values, bits, QuantizationAlgorithm.MIN_MAX, data)
        decode(data, bits, values)
        decode_add(data, bits, values, values)
        more = memoryview(bytearray(encoded_bytes(2, bits)))
        add_encode(data, bits, QuantizationAlgorithm.MIN_MAX, values, values, encoded=more)


def encoded_bytes(count: int, bits: int) -> int:
    """Bytes of an encoded run of `count` elements."""
    return -(-count // BLOCK) * _HEAD + -(-count * bits // 8)


def encode(values: np.ndarray, bits: int, algorithm: QuantizationAlgorithm, out: memoryview) -> None:
    """Encode float32 [n] into `out`, `encoded_bytes(n, bits)` long.

    A block with a NaN or an infinity decodes to NaN throughout: a fault stays visible on every peer.
    """
    count = len(values)
    blocks = -(-count // BLOCK)
    head = np.frombuffer(out[: blocks * _HEAD], np.float32).reshape(blocks, 2)
    kernels = compiled()
    if kernels is not None and algorithm is QuantizationAlgorithm.MIN_MAX:
        _encode_compiled(kernels, np.ascontiguousarray(values), bits, head, out[blocks * _HEAD :])
        return
    codes = np.empty(count, np.uint16 if bits == 16 else np.uint8)
    centred = algorithm is QuantizationAlgorithm.ZERO_POINT_SCALE
    for part, heads in _parts(count):
        rows = values[part].reshape(-1, min(BLOCK, part.stop - part.start))
        head[heads], found = quantisers.affine_codes(rows, bits, centred=centred)
        codes[part] = found.reshape(-1)
    if bits == 4:
        codes = quantisers.pack(codes, 4)
    np.frombuffer(out[blocks * _HEAD :], np.uint8)[:] = codes.view(np.uint8)


def decode(data: memoryview, bits: int, out: np.ndarray) -> None:
    """Decode into float32 [n]."""
    kernels = compiled()
    if kernels is not None:
        codes, head = _codes_compiled(kernels, data, bits, len(out))
        kernels.store(codes, head, BLOCK, out)
    else:
        _decode(data, bits, out)


def decode_add(data: memoryview, bits: int, own: np.ndarray, out: np.ndarray) -> None:
    """Out ← own + decoded, float32 [n] each; `out` may be `own`."""
    kernels = compiled()
    if kernels is not None:
        codes, head = _codes_compiled(kernels, data, bits, len(out))
        kernels.add(codes, head, BLOCK, own, out)
        return
    wide = np.empty(len(own), np.float32)
    _decode(data, bits, wide)
    with np.errstate(invalid="ignore", over="ignore"):
        np.add(own, wide, out=out)


def add_encode(
    data: memoryview,
    bits: int,
    algorithm: QuantizationAlgorithm,
    own: np.ndarray,
    out: np.ndarray,
    *,
    encoded: memoryview,
    divisor: int | None = None,
) -> None:
    """Out ← own + decoded, float32 [n] each, and encode that. `out` may be `own`.

    With a `divisor` the sum is complete: it is divided, encoded, and replaced by the values the others decode.
    """
    kernels = compiled()
    if kernels is not None and algorithm is QuantizationAlgorithm.MIN_MAX:
        blocks = -(-len(out) // BLOCK)
        head = np.frombuffer(encoded[: blocks * _HEAD], np.float32).reshape(blocks, 2)
        target = np.frombuffer(encoded[blocks * _HEAD :], "<u2" if bits == 16 else np.uint8)
        codes = np.empty(len(out), np.uint8) if bits == 4 else target
        received = _codes_compiled(kernels, data, bits, len(out))
        how = (BLOCK, np.float32(2**bits - 1), np.float32(divisor or 1), divisor is not None)
        kernels.add_encode(received, own, (out, out.view(np.int32)), how, (codes, head))
        if bits == 4:
            kernels.pack(codes, target)
        return
    decode_add(data, bits, own, out)
    if divisor is not None and divisor != 1:
        np.divide(out, np.float32(divisor), out=out)
    encode(out, bits, algorithm, encoded)
    if divisor is not None:
        decode(encoded, bits, out)


def feed_back(given: tuple[np.ndarray, np.ndarray, np.ndarray], bits: int, left: np.ndarray, out: memoryview) -> bool:
    """Encode values − base + residual with MIN_MAX into `out`, and write the remainder of the codes to `left`.

    With loaded loops alone. `given`: these three, float32 [n] each, the last two maybe empty, for zeros.

    Returns:
        Whether all of `left` is finite.
    """
    kernels = compiled()
    assert kernels is not None
    blocks = -(-len(left) // BLOCK)
    head = np.frombuffer(out[: blocks * _HEAD], np.float32).reshape(blocks, 2)
    codes = np.frombuffer(out[blocks * _HEAD :], "<u2" if bits == 16 else np.uint8)
    how = (BLOCK, np.float32(2**bits - 1), bits == 4)
    return kernels.feed_back(given, (left, left.view(np.int32)), how, (codes, head))


def is_finite(data: memoryview, bits: int, count: int) -> bool:
    """Return whether all codes of the blocks of an encoded run of `count` elements stand for finite numbers."""
    blocks = -(-count // BLOCK)
    return quantisers.affine_is_finite(np.frombuffer(data[: blocks * _HEAD], np.float32).reshape(blocks, 2), bits)


def _encode_compiled(kernels: ModuleType, values: np.ndarray, bits: int, head: np.ndarray, out: memoryview) -> None:
    top = np.float32(2**bits - 1)
    target = np.frombuffer(out, "<u2" if bits == 16 else np.uint8)
    codes = np.empty(len(values), np.uint8) if bits == 4 else target
    kernels.encode(values, values.view(np.int32), BLOCK, top, (codes, head))
    if bits == 4:
        kernels.pack(codes, target)


def _codes_compiled(kernels: ModuleType, data: memoryview, bits: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [n] and heads [blocks, 2]."""
    # Some pieces arrive in read-only memory, and numba compiles loops for read-only and for writable arrays separately.
    # `_warm_up` cannot know which comes, so all of it is read-only: nothing is compiled in an operation.
    data = data.toreadonly()
    blocks = -(-count // BLOCK)
    head = np.frombuffer(data[: blocks * _HEAD], np.float32).reshape(blocks, 2)
    codes = np.frombuffer(data[blocks * _HEAD :], "<u2" if bits == 16 else np.uint8)
    if bits == 4:
        packed, codes = codes, np.empty(count, np.uint8)
        kernels.unpack(packed, codes)
    return codes, head


def _decode(data: memoryview, bits: int, out: np.ndarray) -> None:
    count = len(out)
    blocks = -(-count // BLOCK)
    head = np.frombuffer(data[: blocks * _HEAD], np.float32).reshape(blocks, 2)
    codes = np.frombuffer(data[blocks * _HEAD :], np.uint8)
    if bits == 16:
        codes = codes.view("<u2")
    elif bits == 4:
        codes = quantisers.unpack(codes, 4, count)
    for part, heads in _parts(count):
        width = min(BLOCK, part.stop - part.start)
        quantisers.affine_values(codes[part].reshape(-1, width), head[heads], out[part].reshape(-1, width))


def _parts(count: int) -> Iterator[tuple[slice, slice]]:
    """Yield the elements and the blocks of the whole blocks, and of the last shorter one, where there are any."""
    whole = count // BLOCK
    if whole:
        yield slice(0, whole * BLOCK), slice(0, whole)
    if count % BLOCK:
        yield slice(whole * BLOCK, count), slice(whole, whole + 1)
