"""The arithmetic of numbers in fewer bits: pure functions of numpy arrays with the same bits on every machine.

Codecs, quantised sums, compressed rows, served weights and ternary files use them. Rounding is to nearest, ties to
even. The compiled loops (`quantise_kernels`, `codec_kernels`) repeat some of them number by number.
"""

from __future__ import annotations

import numpy as np

WIDE = np.float32(16)
"""A block whose span float32 cannot hold is encoded at a 16th of its size; its step is negative."""
SHORTER = np.float32(1 - 2.0**-20)
"""Factor of such a step: its last code must not round up to infinity."""


def to_bfloat16(values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Round float32 values of any shape to bfloat16, as uint16 bits: the upper half of a float32.

    The relative error is at most 2^-8. Adding 0x7FFF, and one more where the kept part is odd, carries into the kept
    part exactly where the lower half is above a half, or is a half and the kept part odd. A carry out of the largest
    finite value gives infinity, as IEEE 754 asks; a NaN stays one, quiet and with its sign.

    Args:
        values: contiguous where `out` is given.
        out: uint16 of the same shape to write into; None: a new array.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    nan = np.isnan(values).reshape(bits.shape)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16) | np.uint32(0x40)
    if out is None:
        return rounded.astype(np.uint16).reshape(np.shape(values))
    out[...] = rounded
    return out


def from_bfloat16(bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return bfloat16 bits, uint16 of any shape, as float32; exact. `out`: float32 of that shape to write into."""
    wide = None if out is None else out.view(np.uint32)
    # An array even for one number: numpy gives a scalar, which has no other view.
    return np.asarray(np.left_shift(bits, 16, dtype=np.uint32, casting="unsafe", out=wide)).view(np.float32)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes of 2 or 4 bits, uint8 [..., n], into bytes, uint8 [..., ceil(n · bits / 8)].

    The first of a byte has the lowest bits; zeros fill the last byte.
    """
    each = 8 // bits
    if spare := -codes.shape[-1] % each:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], spare), np.uint8)], axis=-1)
    packed = codes[..., 0::each].copy()
    for place in range(1, each):
        packed |= codes[..., place::each] << np.uint8(place * bits)
    return packed


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the first `count` codes of 2 or 4 bits of each row, uint8 [..., count]. The inverse of `pack`."""
    each = 8 // bits
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * each), np.uint8)
    for place in range(each):
        part = codes[..., place::each]
        np.right_shift(packed, np.uint8(place * bits), out=part)
        np.bitwise_and(part, np.uint8(2**bits - 1), out=part)
    return codes[..., :count]


def hadamard(columns: np.ndarray) -> np.ndarray:
    """Multiply each column of float32 [2^k, n] with the Hadamard matrix, unscaled, in k steps; `columns` is written to.

    In columns, neighbours in memory are added alike: along rows the first steps would add runs of one or two numbers,
    which takes five times as long.
    """
    spare, half, length = np.empty_like(columns), 1, len(columns)
    while half < length:
        pairs, sums = (array.reshape(length // (2 * half), 2, half, -1) for array in (columns, spare))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        columns, spare = spare, columns
        half *= 2
    return columns


def absmax_codes(values: np.ndarray, block: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Round each block of neighbours to whole multiples of its largest magnitude divided by `levels`.

    An error is at most half of its block's scale. A block of zeros has the scale 0.

    Args:
        values: float [..., n], n a multiple of `block`.
        block: neighbours with one scale.
        levels: the largest code, at most 127.

    Returns:
        Codes int8 [..., n] and scales float32 [..., n / block].
    """
    blocks = values.reshape(*values.shape[:-1], -1, block)
    scales = (np.max(np.abs(blocks), axis=-1) / levels).astype(np.float32)
    codes = np.rint(blocks / np.where(scales == 0, 1, scales)[..., None])
    return codes.astype(np.int8).reshape(values.shape), scales


