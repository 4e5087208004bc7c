"""The loops of the codecs, compiled by numba: one pass over memory, since a block stays in a core's first cache.

The same bits as the codecs have in numpy. Optional (the `collectives` extra). Compiled at first use, kept in the cache
beside this file, and run without the interpreter lock. Nothing is fused or reordered: a product is rounded before it is
added to. The loops that encode form e of a `CodecInput` first, leave the remainder the bytes drop, and return whether
all of it is finite. Arrays are contiguous, of one dimension where no shape is given; empty ones stand for zeros.

numba does not notice when another file's function changes, so loops which share one are in this file.
"""

# numba has no types for its decorators.
# pyright: reportUntypedFunctionDecorator=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

_TOGETHER = 4096  # numbers at a time: 16 KiB
_INFINITE = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_GROUP = 128  # see `Exponents`, which loops here cannot import
_LEAST = np.float32(0.5 / 64)
_ZERO = np.float32(0)
_ONE = np.float32(1)

Given = tuple[np.ndarray, np.ndarray, np.ndarray, np.float32, np.ndarray]
"""The three of a `CodecInput`, β, and the array of the rest the bytes leave."""

Grid = tuple[int, int, int, int, int, int]
"""See `sparse_codec._Chunks`."""

# Loops run over slices from 0: only then the compiler knows that no index counts from the end, and vectorises.


@njit(nogil=True, cache=True)
def highest(values: np.ndarray) -> np.int32:
    """Return the bits of the largest magnitude of float32 values; those of infinity or more: one is not finite."""
    keys, found = values.view(np.int32), np.int32(0)
    for i in range(len(keys)):
        found = max(found, keys[i] & _MAGNITUDE)
    return found


@njit(nogil=True, cache=True)
def _sum(given: Given, piece: slice) -> np.int32:
    """Write a piece of e into the array of the rest; return `highest` of it."""
    values, base, residual, decay, left = given
    update, less, before, out = values[piece], base[piece], residual[piece], left[piece]
    if len(base) == 0 and len(residual) == 0:
        for i in range(len(out)):
            out[i] = update[i]
    elif len(residual) == 0:
        for i in range(len(out)):
            out[i] = update[i] - less[i]
    elif len(base) == 0:
        for i in range(len(out)):
            out[i] = update[i] + decay * before[i]
    else:
        for i in range(len(out)):
            out[i] = (update[i] - less[i]) + decay * before[i]
    return highest(out)


@njit(nogil=True, cache=True)
def _keep(left: np.ndarray, sent: np.ndarray) -> np.int32:
    """Subtract float32 values sent; return `highest` of the rest."""
    for i in range(len(left)):
        left[i] = left[i] - sent[i]
    return highest(left)


@njit(nogil=True, cache=True)
def difference(values: np.ndarray, base: np.ndarray, out: np.ndarray) -> np.bool_:
    """Subtract float32 values, an empty `base` stands for zeros; return whether all results are finite."""
    found = np.int32(0)
    for first in range(0, len(out), _TOGETHER):
        found = max(found, _sum((values, base, values[:0], _ONE, out), slice(first, first + _TOGETHER)))
    return found < _INFINITE


