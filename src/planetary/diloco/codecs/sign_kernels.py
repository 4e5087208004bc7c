"""The loops of `sign_codec`, compiled by numba: a block stays in a core's first cache. The same bits as there.

Optional (the `collectives` extra). Compiled at first use, kept in the cache beside this file, and run without the
interpreter lock. Nothing is fused or reordered.
"""

# numba has no types for its decorators.
# pyright: reportUntypedFunctionDecorator=false, reportMissingImports=false

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def encode(rows: np.ndarray, random: np.ndarray, scales: np.ndarray, signs: np.ndarray) -> None:
    """Rows float32 [count, length] -> scales float32 [count] and signs uint8 [count, length / 8]."""
    length = rows.shape[1]
    half, small = length // 2, np.float32(1.0 / length)
    now, then, sums = np.empty(length, np.float32), np.empty(length, np.float32), np.empty(length, np.float64)
    for b in range(len(rows)):
        row, out = rows[b], signs[b]
        for i in range(length):
            now[i] = row[i] * (random[i] * small)
        left = length
        while left > 1:
            for i in range(half):
                then[i] = now[2 * i] + now[2 * i + 1]
            for i in range(half):
                then[half + i] = now[2 * i] - now[2 * i + 1]
            now, then = then, now
            left //= 2
        for i in range(length // 8):
            byte = np.uint8(0)
            for bit in range(8):
                byte |= np.uint8(np.uint8(now[8 * i + bit] < 0) << np.uint8(bit))
            out[i] = byte
        for i in range(length):
            sums[i] = np.float64(np.abs(now[i]))
        left = half
        while left > 0:
            for i in range(left):
                sums[i] += sums[left + i]
            left //= 2
        scales[b] = np.float32(sums[0] / length)


@njit(nogil=True, cache=True)
def decode(signs: np.ndarray, scales: np.ndarray, random: np.ndarray, rows: np.ndarray) -> None:
    """Signs uint8 [count, length / 8] and scales float32 [count] -> rows float32 [count, length].

    Sums of at most 4096 ones fit into 16 bits, of which twice as many are added at a time.
    """
    length = rows.shape[1]
    half = length // 2
    now, then = np.empty(length, np.int16), np.empty(length, np.int16)
    for b in range(len(rows)):
        packed, row, scale = signs[b], rows[b], scales[b]
        for i in range(length // 8):
            byte = packed[i]
            for bit in range(8):
                now[8 * i + bit] = np.int16(1) - np.int16(2) * np.int16((byte >> np.uint8(bit)) & np.uint8(1))
        left = length
        while left > 1:
            for i in range(half):
                then[i] = now[2 * i] + now[2 * i + 1]
            for i in range(half):
                then[half + i] = now[2 * i] - now[2 * i + 1]
            now, then = then, now
            left //= 2
        for i in range(length):
            row[i] = np.float32(now[i]) * scale * random[i]
