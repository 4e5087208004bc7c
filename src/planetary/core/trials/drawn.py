"""Random numbers of trials, the same bits everywhere, and the compact form of their expected results.

A bit generator's raw words are the same in every version of numpy (NEP 19), the distributions are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np

from planetary.core.trials.deviations import Accepted

TRIAL_RATE = 2.0**-7  # learning rate; large enough for changes to stand out from the rounding of the parameters
REFERENCE_BYTES = 8 << 20
"""Approximate bytes of the expected results of a large model: 3.3M parameters under AdamW travel as sums of 8."""
EXACT_ELEMENTS = 4096  # a tensor of so many elements, or fewer, travels as it is
_CHUNK = 1 << 20  # elements summed at a time, so temporary arrays stay small


def random_words(text: str, count: int) -> np.ndarray:
    """Return 64-bit words drawn from a text."""
    return np.asarray(np.random.PCG64(_seed(text)).random_raw(count), np.uint64)


def uniform(words: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(words: np.ndarray) -> np.ndarray:
    """Return nearly standard normal float32: the sum of four uniform numbers of 16 bits, at most 3.5 from 0."""
    total = np.zeros(words.shape, np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return ((total - 131070).astype(np.float64) * (3.0**0.5 / 65536)).astype(np.float32)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


class ExpectedResult(msgspec.Struct, frozen=True):
    """A reference's result for one tensor: float32 changes of the elements, or signed sums of `block` of them each."""

    changes: bytes
    block: int
    accepted: Accepted  # accepted error of one number

    def fits(self, size: int) -> bool:
        """Whether it can be that of a tensor of `size` elements."""
        return self.block >= 1 and len(self.changes) == 4 * -(-size // self.block)

    @property
    def numbers(self) -> np.ndarray:
        """The changes or their sums."""
        return np.frombuffer(self.changes, "<f4")


def block_within(limit: int, sizes: Iterable[int]) -> int:
    """Return the block, a power of two, in which tensors above `EXACT_ELEMENTS` take `limit` bytes or less in all."""
    large = [size for size in sizes if size > EXACT_ELEMENTS]
    block = 1
    while 4 * sum(-(-size // block) for size in large) > limit and block < _CHUNK:
        block *= 2
    return block


def block_sums(signs: str, after: np.ndarray, before: np.ndarray | None, block: int) -> np.ndarray:
    """Return the changes of a tensor's elements, or their signed sums over blocks, as float32.

    Args:
        signs: the seed of the random signs; without them, swapped elements would cancel.
        after: numbers of any shape.
        before: numbers of the same shape; None: zeros.
        block: elements of a sum; 1: every change as it is.
    """
    new = after.reshape(-1)
    old = np.broadcast_to(np.float32(0), new.shape) if before is None else before.reshape(-1)
    if block == 1:
        return (new.astype(np.float64) - old).astype(np.float32)
    words = np.random.PCG64(_seed(signs))
    sums = np.empty(-(-new.size // block), np.float32)
    chunk = max(1, _CHUNK // block) * block  # of a multiple of 64 elements: each has one bit
    for start in range(0, new.size, chunk):
        part = new[start : start + chunk].astype(np.float64) - old[start : start + chunk]
        bits = np.unpackbits(words.random_raw(chunk // 64).astype("<u8").view(np.uint8))[: part.size]
        part = np.where(bits == 1, part, -part)
        padded = np.zeros(-(-part.size // block) * block)
        padded[: part.size] = part
        sums[start // block : start // block + len(padded) // block] = padded.reshape(-1, block).sum(axis=1)
    return sums