@njit(nogil=True, cache=True)
def bfloat16_compress(given: Given, out: np.ndarray) -> np.bool_:
    """`out`: uint16."""
    left = given[4]
    bits, found = np.empty(_TOGETHER, np.uint32), np.int32(0)
    for first in range(0, len(left), _TOGETHER):
        piece = slice(first, first + _TOGETHER)
        part, into = left[piece], out[piece]
        found = max(found, _sum(given, piece))
        exact, sent = part.view(np.uint32), bits[: len(part)]
        for i in range(len(sent)):
            odd = (exact[i] >> np.uint32(16)) & np.uint32(1)
            sent[i] = (exact[i] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
        for i in range(len(sent)):
            into[i] = np.uint16(sent[i] >> np.uint32(16))
        found = max(found, _keep(part, sent.view(np.float32)))
    return found < _INFINITE


@njit(nogil=True, cache=True)
def bfloat16_decode(data: np.ndarray, out: np.ndarray) -> np.bool_:
    """uint16 -> the bits of float32 as uint32; return whether all are finite."""
    found = np.uint16(0)
    for i in range(len(out)):
        out[i] = np.uint32(data[i]) << np.uint32(16)
        found = max(found, data[i] & np.uint16(0x7FFF))
    return found < np.uint16(0x7F80)


@njit(nogil=True, cache=True)
def _levels(codes: np.ndarray, largest: np.float32, bits: np.ndarray, out: np.ndarray) -> None:
    """Codes of `Exponents` -> float32; `bits`: int32 of as many."""
    for i in range(len(codes)):
        code = np.int32(codes[i])
        power = code & np.int32(7)
        bits[i] = ((power + np.int32(120)) << np.int32(23)) * np.int32(power != 0) | (code & np.int32(8)) << np.int32(
            28
        )
    values = bits.view(np.float32)
    for i in range(len(out)):
        out[i] = values[i] * largest


@njit(nogil=True, cache=True)
def exponents_compress(given: Given, encoded: tuple[np.ndarray, np.ndarray]) -> np.bool_:
    """`encoded`: the largest magnitudes of groups, float32, and packed codes, uint8."""
    left = given[4]
    heads, packed = encoded
    codes, bits, sent = np.empty(_GROUP, np.uint8), np.empty(_GROUP, np.int32), np.empty(_GROUP, np.float32)
    ratios, most, found = np.empty(_GROUP, np.float32), np.empty(1, np.int32), np.int32(0)
    exponents = ratios.view(np.int32)
    for group in range(len(heads)):
        piece = slice(group * _GROUP, (group + 1) * _GROUP)
        part = left[piece]
        most[0] = _sum(given, piece)
        found = max(found, most[0])
        largest = most.view(np.float32)[0]
        size = largest if largest > _ZERO else _ONE
        for i in range(len(part)):
            ratios[i] = np.abs(part[i]) / size
        for i in range(len(part)):
            code = max(
                ((exponents[i] + np.int32(1 << 22)) >> np.int32(23)) - np.int32(120), np.int32(ratios[i] >= _LEAST)
            )
            codes[i] = np.uint8(code | np.int32(part[i] < _ZERO) << np.int32(3))
        count = len(part)
        if count % 2:
            codes[count] = 0
        into = packed[group * _GROUP // 2 : group * _GROUP // 2 + (count + 1) // 2]
        for i in range(len(into)):
            into[i] = codes[2 * i] | codes[2 * i + 1] << np.uint8(4)
        heads[group] = largest
        _levels(codes[:count], largest, bits[:count], sent[:count])
        found = max(found, _keep(part, sent[:count]))
    return found < _INFINITE


@njit(nogil=True, cache=True)
def exponents_decode(heads: np.ndarray, packed: np.ndarray, out: np.ndarray) -> None:
    """The inverse of `exponents_compress`, without feedback."""
    codes, bits = np.empty(_GROUP, np.uint8), np.empty(_GROUP, np.int32)
    for group in range(len(heads)):
        part = out[group * _GROUP : (group + 1) * _GROUP]
        given = packed[group * _GROUP // 2 : group * _GROUP // 2 + (len(part) + 1) // 2]
        for i in range(len(given)):
            codes[2 * i], codes[2 * i + 1] = given[i] & np.uint8(15), given[i] >> np.uint8(4)
        _levels(codes[: len(part)], heads[group], bits[: len(part)], part)


@njit(nogil=True, cache=True)
def _choose(keys: np.ndarray, most: np.int32, guess: np.int32, chosen: np.ndarray, places: np.ndarray) -> np.int32:
    """Write the ascending places of as many of the largest of int32 keys >= 0; of equal ones the first.

    The least of those, which is returned, is searched for from a guess on, by interpolation and halving: to count the
    keys that are as large is one vectorised pass over a cache. The choice does not depend on the way there. `most`: the
    largest key; `chosen`: zeros, uint8, at least as many as keys and a multiple of 8.
    """
    count = len(places)
    low, high, above, beyond = np.int64(0), np.int64(most), len(keys), 0  # how many are >= low, and > high
    turn = 0
    while low < high and above != count:
        if turn == 0:
            middle = np.int64(guess)
        elif turn % 3:
            middle = low + (high - low) * (above - count) // (above - beyond)
        else:
            middle = low + (high - low) // 2
        middle, turn = min(max(middle, low + 1), high), turn + 1
        key, found = np.int32(middle), np.int32(0)
        for i in range(len(keys)):
            found += np.int32(keys[i] >= key)
        if found >= count:
            low, above = middle, np.int64(found)
        else:
            high, beyond = middle - 1, np.int64(found)
    least = np.int32(low)
    equal = count - beyond if above > count else count
    for i in range(len(keys)):
        chosen[i] = keys[i] >= least
    words, taken = chosen.view(np.uint64), 0
    for word in range(len(words)):
        if words[word]:  # few are chosen
            for i in range(8 * word, min(8 * word + 8, len(keys))):
                is_equal = keys[i] == least
                if chosen[i] and (not is_equal or equal > 0):
                    places[taken] = np.uint16(i)
                    taken += 1
                    equal -= is_equal
    return least


@njit(nogil=True, cache=True)
def largest_compress(given: Given, grid: Grid, kept: tuple[np.ndarray, np.ndarray]) -> np.bool_:
    """Choose the largest of each tile of a matrix; the array of the rest has all numbers of these tiles.

    `kept`: places, uint16 [tiles, kept], and numbers, float32 alike.
    """
    left = given[4]
    start, down, across, height, wide, width = grid
    places, numbers = kept
    count = places.shape[1]
    tile, chosen = np.empty(height * wide, np.float32), np.zeros((height * wide + 7) // 8 * 8, np.uint8)
    bits, keys = tile.view(np.int32), np.empty(height * wide, np.int32)
    found, least = np.int32(0), np.int32(0)
    for number in range(down * across):
        first = start + number // across * height * width + number % across * wide
        if number % across == 0:  # whole rows at a time: memory is read in order
            for row in range(height):
                piece = slice(first + row * width, first + row * width + across * wide)
                found = max(found, _sum(given, piece))
        for row in range(height):
            tile[row * wide : (row + 1) * wide] = left[first + row * width : first + row * width + wide]
        most = np.int32(0)
        for i in range(len(keys)):
            keys[i] = bits[i] & _MAGNITUDE
            most = max(most, keys[i])
        least = _choose(keys, most, least, chosen, places[number])
        for i in range(count):
            numbers[number, i] = tile[places[number, i]]
    return found < _INFINITE


@njit(nogil=True, cache=True)
def largest_subtract(places: np.ndarray, values: np.ndarray, grid: Grid, left: np.ndarray) -> bool:
    """Subtract float32 values [tiles, kept] at their places; return whether these rests are finite."""
    start, _, across, height, wide, width = grid
    found = np.int32(0)
    for number in range(len(places)):
        first = start + number // across * height * width + number % across * wide
        for i in range(places.shape[1]):
            index = first + places[number, i] // wide * width + places[number, i] % wide
            left[index] = left[index] - values[number, i]
            found = max(found, np.int32(not np.isfinite(left[index])))
    return found == 0


@njit(nogil=True, cache=True)
def largest_decode(places: np.ndarray, values: np.ndarray, grid: Grid, out: np.ndarray) -> bool:
    """Put float32 values [tiles, kept] at their places; return whether these ascend and are inside their tiles."""
    start, _, across, height, wide, width = grid
    impossible = 0
    for number in range(len(places)):
        first, before = start + number // across * height * width + number % across * wide, -1
        for i in range(places.shape[1]):
            place = int(places[number, i])
            if place <= before or place >= height * wide:
                impossible += 1
                break
            out[first + place // wide * width + place % wide] = values[number, i]
            before = place
    return impossible == 0


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


def _three_stages(half: int) -> Callable[[np.ndarray], None]:
    """Return three stages of `_butterflies`, from rows `half` apart on, of a block [64, 64] as one dimension.

    The numbers stay in registers in between. Distances are constants, by which the compiler knows that rows do not
    overlap, and vectorises.
    """
    r1, r2, r3, r4, r5, r6, r7 = (64 * half * row for row in range(1, 8))
    apart = 64 if half > 1 else 512

    @njit(nogil=True, cache=True)
    def stages(flat: np.ndarray) -> None:
        for number in range(8):
            x = flat[number * apart : number * apart + r7 + 64]
            for i in range(64):
                a0, a1, a2, a3 = x[i] + x[i + r1], x[i] - x[i + r1], x[i + r2] + x[i + r3], x[i + r2] - x[i + r3]
                a4, a5, a6, a7 = (
                    x[i + r4] + x[i + r5],
                    x[i + r4] - x[i + r5],
                    x[i + r6] + x[i + r7],
                    x[i + r6] - x[i + r7],
                )
                b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
                b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
                x[i], x[i + r1], x[i + r2], x[i + r3] = b0 + b4, b1 + b5, b2 + b6, b3 + b7
                x[i + r4], x[i + r5], x[i + r6], x[i + r7] = b0 - b4, b1 - b5, b2 - b6, b3 - b7

    return stages


_first_stages, _last_stages = _three_stages(1), _three_stages(8)


@njit(nogil=True, cache=True)
def _columns(block: np.ndarray) -> None:
    """`_butterflies` of float32, fast where the block is [64, 64]."""
    if block.shape[0] == 64 and block.shape[1] == 64:
        flat = block.reshape(-1)
        _first_stages(flat)
        _last_stages(flat)
    else:
        _butterflies(block)


@njit(nogil=True, cache=True)
def _magnitude(products: np.ndarray, sums: np.ndarray) -> np.float32:
    """Return the mean magnitude; `sums`: float64 of as many."""
    for i in range(len(sums)):
        sums[i] = np.float64(np.abs(products[i]))
    left = len(sums) // 2
    while left > 0:
        for i in range(left):
            sums[i] += sums[left + i]
        left //= 2
    return np.float32(sums[0] / len(sums))


@njit(nogil=True, cache=True)
def _restore(
    signs: np.ndarray, scale: np.float32, random: np.ndarray, work: tuple[np.ndarray, np.ndarray], out: np.ndarray
) -> None:
    """Packed signs, uint8 -> float32 [height · width]; `work`: int16 [width, height] and [height, width].

    Sums of at most 4096 ones fit into 16 bits, of which twice as many are added at a time.
    """
    second, first = work
    products, flat = second.reshape(-1), first.reshape(-1)
    for i in range(len(signs)):
        for j in range(8):
            products[8 * i + j] = np.int16(1) - np.int16(2) * np.int16(signs[i] >> np.uint8(j) & np.uint8(1))
    _butterflies(second)
    for i in range(first.shape[0]):
        for j in range(first.shape[1]):
            first[i, j] = second[j, i]
    _butterflies(first)
    for i in range(len(out)):
        out[i] = np.float32(flat[i]) * scale * random[i]


@njit(nogil=True, cache=True)
def signs_compress(given: Given, random: np.ndarray, height: int, encoded: tuple[np.ndarray, np.ndarray]) -> np.bool_:
    """`encoded`: mean magnitudes of blocks, float32; packed signs, uint8 [blocks, length / 8].

    A block is [height, length / height] numbers, the last one with zeros behind; `random`: the random signs, float32
    [length].
    """
    left = given[4]
    scales, signs = encoded
    length, found = len(random), np.int32(0)
    width, small = length // height, np.float32(1.0 / length)
    first, second = np.empty((height, width), np.float32), np.empty((width, height), np.float32)
    work = np.empty((width, height), np.int16), np.empty((height, width), np.int16)
    flat, products, sums = first.reshape(-1), second.reshape(-1), np.empty(length, np.float64)
    negative, sent = np.empty(length, np.uint8), np.empty(length, np.float32)
    words = negative.view(np.uint64)
    for block in range(len(scales)):
        piece, into = slice(block * length, (block + 1) * length), signs[block]
        part = left[piece]
        found = max(found, _sum(given, piece))
        flat[len(part) :] = _ZERO
        for i in range(len(part)):
            flat[i] = part[i] * (random[i] * small)
        _columns(first)
        for i in range(height):
            for j in range(width):
                second[j, i] = first[i, j]
        _columns(second)
        for i in range(length):
            negative[i] = products[i] < _ZERO
        for i in range(len(into)):  # the product has the lowest bits of eight bytes in the highest byte
            into[i] = np.uint8((words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56))
        scales[block] = _magnitude(products, sums)
        _restore(into, scales[block], random, work, sent)
        found = max(found, _keep(part, sent[: len(part)]))
    return found < _INFINITE


@njit(nogil=True, cache=True)
def signs_decode(scales: np.ndarray, signs: np.ndarray, random: np.ndarray, height: int, out: np.ndarray) -> None:
    """The inverse of `signs_compress`, without feedback."""
    length = len(random)
    work = np.empty((length // height, height), np.int16), np.empty((height, length // height), np.int16)
    sent = np.empty(length, np.float32)
    for block in range(len(scales)):
        part = out[block * length : (block + 1) * length]
        if len(part) == length:
            _restore(signs[block], scales[block], random, work, part)
        else:
            _restore(signs[block], scales[block], random, work, sent)
            part[:] = sent[: len(part)]
