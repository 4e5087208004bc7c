"""Radial-directional averaging (RDA): the mean length in the mean direction, per tensor (Decoupled DiLoCo, 2604.21428).

    RDA = (Σ w ‖Δ‖ / Σ w) · φ(Σ w φ(Δ) / Σ w),   φ(x) = x / ‖x‖

A plain mean of M directions that differ is shorter than each of them: orthogonal deltas of length R have a mean of
length R / √M, and RDA gives R. Two exceptions take the plain mean: directions that cancel, whose mean has no direction,
and tensors like embeddings, whose rows only some workers touched.

RDA is a linear combination of the deltas whose coefficients depend on their inner products alone, so it needs one pass
over the tensors, as every other rule.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np

CANCELLED = 0.05
"""Directions cancel when their weighted mean is shorter than this (1: all equal)."""

MEAN_FOR = ("*embed*", "*wte*", "*wpe*", "*head*")
"""Name patterns of the tensors a run in rounds averages plainly: embeddings and output head."""

_PIECE = 1 << 15  # elements of one delta at a time


def takes_mean(name: str, patterns: Sequence[str] = MEAN_FOR) -> bool:
    """Whether the tensor `name` takes the weighted mean."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def inner_products(deltas: Sequence[np.ndarray]) -> np.ndarray:
    """Return the inner products of float64 arrays of one shape: float64 [n, n], symmetric."""
    flat = [delta.reshape(-1) for delta in deltas]
    products = np.zeros((len(flat), len(flat)))
    for start in range(0, flat[0].size, _PIECE):
        pieces = [one[start : start + _PIECE] for one in flat]
        for row, left in enumerate(pieces):
            for column in range(row + 1):
                # Not `np.dot`: BLAS wakes a thread for every core, which takes the workers' cores away.
                products[row, column] += np.add.reduce(left * pieces[column])
    return products + np.tril(products, -1).T


def radial_coefficients(
    products: np.ndarray, weights: Sequence[float], *, cancelled: float = CANCELLED
) -> tuple[float, ...]:
    """Return the coefficients of RDA: the average is Σ cᵢ Δᵢ.

    A delta of length 0 counts in the mean length and has no direction. One delta has the coefficient 1.0 exactly.

    Args:
        products: inner products of the deltas, float64 [n, n].
        weights: of the deltas, positive.
        cancelled: see `CANCELLED`.
    """
    if len(weights) == 1:
        return (1.0,)
    by_weight, norms = np.asarray(weights, np.float64), np.sqrt(np.maximum(np.diag(products), 0.0))
    total = float(by_weight.sum())
    along = np.divide(by_weight, norms, out=np.zeros_like(norms), where=norms > 0)
    length = float(np.sqrt(max(0.0, float(along @ products @ along))))
    moving = float(by_weight[norms > 0].sum())
    if moving == 0 or length < cancelled * moving:
        return tuple(float(weight) / total for weight in weights)
    radius = float(by_weight @ norms) / total
    return tuple(float(value) for value in along * (radius / length))


def radial_average(
    deltas: Sequence[np.ndarray], weights: Sequence[float], *, cancelled: float = CANCELLED
) -> np.ndarray:
    """Return the RDA of float64 arrays of one shape; see the module."""
    return combination(deltas, radial_coefficients(inner_products(deltas), weights, cancelled=cancelled))


def weighted_mean(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return Σ w x / Σ w in float64; a single array comes back with all bits."""
    total = float(sum(weights))
    return combination(arrays, [weight / total for weight in weights])


def combination(arrays: Sequence[np.ndarray], coefficients: Sequence[float]) -> np.ndarray:
    """Return Σ c x in float64, in the order of the arrays. It starts from the first product, so 1.0 keeps all bits."""
    result = arrays[0].astype(np.float64) * coefficients[0]
    for array, coefficient in zip(arrays[1:], coefficients[1:], strict=True):
        result += array.astype(np.float64) * coefficient
    return result
