"""Factorisations of real matrices as loops of plain operations, with the results of LAPACK.

Each takes the arguments and parameters of the JAX primitive it stands for. Leading dimensions are a batch. A loop takes
one step a row or column, so they are meant for matrices of up to some hundreds of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def _batched(function: Callable[..., Any], *arguments: Any) -> Any:
    for _ in range(arguments[0].ndim - 2):
        function = jax.vmap(function)
    return function(*arguments)


def cholesky(a: jax.Array, **_: Any) -> jax.Array:
    """Return the lower factor L of a = L Lᵀ; NaN where `a` is not positive definite."""

    def single(a: jax.Array) -> jax.Array:
        rows = jnp.arange(a.shape[0])

        def column(j: Any, factor: jax.Array) -> jax.Array:
            rest = a[:, j] - jnp.dot(factor, factor[j], precision=_HIGHEST)
            return factor.at[:, j].set(jnp.where(rows >= j, rest / jnp.sqrt(rest[j]), 0))

        return jax.lax.fori_loop(0, a.shape[0], column, jnp.zeros_like(a))

    return _batched(single, a)


def lu(a: jax.Array, **_: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the packed factors of P a = L U, the row exchanged with each row, and the order of the rows."""

    def single(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, n = a.shape
        rows = jnp.arange(m)

        def column(k: Any, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            packed, pivots, order = state
            pivot = jnp.argmax(jnp.where(rows >= k, jnp.abs(packed[:, k]), -1)).astype(jnp.int32)
            exchanged = jnp.where(rows == k, pivot, jnp.where(rows == pivot, k, rows))
            packed, order = packed[exchanged], order[exchanged]
            divisor = packed[k, k]
            scaled = jnp.where((rows > k) & (divisor != 0), packed[:, k] / divisor, packed[:, k])
            packed = packed.at[:, k].set(scaled)
            below, right = jnp.where(rows > k, scaled, 0), jnp.where(jnp.arange(n) > k, packed[k], 0)
            return packed - below[:, None] * right[None, :], pivots.at[k].set(pivot), order

        short = min(m, n)
        start = (a, jnp.zeros((short,), jnp.int32), rows.astype(jnp.int32))
        return jax.lax.fori_loop(0, short, column, start)

    return _batched(single, a)


def qr(a: jax.Array, *, full_matrices: bool, **_: Any) -> tuple[jax.Array, jax.Array]:
    """Return Q and R of a = Q R by Householder reflections, with LAPACK's signs."""

    def single(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        m, n = a.shape
        rows = jnp.arange(m)

        def column(j: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, r = state
            x = jnp.where(rows >= j, r[:, j], 0)
            head, tail = x[j], jnp.where(rows > j, x, 0)
            is_needed = jnp.any(tail != 0)
            norm = jnp.where(head < 0, 1, -1) * jnp.sqrt(jnp.sum(x * x))
            scale = jnp.where(is_needed, (norm - head) / jnp.where(is_needed, norm, 1), 0)
            reflector = jnp.where(rows == j, 1, tail / jnp.where(is_needed, head - norm, 1))
            r = r - scale * reflector[:, None] * jnp.dot(reflector, r, precision=_HIGHEST)[None, :]
            return q - scale * jnp.dot(q, reflector, precision=_HIGHEST)[:, None] * reflector[None, :], r

        q, r = jax.lax.fori_loop(0, min(m, n), column, (jnp.eye(m, dtype=a.dtype), a))
        short = m if full_matrices else min(m, n)
        return q[:, :short], jnp.triu(r[:short])

    return _batched(single, a)


def triangular_solve(
    a: jax.Array,
    b: jax.Array,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
    **_: Any,
) -> jax.Array:
    """Return x of a x = b, or of x a = b, for a triangular `a`; the other triangle is not read."""

    def single(a: jax.Array, b: jax.Array) -> jax.Array:
        is_lower = lower
        if transpose_a == left_side:  # the rows of `a` are to be eliminated one after the other
            a, is_lower = a.T, not lower
        right = b if left_side else b.T
        n = a.shape[0]
        strict = jnp.tril(a, -1) if is_lower else jnp.triu(a, 1)

        def row(step: Any, x: jax.Array) -> jax.Array:
            i = step if is_lower else n - 1 - step
            rest = right[i] - jnp.dot(strict[i], x, precision=_HIGHEST)
            return x.at[i].set(rest if unit_diagonal else rest / a[i, i])

        x = jax.lax.fori_loop(0, n, row, jnp.zeros_like(right))
        return x if left_side else x.T

    return _batched(single, a, b)