def peak_codes(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Round each block of neighbours to whole multiples of its value of largest magnitude divided by −8.

    GGUF's q4_0: that value becomes −8 exactly, and all sixteen codes are in use. Values of normal distribution keep a
    relative error of 8.6 % with blocks of 32, where −7 to 7 keep 9.7 % and the 16 quantiles of NF4 8.7 %.

    Args:
        values: float [..., n], n a multiple of `block`.
        block: neighbours with one scale.

    Returns:
        Codes int8 [..., n] from −8 to 7, and scales float32 [..., n / block], which may be negative.
    """
    blocks = values.reshape(*values.shape[:-1], -1, block)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    scales = (peaks / -8).astype(np.float32)
    codes = np.clip(np.rint(blocks / np.where(scales == 0, 1, scales)[..., None]), -8, 7)
    return codes.astype(np.int8).reshape(values.shape), scales


BLOCK = 32
"""Neighbours of a row of untrained weights in 8 or 4 bits that share a scale."""


def weight_codes(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights, float [m, n], in blocks of 8 or 4 bits, as GGUF's q8_0 and q4_0 have them.

    Returns:
        Codes int8 [m, n], or [m, n / 2] with the first half of a block in the lower bits; scales f32 [m, n / BLOCK].
    """
    if bits == 8:
        return absmax_codes(values, BLOCK, 127)
    codes, scales = peak_codes(values, BLOCK)
    return pack(_regrouped(codes, 2).view(np.uint8) & np.uint8(15), 4).view(np.int8), scales


def weight_values(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Return the weights, float32 [m, n], that the result of `weight_codes` stands for."""
    if bits == 4:
        nibbles = unpack(codes.view(np.uint8), 4, 2 * codes.shape[-1])
        codes = _regrouped((nibbles ^ np.uint8(8)).view(np.int8) - np.int8(8), BLOCK // 2)
    blocks = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    return blocks.reshape(codes.shape)


def _regrouped(rows: np.ndarray, parts: int) -> np.ndarray:
    """Return rows [m, n] in which the first numbers of a block's parts come first, then the second ones, and so on."""
    return rows.reshape(len(rows), -1, parts, BLOCK // parts).swapaxes(-1, -2).reshape(rows.shape)


def min_max_steps(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and step of blocks, float32 [b] each, whose codes cover float32 values [b, n] exactly."""
    top = np.float32(2**bits - 1)
    low = values.min(axis=1)
    # Divided first: the difference of two finite float32 can be infinite.
    return low + np.float32(0), (values.max(axis=1) / top) - (low / top)  # + 0: a minimum of −0 becomes +0


def centred_steps(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and step of blocks, float32 [b] each: twelve standard deviations around the mean of each.

    The mean is rounded to whole steps, so that 0 is exactly one code's value. Values farther away saturate.
    """
    mean = values.mean(axis=1, dtype=np.float64)
    sigma = values.std(axis=1, dtype=np.float64)
    step = (12.0 * sigma / float(2**bits - 1)).astype(np.float32)
    middle = np.float32(2 ** (bits - 1))
    steps_to_mean = np.rint(np.where(step > 0, (mean / step), 0)).astype(np.float32)
    return np.where(step > 0, (steps_to_mean - middle) * step, mean.astype(np.float32)), step


def affine_codes(values: np.ndarray, bits: int, *, centred: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Round blocks to whole steps from an offset, those of `min_max_steps` or of `centred_steps`.

    An error is at most half a step; `centred` values beyond the last code have larger ones. A block with a NaN or an
    infinity stands for NaN throughout.

    Args:
        values: float32 [b, n].
        bits: of a code, at most 16.
        centred: whether outliers may saturate.

    Returns:
        Offsets and steps float32 [b, 2], and codes as float32 [b, n].
    """
    steps_of, top = centred_steps if centred else min_max_steps, np.float32(2**bits - 1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        low, step = steps_of(values, bits)
        wide = ~_covered(low, step, top) & np.isfinite(values).all(axis=1)
        if wide.any():
            # A product with a power of two is exact; values too small for that are below any step.
            values = np.where(wide[:, None], values / WIDE, values)
            low_there, step_there = steps_of(values[wide], bits)
            too_far = ~np.isfinite((low_there + step_there * top) * WIDE)
            low[wide], step[wide] = low_there, np.where(too_far, step_there * SHORTER, step_there)
        broken = ~_covered(low, step, top)
        low = np.where(broken, np.float32("nan"), low).astype(np.float32)
        step = np.where(broken, np.float32(0), step).astype(np.float32)
        heads = np.stack([low, np.where(wide, -step, step)], axis=1)
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
        inverse = np.where(np.isfinite(inverse), inverse, np.float32(0)).astype(np.float32)
        scaled = values - low[:, None]
        np.multiply(scaled, inverse[:, None], out=scaled)
        np.rint(scaled, out=scaled)
        np.clip(scaled, np.float32(0), top, out=scaled)  # saturates; also rounding may reach one too far
        if broken.any():
            scaled[broken] = 0
    return heads, scaled


def affine_values(codes: np.ndarray, heads: np.ndarray, out: np.ndarray) -> None:
    """Write offset + code · step into `out`, float32 [b, n], as a product and then a sum.

    `codes`: integers [b, n]; `heads`: offsets and steps float32 [b, 2]. A negative step stands for its size and a
    factor `WIDE`.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        np.multiply(codes, np.abs(heads[:, 1:]), out=out, casting="unsafe")
        np.add(out, heads[:, :1], out=out)
        wide = heads[:, 1] < 0
        if wide.any():
            out[wide] *= WIDE


def affine_is_finite(heads: np.ndarray, bits: int) -> bool:
    """Return whether all codes of blocks with these offsets and steps, float32 [b, 2], stand for finite numbers."""
    low, step = heads.T
    with np.errstate(invalid="ignore", over="ignore"):
        factor = np.where(step < 0, WIDE, np.float32(1))
        last = (low + np.abs(step) * np.float32(2**bits - 1)) * factor
        return bool(np.isfinite(low * factor).all() and np.isfinite(last).all())


def _covered(low: np.ndarray, step: np.ndarray, top: np.float32) -> np.ndarray:
    """Whether all codes of each block stand for finite numbers, boolean [b]."""
    return np.isfinite(step * top) & np.isfinite(low + step * top)


def ternary_scales(matrices: np.ndarray, least: np.float32) -> np.ndarray:
    """Return the mean magnitude of each matrix, float32 [...], of float32 [..., m, n]; `least` at least.

    BitNet b1.58: Ma et al. 2024, arXiv:2402.17764.
    """
    return np.maximum(np.mean(np.abs(matrices), axis=(-2, -1), dtype=np.float64).astype(np.float32), least)


def ternary_codes(matrices: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Round matrices, float32 [..., m, n], to −1, 0 or 1 times their scales [...]; return those three as float32."""
    return np.clip(np.rint(matrices / scales[..., None, None]), -1, 1)
