"""Seeded permutations that are the same on every machine and with every numpy version.

numpy guarantees the raw stream of a bit generator and of `SeedSequence`, but not the result of `Generator.permutation`
(NEP 19), so the permutation is built here from raw words.
"""

from __future__ import annotations

import numpy as np


def permutation(count: int, *seed: int) -> np.ndarray:
    """Return a permutation of `range(count)` as int64 [count], a pure function of the arguments.

    Every index gets a random 64-bit word and the indices are sorted by it. Ties (probability below count² /
    2⁶⁵) keep their order, so the result is always a permutation.
    """
    words = np.random.Philox(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
