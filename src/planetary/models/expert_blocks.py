"""How many rows a mixture computes for its experts: whole blocks, of one expert each. Sizes alone, without a model."""

from __future__ import annotations

from dataclasses import dataclass

_READ_AS_ROWS, _COPIED_AS_ROWS = 3, 24
"""Rows whose products take as long as reading an expert's weights, and as copying them for a block and reading the
copy; measured with `bench/experts.py`, both ways."""
_MOVED_ROW = 64
"""Multiply-adds for each number of a row that is brought to its block and back."""
_MOST_COPIES = 8
"""Blocks for each expert, on average: each has its own copy of the expert's weights."""


def capacity_of(tokens: int, active: int, experts: int, factor: float) -> int:
    """Return how many tokens an expert takes: `factor` times the even share, at most all of them; for 0 all."""
    return max(1, min(tokens, -int(-tokens * active * factor // experts))) if factor else tokens


@dataclass(frozen=True)
class Blocks:
    """Rows in which a mixture is computed: `count` blocks of `size` rows, of one expert each."""

    count: int
    size: int

    @property
    def rows(self) -> int:
        return self.count * self.size

    def cost(self, weights: int, width: int) -> int:
        """Return the time, in multiply-adds, with experts of `weights` numbers and rows of `width`."""
        return self.count * (self.size + _COPIED_AS_ROWS) * weights + self.rows * width * _MOVED_ROW


def blocks_to_save(tokens: int, active: int, experts: int, capacity: int, *, weights: int, width: int) -> Blocks | None:
    """Return `blocks_of` these sizes; None where every expert for every token takes less time and drops none.

    `weights`: numbers of an expert; `width`: of a row.
    """
    blocks = blocks_of(tokens, active, experts, capacity)
    dense = experts * (tokens + _READ_AS_ROWS) * weights
    return None if capacity >= tokens and dense <= blocks.cost(weights, width) else blocks


def blocks_of(tokens: int, active: int, experts: int, capacity: int) -> Blocks:
    """Return the blocks that hold every choice, however unevenly the experts are chosen, in the least time.

    Small blocks waste few rows, large ones copy an expert's weights less often.

    Args:
        tokens: N.
        active: K.
        experts: S.
        capacity: tokens that an expert takes, at most.
    """
    choices = min(tokens * min(active, experts), experts * capacity)

    def of_size(size: int) -> Blocks:
        return Blocks(min(experts * -(-capacity // size), (choices + experts * (size - 1)) // size), size)

    found = [of_size(1 << power) for power in range(max(1, capacity - 1).bit_length() + 1)]
    return min(found, key=lambda one: (one.count > _MOST_COPIES * experts, one.cost(1, 0)))
