"""Parameters described before they are drawn, so a model of any size can be counted without memory.

A model writes down a pytree of `Draw` leaves. `draw` turns it into float32 arrays, `count` into a number.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import Tensors

Params = dict[str, Any]


class Draw(msgspec.Struct, frozen=True):
    """One parameter: Gaussian of mean `mean` and standard deviation `deviation` (0: constant).

    With `uniform`, `mean ± deviation` are the ends of a uniform interval instead.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    deviation: float = 0.0
    uniform: bool = False


def normal(*shape: int, deviation: float) -> Draw:
    """Gaussian around 0."""
    return Draw(shape, deviation=deviation)


def uniform(*shape: int, low: float, high: float) -> Draw:
    """Uniform between `low` and `high`."""
    return Draw(shape, (low + high) / 2, (high - low) / 2, uniform=True)


def zeros(*shape: int) -> Draw:
    """All 0."""
    return Draw(shape)


def ones(*shape: int) -> Draw:
    """All 1."""
    return Draw(shape, mean=1.0)


_IS_UNDRAWN = ContextVar("is undrawn", default=False)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Let models be built for their shapes alone: every array has one number, and is not written to."""
    before = _IS_UNDRAWN.set(True)
    try:
        yield
    finally:
        _IS_UNDRAWN.reset(before)


def draw(tree: Params, seed: int) -> Params:
    """Return the tree with float32 arrays for the `Draw` leaves.

    numpy draws each from `seed` and the leaf's name, so values depend neither on JAX's version nor on the other
    parameters. Within `undrawn` they take no memory.
    """

    def leaf(path: tuple[Any, ...], wanted: Draw) -> np.ndarray:
        if _IS_UNDRAWN.get():
            return np.broadcast_to(np.float32(wanted.mean), wanted.shape)
        if not wanted.deviation:
            return np.full(wanted.shape, wanted.mean, np.float32)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        entropy = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(entropy[:16], "big"))
        if wanted.uniform:
            numbers = 2.0 * rng.random(wanted.shape, np.float32) - 1.0
        else:
            numbers = rng.standard_normal(wanted.shape, np.float32)
        return (wanted.mean + wanted.deviation * numbers).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def count(tree: Params) -> int:
    """Number of scalars in a tree of `Draw` leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def flat_names(tree: Params) -> dict[str, Any]:
    """Return the leaves of a tree by their dotted names, in the order of a program's arguments."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def filled(template: Params, values: Tensors) -> Any:
    """Return a tree of this structure with the arrays under the leaves' dotted names.

    Raises:
        UserError: one is missing or has another shape.
    """
    leaves = flat_names(template)
    for name, leaf in leaves.items():
        found = values.get(name)
        if found is None or found.shape != leaf.shape:
            raise UserError(
                f"the tensors are not of this model: expected {name} with the shape {list(leaf.shape)}, found "
                f"{'none' if found is None else list(found.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(template), [values[name] for name in leaves])
