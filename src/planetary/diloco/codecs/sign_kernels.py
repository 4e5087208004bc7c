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
def _butterflies(block: np.ndarray) -> None:
    """Multiply each column of a block, [height, width], with the Hadamard matrix, unscaled, in place."""
    height, width = block.shape
    half = 1
    while half < height:
        for base in range(0, height, 2 * half):
            for row in range(base, base + half):
                upper, lower = block[row], block[row + half]
                for i in range(width):
                    a, b = upper[i], lower[i]
                    upper[i], lower[i] = a + b, a - b
        half *= 2


@njit(nogil=True, cache=True)
def encode(rows: np.ndarray, random: np.ndarray, height: int, scales: np.ndarray, negative: np.ndarray) -> None:
    """Rows float32 [count, length] -> scales float32 [count] and whether products are negative, bool [count, length].

    A row is [height, length / height] numbers.
    """
    length = rows.shape[1]
    width, small = length // height, np.float32(1.0 / length)
    first, second = np.empty((height, width), np.float32), np.empty((width, height), np.float32)
    flat, products, sums = first.reshape(-1), second.reshape(-1), np.empty(length, np.float64)
    for b in range(len(rows)):
        row, out = rows[b], negative[b]
        for i in range(length):
            flat[i] = row[i] * (random[i] * small)
        _butterflies(first)
        for i in range(height):
            for j in range(width):
                second[j, i] = first[i, j]
        _butterflies(second)
        for i in range(length):
            out[i] = products[i] < 0
        for i in range(length):
            sums[i] = np.float64(np.abs(products[i]))
        left = length // 2
        while left > 0:
            for i in range(left):
                sums[i] += sums[left + i]
            left //= 2
        scales[b] = np.float32(sums[0] / length)


@njit(nogil=True, cache=True)
def decode(negative: np.ndarray, scales: np.ndarray, random: np.ndarray, height: int, rows: np.ndarray) -> None:
    """The inverse of `encode`; `negative` as uint8 of 0 and 1.

    Sums of at most 4096 ones fit into 16 bits, of which twice as many are added at a time.
    """
    length = rows.shape[1]
    width = length // height
    second, first = np.empty((width, height), np.int16), np.empty((height, width), np.int16)
    products, flat = second.reshape(-1), first.reshape(-1)
    for b in range(len(rows)):
        given, row, scale = negative[b], rows[b], scales[b]
        for i in range(length):
            products[i] = np.int16(1) - np.int16(2) * np.int16(given[i])
        _butterflies(second)
        for i in range(height):
            for j in range(width):
                first[i, j] = second[j, i]
        _butterflies(first)
        for i in range(length):
            row[i] = np.float32(flat[i]) * scale * random[i]
