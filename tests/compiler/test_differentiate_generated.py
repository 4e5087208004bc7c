"""Gradients equal JAX's on programs and attributes drawn at random."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vjp_oracle import check

lax = jax.lax
FEW = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def numbers(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> jax.Array:
    draw = np.random.default_rng(seed)
    found = draw.normal(size=shape)
    if dtype.startswith("complex"):
        found = found + 1j * draw.normal(size=shape)
    return jnp.asarray(found, dtype)


SMOOTH = [
    jnp.sin,
    jnp.tanh,
    jax.nn.sigmoid,
    lambda x: x * x,
    lambda x: jnp.exp(-x * x),
    lambda x: x.sum(-1, keepdims=True) + x,
    lambda x: x.T,
    lambda x: x[::-1],
    lambda x: jnp.where(x > 0, x, 0.5 * x),
    lambda x: jnp.cumsum(x, 0),
    lambda x: jnp.concatenate([x[1:], x[:1] * 2]),
    lambda x: x @ x,
    lambda x: jnp.sort(x, axis=1),
    lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1],
    lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x, x),
    lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda y: y * 2, x),
]


@pytest.mark.slow
@FEW
@given(st.lists(st.integers(0, len(SMOOTH) - 1), min_size=1, max_size=5), st.integers(0, 1000))
def test_chains_of_functions(picks: list[int], seed: int) -> None:
    def function(x: Any) -> Any:
        kept = x
        for pick in picks:
            x = SMOOTH[pick](x) + 0.1 * kept
        return x, kept.sum()

    check(function, numbers((3, 3), seed), tolerance=2e-4)


@pytest.mark.slow
@FEW
@given(st.data())
def test_dot_general_dimension_numbers(data: st.DataObject) -> None:
    batch, contract = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    free_x, free_y = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=8, max_size=8))
    order_x = data.draw(st.permutations(range(batch + contract + free_x)))
    order_y = data.draw(st.permutations(range(batch + contract + free_y)))
    shared = sizes[: batch + contract]
    natural_x, natural_y = shared + sizes[4 : 4 + free_x], shared + sizes[6 : 6 + free_y]
    x_dims, y_dims = (
        [order_x.index(i) for i in range(batch + contract)],
        [order_y.index(i) for i in range(batch + contract)],
    )
    numbers_of = ((x_dims[batch:], y_dims[batch:]), (x_dims[:batch], y_dims[:batch]))
    x = numbers(tuple(natural_x[i] for i in order_x), 1)
    y = numbers(tuple(natural_y[i] for i in order_y), 2)
    check(lambda x, y: lax.dot_general(x, y, numbers_of), x, y)


@pytest.mark.slow
@FEW
@given(st.data())
def test_pad_slice_and_broadcast_attributes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    config = [(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))) for _ in shape]
    negative = data.draw(st.integers(0, len(shape) - 1))
    if shape[negative] > 1:
        config[negative] = (-1, *config[negative][1:])
    wide = lax.pad(jnp.zeros(shape), 0.0, config).shape
    start = [data.draw(st.integers(0, max(n - 1, 0))) for n in wide]
    limit = [data.draw(st.integers(s, n)) for s, n in zip(start, wide, strict=True)]
    strides = [data.draw(st.integers(1, 3)) for _ in wide]

    def function(x: Any, fill: Any) -> Any:
        padded = lax.pad(x, fill, config)
        cut = lax.slice(padded, start, limit, strides)
        return cut * 2, lax.broadcast_in_dim(x, (2, *shape), range(1, len(shape) + 1))

    check(function, numbers(shape, 3), jnp.float32(0.5))


@FEW
@given(st.data())
@pytest.mark.slow
def test_gather_and_scatter_with_any_indices(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    index = st.integers(-6, 6)
    first = jnp.asarray(data.draw(st.lists(index, min_size=1, max_size=4)), jnp.int32)
    mode = data.draw(st.sampled_from(["clip", "wrap", "fill"]))
    x = numbers((rows, columns), 4)
    updates = numbers((len(first), columns), 5)
    scatter_mode = "drop" if mode != "clip" else mode

    def function(x: Any, updates: Any) -> Any:
        taken = jnp.take(x, first, axis=0, mode=mode, fill_value=0.0)
        return (
            taken,
            x.at[first].add(updates, mode=scatter_mode),
            x.at[first].set(updates, mode=scatter_mode),
            x.at[first % rows].max(updates),
        )

    check(function, x, updates)


@pytest.mark.slow
@FEW
@given(st.data())
def test_convolution_attributes(data: st.DataObject) -> None:
    small = st.integers(1, 2)
    groups, batch_groups = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    size, window = data.draw(st.integers(3, 5)), data.draw(st.integers(1, 3))
    stride, dilation, kernel_dilation = data.draw(small), data.draw(small), data.draw(small)
    padding = (data.draw(st.integers(-1, 2)), data.draw(st.integers(0, 2)))
    spec = data.draw(st.sampled_from([("NCH", "OIH", "NCH"), ("NHC", "HIO", "NHC"), ("CNH", "IOH", "NHC")]))
    natural_x = {"N": 2, "C": 4, "H": size}
    natural_k = {"O": 4, "I": 4 // groups, "H": window}
    x = numbers(tuple(natural_x[c] for c in spec[0]), 6)
    k = numbers(tuple(natural_k[c] for c in spec[1]), 7)

    def function(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(
            x, k, (stride,), [padding], (dilation,), (kernel_dilation,), spec, groups, batch_groups
        )

    check(function, x, k)


@pytest.mark.slow
@FEW
@given(st.data())
def test_windowed_reductions(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(2, 4)), data.draw(st.integers(2, 5)))
    window = tuple(data.draw(st.integers(1, n)) for n in shape)
    strides = tuple(data.draw(st.integers(1, 2)) for _ in shape)
    padding = data.draw(st.sampled_from(["SAME", "VALID"]))
    dilation = (data.draw(st.integers(1, 2)), 1)
    x = numbers(shape, 8)

    def function(x: Any) -> Any:
        return (
            lax.reduce_window(x, 0.0, lax.add, window, strides, padding, base_dilation=dilation),
            lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding),
            lax.reduce_window(x, jnp.inf, lax.min, window, strides, padding),
        )

    check(function, x)
