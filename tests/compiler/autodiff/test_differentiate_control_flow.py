"""Loops and branches: size of the graph, what is saved, and the errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vjp_oracle import check

from planetary.compiler.autodiff.differentiate import differentiate
from planetary.core.errors import UnsupportedOpError

lax = jax.lax


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def transformer_like(x: jax.Array, weights: jax.Array) -> jax.Array:
    def layer(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return carry + jnp.tanh(carry @ w) @ w.T, None

    return lax.scan(layer, x, weights)[0].sum()


def gradient_text(function: Any, *arguments: Any, wrt: tuple[int, ...] = (0,)) -> str:
    return differentiate(jax.jit(function).lower(*arguments).as_text(), wrt=wrt)


def test_graph_size_of_a_scan_does_not_depend_on_its_depth() -> None:
    texts = [gradient_text(transformer_like, numbers(2, 4), numbers(depth, 4, 4), wrt=(0, 1)) for depth in (3, 24)]
    assert texts[0].count("\n") == texts[1].count("\n")
    assert texts[1].count("stablehlo.while") == 2
    check(transformer_like, numbers(2, 4), 0.3 * numbers(24, 4, 4, seed=1))


def test_scan_saves_its_carry_and_no_read_only_value() -> None:
    def function(x: jax.Array, rows: jax.Array) -> Any:
        return lax.scan(lambda c, r: (jnp.sin(c * r), c + r), x, rows)

    text = gradient_text(function, numbers(5), numbers(7, 5))
    forward = text.split("stablehlo.while")[1]
    assert forward.count("dynamic_update_slice") == 1, "only the carry is stacked, and the outputs are dropped"


def test_a_linear_scan_saves_nothing() -> None:
    text = gradient_text(lambda x: lax.fori_loop(0, 9, lambda i, c: 0.5 * c, x), numbers(5))
    assert text.count("stablehlo.while") == 1
    assert "dynamic_update_slice" not in text


def test_the_same_value_in_several_loop_positions() -> None:
    check(lambda x: lax.fori_loop(0, 4, lambda i, c: (c[0] * x + c[1], c[1] * c[0]), (x, x)), numbers(3))


def test_loops_in_branches_in_loops() -> None:
    def function(x: jax.Array) -> jax.Array:
        def step(c: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
            inner = lax.cond(
                r[0] > 0, lambda a: lax.fori_loop(0, 2, lambda i, d: jnp.sin(d * r), a), lambda a: a * r.sum(), c
            )
            return inner, inner * 2

        return lax.scan(step, x[0], x)[1]

    check(function, numbers(4, 3))


def test_loop_of_run_time_length_is_an_error_with_a_remedy() -> None:
    """A loop with a run time number of iterations is an error that says what to do."""

    def function(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 1.5, x)

    with pytest.raises(UnsupportedOpError, match=r"number of iterations is not known at compile time.*lax\.scan"):
        gradient_text(function, numbers(3))


def test_such_a_loop_off_the_gradients_path_does_not_matter() -> None:
    def function(x: jax.Array) -> jax.Array:
        count = lax.while_loop(lambda n: n < x.astype(jnp.int32).sum(), lambda n: n + 1, 0)
        return x * count

    check(function, jnp.float32(3.7))


def test_values_handed_through_such_a_loop_pass() -> None:
    def function(x: jax.Array) -> jax.Array:
        state = (jnp.float32(1.0), x[0], x.sum())
        count, kept, _ = lax.while_loop(lambda s: s[2] < 10, lambda s: (s[0] + 1, s[1], s[2] * 1.5 + 1), state)
        return count * kept * x

    check(function, numbers(3))


@pytest.mark.slow
def test_samplers_are_recognised_by_their_call() -> None:
    def function(key: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        key = jax.random.wrap_key_data(key)
        a = jnp.abs(x) + 0.5
        return jax.random.gamma(key, a), jax.random.dirichlet(key, a), jax.random.truncated_normal(key, x, x + 1)

    check(function, jnp.uint32([0, 7]), numbers(2, 3), wrt=[1])


@pytest.mark.slow
def test_a_library_routine_with_such_a_loop_is_recognised() -> None:
    check(jax.scipy.special.gammainc, jnp.float32([0.5, 2.0]), jnp.float32([1.5, 1.0]))
    with pytest.raises(UnsupportedOpError, match=r"regularized_incomplete_beta.*JAX says"):
        gradient_text(lambda a: jax.scipy.special.betainc(a, a, a), numbers(2))


def test_branches_that_do_not_depend_on_the_argument() -> None:
    check(lambda x, n: lax.switch(n, [lambda y: y * 2, lambda y: jnp.ones_like(y)], x), numbers(3), jnp.int32(1))
