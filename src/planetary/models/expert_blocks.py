"""How many rows a mixture computes for its experts: whole blocks, of one expert each. Sizes alone, without a model."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHTS_AS_ROWS = 16
"""Rows whose products take as long as fetching the weights of a block; measured with `bench/experts.py`."""
_MOVED_ROW = 64
"""Multiply-adds for each number of a row that is brought to its block and back."""
_LARGEST_BLOCK = 128


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

    def cost(self, weights: int, moved: int = 0) -> int:
        """Return the time, in multiply-adds, with experts of `weights` numbers; `moved`: of a row that is moved."""
        return self.count * (self.size + _WEIGHTS_AS_ROWS) * weights + self.rows * moved * _MOVED_ROW


def blocks_of(tokens: int, active: int, experts: int, capacity: int) -> Blocks:
    """Return the blocks that hold every choice, however unevenly the experts are chosen, in the least time.

    Small blocks waste few rows, large ones fetch an expert's weights less often.

    Args:
        tokens: N.
        active: K.
        experts: S.
        capacity: tokens that an expert takes, at most.
    """
    choices = min(tokens * min(active, experts), experts * capacity)

    def of_size(size: int) -> Blocks:
        return Blocks(min(experts * -(-capacity // size), (choices + experts * (size - 1)) // size), size)

    sizes = (1 << power for power in range(_LARGEST_BLOCK.bit_length()))
    return min(map(of_size, sizes), key=lambda found: found.cost(1))
