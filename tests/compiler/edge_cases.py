"""JAX functions at the arguments where their arithmetic overflows, divides by zero or meets a tie.

In the form of sweep_cases.py. What JAX itself answers there, be it NaN, is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sweep_cases import Case

lax, nn, special, linalg = jax.lax, jax.nn, jax.scipy.special, jnp.linalg

EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.5, -30.0, -120.0, 30.0, 120.0, 1e-30, 0.5, 6.0]


def elementwise() -> Iterator[tuple[str, Callable[..., Any]]]:
    for place, names in (
        (nn, "relu relu6 sigmoid silu softplus log_sigmoid mish elu celu selu gelu hard_tanh log1mexp squareplus"),
        (special, "logit entr log_ndtr i0 i1e"),
        (jnp, "sqrt log cbrt reciprocal arctanh arccosh sinc i0 nan_to_num exp2 square"),
        (lax, "bessel_i0e bessel_i1e rsqrt erf_inv digamma lgamma tanh"),
    ):
        for name in names.split():
            yield name, getattr(place, name)
    yield "power_of_number", lambda x: (x**-3, x**-2, x**-1, x**0, x**3, x**0.5, x**1.5)
    yield "maximum", lambda x: (jnp.maximum(x, 1), jnp.sqrt(jnp.maximum(x, 0)), jnp.minimum(x, x[::-1]))
    yield "logaddexp", lambda x: (jnp.logaddexp(x, x), jnp.logaddexp(x, x[::-1]), jnp.logaddexp2(x[::-1], x))
    yield "xlogy", lambda x: (special.xlogy(x[::-1], x), special.xlog1py(x, x[::-1]))
    yield "divergence", lambda x: (special.kl_div(x, x[::-1]), special.rel_entr(x, x))
    yield "guarded", lambda x: (jnp.where(x > 0, jnp.log(x), 0), jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0))
    yield "frexp", lambda x: (*jnp.frexp(x), jnp.ldexp(x, jnp.arange(len(x)) - 7))
    yield "sici", special.sici
    yield "branch", jax.vmap(lambda x: lax.cond(x > 0, jnp.sqrt, lambda v: v / (v - 1), x))
    yield "branches", jax.vmap(lambda x: lax.switch(jnp.int32(x > 0), [lambda v: v * 2, jnp.log], x))
    yield "by_row", jax.vmap(lambda x: nn.relu(x) + jnp.logaddexp(x, 1.0) + nn.sigmoid(x))
    yield "cumlogsumexp", lambda x: lax.cumlogsumexp(jnp.round(jnp.nan_to_num(x)))
    yield "reduce", lambda x: lax.reduce(x, x.dtype.type(-np.inf), jnp.logaddexp, (0,))
    yield "scan", lambda x: lax.scan(lambda c, r: (jnp.logaddexp(c, r), nn.softplus(c * 0)), x[0] * 0, x[:4])
    yield "clip", lambda x: (jnp.clip(x, 0, 1), nn.relu(x) / x, jnp.abs(x))


def matrices() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    yield "pinv of equal singular values", linalg.pinv, np.eye(3)
    yield "det of a singular matrix", linalg.det, np.diag([1.0, 2.0, 3.0, 0.0])
    yield "det of zeros", linalg.det, np.zeros((4, 4))
    yield "batch of det", jax.vmap(linalg.det), np.ones((2, 4, 4))
    yield "eigenvalues of a failed factorisation", linalg.cholesky, -np.eye(3)


def _first_of(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    return jnp.where(a[0] >= b[0], a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])


def windows() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    ties = np.random.default_rng(3).integers(-2, 3, (3, 4, 5)).astype(np.float32)
    for name, init, choose in (("max", -np.inf, lax.max), ("min", np.inf, lax.min)):

        def pool(x: Any, choose: Any = choose, init: float = init, **how: Any) -> Any:
            return lax.reduce_window(
                x, x.dtype.type(init), choose, (3, 2, 2), (2, 3, 1), ((1, 2), (0, 1), (2, 2)), **how
            )

        yield f"{name} pool of ties", pool, ties
        yield f"{name} pool of ties with holes", partial(pool, base_dilation=(2, 1, 3)), ties
    yield "the first of several", lambda x: lax.reduce((x, x[::-1]), (-9.0, 0.0), _first_of, (0, 1, 2))[1], ties


def cases(dtype: str) -> Iterator[Case]:
    for name, function in elementwise():
        yield Case(name, "edge", dtype, function, (jnp.asarray(EDGES, dtype),))
    if dtype == "float32":
        for name, function, matrix in (*matrices(), *windows()):
            yield Case(name, "edge", dtype, function, (jnp.asarray(matrix, dtype),))
