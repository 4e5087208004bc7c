"""Swapped products compute the same, and only those are swapped that gain from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.rewrites.normalise import order_products


def lowered(function: Callable[..., jax.Array], arguments: Sequence[np.ndarray]) -> str:
    return jax.jit(function).lower(*arguments).as_text()


def ordered(text: str) -> tuple[str, str]:
    with ir.new_context():
        module = ir.parse_module(text)
        before = ir.to_text(module)
        order_products(module)
        ir.verify(module)
        return before, ir.to_text(module)


def shape(*sizes: int) -> np.ndarray:
    return np.random.default_rng(len(sizes)).standard_normal(sizes, np.float32)


CASES = {
    "gradient of a wide weight": (lambda x, d: jnp.einsum("btm,btn->mn", x, d), ((2, 3, 4), (2, 3, 8)), True),
    "gradient of a tall weight": (lambda x, d: jnp.einsum("btm,btn->mn", x, d), ((2, 3, 8), (2, 3, 4)), False),
    "plain product": (lambda x, w: x @ w, ((3, 4), (4, 8)), False),
    "transposed weight": (lambda x, w: x @ w.T, ((3, 4), (8, 4)), False),
    "a token and a transposed weight": (lambda x, w: jnp.einsum("bk,nk->bn", x, w), ((1, 4), (8, 4)), True),
    "a token and a weight": (lambda x, w: x @ w, ((1, 4), (4, 8)), False),
    "a token's attention": (lambda q, k: jnp.einsum("bhd,bhtd->bht", q, k), ((2, 3, 4), (2, 3, 16, 4)), True),
    "gradient of a vector": (lambda x, d: x[:, 0] @ d, ((5, 1), (5, 8)), False),
    "attention's weights and values": (
        lambda w, v: jnp.einsum("bhts,bshd->bthd", w, v),
        ((2, 3, 16, 16), (2, 16, 3, 4)),
        True,
    ),
    "attention's scores": (lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), ((2, 16, 3, 4), (2, 16, 3, 4)), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_is_swapped_where_it_gains_and_stays_equal(name: str) -> None:
    function, shapes, swapped = CASES[name]
    arguments = [shape(*sizes) for sizes in shapes]
    before, after = ordered(lowered(function, arguments))
    assert (after != before) == swapped
    expected = run_reference(before, "main", arguments, ["f32"])[0]
    np.testing.assert_allclose(run_reference(after, "main", arguments, ["f32"])[0], expected, rtol=1e-5, atol=1e-5)


def test_a_chosen_algorithm_is_left_alone() -> None:
    text = """func.func @main(%x: tensor<6x4xf32>, %d: tensor<6x8xf32>) -> tensor<4x8xf32> {
      %0 = stablehlo.dot_general %x, %d, contracting_dims = [0] x [0], algorithm = <lhs_precision_type = f32,
        rhs_precision_type = f32, accumulation_type = f32, lhs_component_count = 1, rhs_component_count = 1,
        num_primitive_operations = 1, allow_imprecise_accumulation = false>
        : (tensor<6x4xf32>, tensor<6x8xf32>) -> tensor<4x8xf32>
      return %0 : tensor<4x8xf32>
    }"""
    before, after = ordered(text)
    assert before == after
