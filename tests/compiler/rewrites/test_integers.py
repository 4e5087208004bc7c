"""Narrowing keeps every number, and leaves in 64 bits what might not fit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.rewrites.integers import narrow_integers


def lowered(function: Callable[..., object], *arguments: np.ndarray) -> str:
    with jax.enable_x64():
        return jax.jit(function).lower(*arguments).as_text()


def narrowed(text: str) -> str:
    with ir.new_context():
        module = ir.parse_module(text)
        narrow_integers(module)
        ir.verify(module)
        return ir.to_text(module)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int64)


X = np.array([[3, -7, 0], [2**31 - 1, -(2**31), 5]], np.int32)
SMALL = np.array([[3, -7, 0], [127, -128, 5]], np.int8)
FITTING: list[tuple[Callable[..., jax.Array], np.ndarray]] = [
    (lambda x: (wide(x) != 5).sum(), X),
    (lambda x: wide(x).sum(axis=1), SMALL),
    (lambda x: (wide(x) * 1000 - 7).T, SMALL),
    (lambda x: jax.lax.clamp(jnp.int64(0), wide(x), jnp.int64(4)).astype(jnp.float32), X),
    (lambda x: jax.lax.select(wide(x) < 0, wide(x) * 0 + 1, wide(x)), SMALL),
    (lambda x: jnp.concatenate([-wide(x), jnp.arange(3)[None]])[1:], SMALL),
    (lambda x: jnp.maximum(wide(x), 2)[::-1], X),
]
TOO_LARGE: list[tuple[Callable[..., jax.Array], np.ndarray]] = [
    (lambda x: wide(x) * 3, X),
    (lambda x: wide(x) + 1, X),
    (lambda x: -wide(x), X),
    (lambda x: wide(x).sum(), X),
    (lambda x: jax.lax.select(wide(x) < 0, jnp.full((2, 3), 2**40), wide(x)), X),
]


@pytest.mark.parametrize(("function", "x"), FITTING)
def test_what_fits_is_computed_in_32_bits(function: Callable[..., jax.Array], x: np.ndarray) -> None:
    before = lowered(function, x)
    after = narrowed(before)
    computing = [line for line in after.splitlines() if "i64>" in line and "convert" not in line and "func" not in line]
    assert "i64>" in before
    assert all("return" in line for line in computing), after
    _same(before, after, x)


@pytest.mark.parametrize(("function", "x"), TOO_LARGE)
def test_what_may_not_fit_stays(function: Callable[..., jax.Array], x: np.ndarray) -> None:
    before = lowered(function, x)
    after = narrowed(before)
    assert any("i64>" in line and "convert" not in line and "return" not in line for line in after.splitlines()[2:])
    _same(before, after, x)


def test_an_argument_of_64_bits_stays() -> None:
    x = np.array([2**40, -(2**40)], np.int64)
    before = lowered(lambda x: jnp.minimum(x, 5) + 1, x)
    _same(before, narrowed(before), x)


def _same(before: str, after: str, x: np.ndarray) -> None:
    with jax.enable_x64():
        dtype = "f32" if "-> (tensor" in before and "f32> {jax.result_info" in before else "i64"
        expected = run_reference(before, "main", [x], [dtype])[0]
        found = run_reference(after, "main", [x], [dtype])[0]
    np.testing.assert_array_equal(found, expected)
