"""The loops of `quantise`, compiled by numba: one pass where numpy takes several. The same bits as there.

Optional (the `collectives` extra). Compiled at first use, kept in the cache beside this file, and run without the
interpreter lock. Nothing is fused or reordered: a product is rounded before it is added to.
"""

# numba has no types for its decorators.
# pyright: reportUntypedFunctionDecorator=false, reportMissingImports=false

from __future__ import annotations

import numpy as np
from numba import njit

_ZERO = np.float32(0)
_ONE = np.float32(1)
_WIDE = np.float32(16)  # see `core.quantisers.WIDE` and `SHORTER`, which loops here cannot import
_SHORTER = np.float32(1 - 2.0**-20)
_INFINITE = np.int32(0x7F800000)
_TOGETHER = 8  # blocks: 64 KiB, which stay in a cache from loop to loop


# Loops run over slices from 0: only then the compiler knows that no index counts from the end, and vectorises.


@njit(nogil=True, cache=True)
def min_max_heads(values: np.ndarray, keys: np.ndarray, block: int, top: np.float32, head: np.ndarray) -> None:
    """Values float32 [n] and the same memory as int32 -> (offset, step) of each block, float32 [blocks, 2].

    Compares bits, as integers in the order of the floats: that is faster than comparing floats, and finds NaN too.
    """
    found = np.empty(2, np.int32)
    floats = found.view(np.float32)
    for b in range(len(head)):
        part = keys[b * block : (b + 1) * block]
        low_key, high_key = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(len(part)):
            key = part[i] ^ ((part[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            low_key = min(low_key, key)
            high_key = max(high_key, key)
        head[b, 0], head[b, 1] = np.float32(np.nan), _ZERO
        if high_key < _INFINITE and low_key > (-_INFINITE - np.int32(1)):
            found[0] = low_key ^ ((low_key >> np.int32(31)) & np.int32(0x7FFFFFFF))  # its own inverse
            found[1] = high_key ^ ((high_key >> np.int32(31)) & np.int32(0x7FFFFFFF))
            low, high = floats[0], floats[1]
            step = np.float32(high / top) - np.float32(low / top)
            if np.isfinite(step * top) and np.isfinite(low + step * top):
                head[b, 0], head[b, 1] = low + _ZERO, step
            else:
                low, high = low / _WIDE, high / _WIDE
                step = np.float32(high / top) - np.float32(low / top)
                if not np.isfinite((low + step * top) * _WIDE):
                    step = step * _SHORTER
                head[b, 0], head[b, 1] = low + _ZERO, -step


@njit(nogil=True, cache=True)
def codes_of(values: np.ndarray, head: np.ndarray, block: int, top: np.float32, codes: np.ndarray) -> None:
    """Values float32 [n] -> codes [n]."""
    for b in range(len(head)):
        low, step = head[b, 0], np.abs(head[b, 1])
        shrink = _ONE / _WIDE if head[b, 1] < _ZERO else _ONE
        part, into = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        inverse = np.float32(1) / step if step > _ZERO else _ZERO
        if not np.isfinite(inverse):
            inverse = _ZERO
        if np.isnan(low):
            into[:] = 0
        else:
            for i in range(len(part)):
                scaled = np.rint((part[i] * shrink - low) * inverse)
                scaled = scaled if scaled > _ZERO else _ZERO
                scaled = scaled if scaled < top else top
                into[i] = np.int32(scaled)


@njit(nogil=True, cache=True)
def pack(codes: np.ndarray, out: np.ndarray) -> None:
    """Codes uint8 [n] below 16 -> uint8 [ceil(n / 2)]."""
    half = len(codes) // 2
    for i in range(half):
        out[i] = codes[2 * i] | (codes[2 * i + 1] << 4)
    if len(codes) % 2:
        out[half] = codes[-1]


@njit(nogil=True, cache=True)
def unpack(packed: np.ndarray, out: np.ndarray) -> None:
    """uint8 [ceil(n / 2)] -> codes uint8 [n]."""
    half = len(out) // 2
    for i in range(half):
        out[2 * i] = packed[i] & 15
        out[2 * i + 1] = packed[i] >> 4
    if len(out) % 2:
        out[-1] = packed[half] & 15


@njit(nogil=True, cache=True)
def store(codes: np.ndarray, head: np.ndarray, block: int, out: np.ndarray) -> None:
    """Codes [n] -> float32 [n]."""
    for b in range(len(head)):
        low, step = head[b, 0], np.abs(head[b, 1])
        grow = _WIDE if head[b, 1] < _ZERO else _ONE
        part, into = codes[b * block : (b + 1) * block], out[b * block : (b + 1) * block]
        for i in range(len(part)):
            into[i] = (np.float32(part[i]) * step + low) * grow


@njit(nogil=True, cache=True)
def add(codes: np.ndarray, head: np.ndarray, block: int, own: np.ndarray, out: np.ndarray) -> None:
    """Own float32 [n] plus the values of the codes -> out float32 [n]; `out` may be `own`."""
    for b in range(len(head)):
        low, step = head[b, 0], np.abs(head[b, 1])
        grow = _WIDE if head[b, 1] < _ZERO else _ONE
        part, into = codes[b * block : (b + 1) * block], out[b * block : (b + 1) * block]
        if own.ctypes.data != out.ctypes.data:  # with one array in the loop the compiler can vectorise it
            into[:] = own[b * block : (b + 1) * block]
        for i in range(len(part)):
            into[i] = into[i] + (np.float32(part[i]) * step + low) * grow


@njit(nogil=True, cache=True)
def encode(
    values: np.ndarray, keys: np.ndarray, block: int, top: np.float32, encoded: tuple[np.ndarray, np.ndarray]
) -> None:
    """Values float32 [n] and the same memory as int32 -> codes [n] and heads, block by block, while it is cached."""
    codes, head = encoded
    for first in range(0, len(head), _TOGETHER):
        heads, part = head[first : first + _TOGETHER], slice(first * block, (first + _TOGETHER) * block)
        min_max_heads(values[part], keys[part], block, top, heads)
        codes_of(values[part], heads, block, top, codes[part])


@njit(nogil=True, cache=True)
def add_encode(
    received: tuple[np.ndarray, np.ndarray],
    own: np.ndarray,
    target: tuple[np.ndarray, np.ndarray],
    how: tuple[int, np.float32, np.float32, bool],
    encoded: tuple[np.ndarray, np.ndarray],
) -> None:
    """Block by block: own float32 [n] plus the values of `received` -> `target`, and that -> `encoded`.

    `received` and `encoded` are codes [n] and heads; `target` float32 [n] and the same memory as int32. `how`: block,
    top, divisor, finish. With `finish` the sum is divided before, and replaced by the codes' values after.
    """
    codes, head = received
    new_codes, new_head = encoded
    out, keys = target
    block, top, divisor, finish = how
    for first in range(0, len(head), _TOGETHER):
        heads, part = slice(first, first + _TOGETHER), slice(first * block, (first + _TOGETHER) * block)
        add(codes[part], head[heads], block, own[part], out[part])
        if finish and divisor != np.float32(1):
            into = out[part]
            for i in range(len(into)):
                into[i] = into[i] / divisor
        min_max_heads(out[part], keys[part], block, top, new_head[heads])
        codes_of(out[part], new_head[heads], block, top, new_codes[part])
        if finish:
            store(new_codes[part], new_head[heads], block, out[part])


@njit(nogil=True, cache=True)
def feed_back(
    given: tuple[np.ndarray, np.ndarray, np.ndarray],
    target: tuple[np.ndarray, np.ndarray],
    how: tuple[int, np.float32, bool],
    encoded: tuple[np.ndarray, np.ndarray],
) -> np.bool_:
    """Block by block: values − base + residual, float32 [n] -> `encoded`, and the remainder of the codes -> `target`.

    `encoded`: codes [n], or two in a byte, and heads; `target`: float32 [n] and the same memory as int32. `how`: block,
    top, whether codes are packed. Empty arrays stand for zeros. Returns whether all that is left is finite.
    """
    values, base, residual = given
    left, keys = target
    codes, head = encoded
    block, top, packed = how
    together = _TOGETHER // 2
    sent, room = np.empty(together * block, np.float32), np.empty(together * block, np.uint8)
    finite = np.int32(0)
    for first in range(0, len(head), together):
        heads, piece = head[first : first + together], slice(first * block, (first + together) * block)
        part, bits = left[piece], keys[piece]
        update, less, before = values[piece], base[piece], residual[piece]
        if len(base) == 0 and len(residual) == 0:
            for i in range(len(part)):
                part[i] = update[i]
        elif len(residual) == 0:
            for i in range(len(part)):
                part[i] = update[i] - less[i]
        elif len(base) == 0:
            for i in range(len(part)):
                part[i] = update[i] + before[i]
        else:
            for i in range(len(part)):
                part[i] = (update[i] - less[i]) + before[i]
        min_max_heads(part, bits, block, top, heads)
        stored = sent[: len(part)]
        if packed:
            there = room[: len(part)]
            codes_of(part, heads, block, top, there)
            pack(there, codes[first * block // 2 : first * block // 2 + (len(part) + 1) // 2])
            store(there, heads, block, stored)
        else:
            codes_of(part, heads, block, top, codes[piece])
            store(codes[piece], heads, block, stored)
        for i in range(len(part)):
            part[i] = part[i] - stored[i]
        for i in range(len(part)):
            finite = max(finite, bits[i] & np.int32(0x7FFFFFFF))
    return finite < _INFINITE
