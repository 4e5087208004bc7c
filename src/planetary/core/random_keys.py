"""Keys of the random numbers of a training step: JAX's Threefry keys, computed without JAX.

The key of an inner step is a function of the run's seed, of the lease that is trained and of the step's number in the
run, all of which the journal has: training a lease again draws the same numbers on any machine.
"""

from __future__ import annotations

import zlib

import numpy as np

Key = tuple[int, int]
"""The two 32-bit words of a key, as `jax.random.key_data` returns them."""

_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key_of_seed(seed: int) -> Key:
    """Return the key that `jax.random.key(seed)` makes of a seed below 2**32."""
    return (seed >> 32) & _WORD, seed & _WORD


def seed_of_site(seed: int, site: str) -> int:
    """Return the seed of the keys of a federation's site: each numbers leases from 0, and all may have one seed."""
    return zlib.crc32(site.encode(), seed)


def fold_in(key: Key, number: int) -> Key:
    """Return `jax.random.fold_in(key, number)`: the Threefry-2x32 hash, 20 rounds, of the words (0, number)."""
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    left, right = schedule[0], ((number & _WORD) + schedule[1]) & _WORD
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            left = (left + right) & _WORD
            right = ((right << distance | right >> (32 - distance)) & _WORD) ^ left
        left = (left + schedule[(group + 1) % 3]) & _WORD
        right = (right + schedule[(group + 2) % 3] + group + 1) & _WORD
    return left, right


def step_key(seed: int, lease: int, step: int) -> Key:
    """Return the key of an inner step: the run's key with the lease, then the step's number, folded in."""
    return fold_in(fold_in(key_of_seed(seed), lease), step)


def key_words(key: Key, parts: int) -> np.ndarray:
    """Return the words of the keys of a step's micro-batches, uint32 [2 × parts].

    A single part has the step's key itself; of several, each has that key with the part's number folded in.
    """
    keys = [key] if parts == 1 else [fold_in(key, part) for part in range(parts)]
    return np.array(keys, np.uint32).reshape(-1)
