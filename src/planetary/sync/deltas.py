"""Inner products of the workers' deltas: all that judging and clipping need to know of them.

A delta is the start of the round minus a worker's end parameters. With n contributions the table has n² numbers,
however large the model is, so the decision is a pure function of a small struct.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from planetary.core.tensors import Tensors, TensorSpec
from planetary.sync.contributions import Contribution, blocks

# Of one product of two blocks. OpenBLAS multiplies so little in the calling thread; for more it would wake one for
# every core, and they spin on cores the workers need.
_MOST_PRODUCTS = 1 << 17


class Table(msgspec.Struct, frozen=True):
    """Inner products of deltas, in float64."""

    tasks: tuple[int, ...]  # tasks of the contributions, ascending
    products: tuple[tuple[float, ...], ...]  # [n][n], symmetric: of the deltas of two contributions
    start_norm: float  # Euclidean norm of the parameters at the start of the round
    size: int  # how many numbers a delta has


def tensor_products(spec: TensorSpec, start: np.ndarray, contributions: Sequence[Contribution]) -> np.ndarray:
    """Return the inner products of one tensor's deltas, in the order of the contributions: float64 [n, n].

    `start`: the tensor at the start of the round, float32.
    """
    return _products(spec, start.reshape(-1), contributions)[0]


def table_of(specs: Sequence[TensorSpec], masters: Tensors, contributions: Sequence[Contribution]) -> Table:
    """Return the inner products of contributions trained from the same parameters.

    Args:
        specs: the parameters' names, element types and shapes.
        masters: the master parameters at the start of the round, float32 by name.
        contributions: checked with `check_contribution`; every task once.
    """
    ordered = sorted(contributions, key=lambda contribution: contribution.task)
    products, start_squares = np.zeros((len(ordered), len(ordered))), 0.0
    for spec in specs:
        of_tensor, squares = _products(spec, masters[spec.name].reshape(-1), ordered)
        products += of_tensor
        start_squares += squares
    return Table(
        tuple(one.task for one in ordered),
        tuple(tuple(float(value) for value in row) for row in products),
        start_squares**0.5,
        sum(spec.size for spec in specs),
    )


def _products(spec: TensorSpec, start: np.ndarray, contributions: Sequence[Contribution]) -> tuple[np.ndarray, float]:
    """Return the inner products of one tensor's deltas, and the sum of the squares of the start."""
    count = len(contributions)
    products, squares = np.zeros((count, count)), 0.0
    width = max(1, _MOST_PRODUCTS // max(1, count * count))
    for block in blocks(spec.size):
        start64 = start[block].astype(np.float64)
        squares += float(np.add.reduce(np.square(start64)))
        deltas = np.stack([one.delta(spec, block, start64) for one in contributions])
        for left in range(0, start64.size, width):
            piece = deltas[:, left : left + width]
            products += piece @ piece.T
    return products, squares
