"""Composites of functions that compute block by block, with a gradient of their own, in JAX and after export.

The decomposition is `forward` of a form, a frozen dataclass whose fields are the composite's attributes; `autodiff`
emits its `gradient` (`rules.library.blockwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class Form(Protocol):
    """A function without its arrays.

    Attributes:
        forward: returns the results of the arrays, as a tuple.
        gradient: takes the arrays, the results and a cotangent of each; returns gradients by the first arrays.
    """

    @property
    def forward(self) -> Callable[..., tuple[Any, ...]]: ...

    @property
    def gradient(self) -> Callable[..., tuple[Any, ...]]: ...


Merge = Callable[[Callable[..., Any], int, Sequence[bool], Sequence[Any]], Any]
"""Returns results of a batch, along a new first dimension: of the function, the size, which arrays have that dimension,
and the arrays."""


def as_composite(name: str, form: Form, merge: Merge) -> Callable[..., Any]:
    """Return `form.forward` as the composite `name` with its gradient."""

    @jax.custom_batching.custom_vmap
    def composite(*arrays: Any) -> Any:
        return lax.composite(lambda *arrays, **_: form.forward(*arrays), name)(*arrays, **asdict(form))  # pyright: ignore[reportArgumentType]

    @composite.def_vmap
    def _(size: int, batched: Any, *arrays: Any) -> Any:
        results = merge(composite, size, batched, arrays)
        return results, (True,) * len(results)

    @jax.custom_vjp
    def call(*arrays: Any) -> Any:
        return composite(*arrays)

    def forward(*arrays: Any) -> Any:
        results = composite(*arrays)
        return results, (arrays, results)

    def pull_back(saved: Any, cotangents: Any) -> Any:
        arrays, results = saved
        gradients = form.gradient(*arrays, *results, *cotangents)
        return (*gradients, *(jnp.zeros(x.shape, jax.dtypes.float0) for x in arrays[len(gradients) :]))

    call.defvjp(forward, pull_back)
    return call


def broadcast(size: int, batched: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
    """Return arrays that all have the dimension of a batch."""
    return [
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(arrays, batched, strict=True)
    ]


def block_at(x: Any, i: Any) -> Any:
    """Return block `i` of blocks along the first dimension."""
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def put_block(x: Any, part: Any, i: Any) -> Any:
    """Return `x` with block `i` replaced."""
    return lax.dynamic_update_index_in_dim(x, part, i, 0)


def i32(x: int) -> Any:
    """Return a counter whose type does not depend on JAX's settings."""
    return jnp.asarray(x, jnp.int32)
