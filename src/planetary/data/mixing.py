"""How several sources become one set of sequences: how often which of them is in it. Pure.

A sequence here is a block: `sequence_length + 1` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.data.shuffle import permutation

MANY_PASSES = 4
"""Passes over the same text up to which more of them are worth almost as much as other text (Muennighoff et al. 2023,
arXiv:2305.16264, section 5)."""


def blocks_of_mixture(counts: Sequence[int], weights: Sequence[float], *, repeat: bool) -> list[int]:
    """Return how many blocks each source has in a mixture in which their shares are those of the weights.

    With `repeat` every block of every source is in it, and those of a source that has few for its weight more than
    once; else no block is in it twice, and of a source that has more than its weight needs some are left out.

    Args:
        counts: blocks of the sources, each at least 1.
        weights: of the sources, each above 0.
        repeat: see above.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    ratios = [count / share for count, share in zip(counts, shares, strict=True)]
    size = max(ratios) if repeat else min(ratios)
    found = [max(1, round(share * size)) for share in shares]
    # Rounding must neither lose a block of the source that decides nor use one that is not there.
    return [max(n, c) if repeat else min(n, c) for n, c in zip(found, counts, strict=True)]


def chosen_blocks(count: int, wanted: int, *seed: int) -> np.ndarray:
    """Return which of a source's blocks are in a mixture, int64 [wanted].

    Each of the `count` blocks is there as often as any other or once more; which ones are is drawn from `seed`.
    """
    whole, rest = divmod(wanted, count)
    drawn = permutation(count, *seed)[:rest] if rest else np.empty(0, np.int64)
    return np.concatenate([np.tile(np.arange(count), whole), drawn])
