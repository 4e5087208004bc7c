"""Functions that take weights in blocks compute the same; weights with other uses keep their layout."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.rewrites.weight_blocks import AVX2, AVX512, VectorUnit, store_in_blocks
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec, WeightBlocks

Function = Callable[[jax.Array, jax.Array], jax.Array]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def rewritten(
    function: Function, weight: np.ndarray, x: np.ndarray, unit: VectorUnit | None = None
) -> tuple[str, str, tuple[WeightBlocks, ...]]:
    """Return the module before and after, and the layouts, of `main(weight, x)`."""
    with ir.new_context():
        module = ir.parse_module(jax.jit(function).lower(weight, x).as_text())
        before = ir.to_text(module)
        spec = FunctionSpec(
            (TensorSpec("w", "f32", weight.shape), TensorSpec("x", "f32", x.shape)), (TensorSpec("y", "f32", (1,)),)
        )
        layouts = store_in_blocks(module, {"main": spec}, ["w"], unit)
        ir.verify(module)
        return before, ir.to_text(module), layouts


PRODUCTS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "outputs first": (lambda w, x: jnp.einsum("...i,oi->...o", x, w), (64, 24), (2, 3, 24)),
    "inputs first": (lambda w, x: x @ w, (24, 64), (5, 24)),
    "a single row": (lambda w, x: x @ w.T, (64, 24), (1, 24)),
    "the weight is the first factor": (lambda w, x: jnp.einsum("oi,ti->ot", w, x), (64, 24), (5, 24)),
    "outputs that fill no whole block": (lambda w, x: x @ w, (24, 86), (3, 24)),
    "experts": (lambda w, x: jnp.einsum("nc,efc->nef", x, w), (4, 16, 24), (5, 24)),
    "two summed dimensions": (lambda w, x: jnp.einsum("nef,efc->nc", x, w), (4, 16, 32), (5, 4, 16)),
    "two summed dimensions in another order": (lambda w, x: jnp.einsum("nfe,efc->nc", x, w), (4, 16, 32), (5, 16, 4)),
    "a table that is also the head": (
        lambda w, x: jnp.einsum("tc,vc->tv", x + w[jnp.asarray([1, 63, 7])], w),
        (64, 24),
        (3, 24),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_blocks_is_the_product(name: str) -> None:
    function, weight_shape, x_shape = PRODUCTS[name]
    weight, x = numbers(*weight_shape), numbers(*x_shape)
    before, after, (layout,) = rewritten(function, weight, x)
    expected = run_reference(before, "main", [weight, x], ["f32"])[0]
    found = run_reference(after, "main", [layout.store(weight), x], ["f32"])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


OTHERS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "two layouts": (lambda w, x: x @ w @ w.T, (64, 64), (5, 64)),
    "a sum": (lambda w, x: x @ w + jnp.sum(w), (24, 64), (5, 24)),
    "a batch of products": (lambda w, x: jnp.einsum("ebc,ecf->ebf", x, w), (4, 24, 32), (4, 5, 24)),
    "rows of inputs": (lambda w, x: x @ w + w[0], (24, 64), (5, 24)),
    "few outputs": (lambda w, x: x @ w, (256, 4), (5, 256)),
    "no product": (lambda w, x: w[jnp.asarray([1, 2])] + x, (64, 24), (2, 24)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_weight_with_other_uses_keeps_its_layout(name: str) -> None:
    function, weight_shape, x_shape = OTHERS[name]
    before, after, layouts = rewritten(function, numbers(*weight_shape), numbers(*x_shape))
    assert not layouts
    assert after == before


def test_a_weight_that_a_function_overwrites_keeps_its_layout() -> None:
    weight, x = TensorSpec("w", "f32", (64, 64)), TensorSpec("x", "f32", (5, 64))
    text = jax.jit(lambda w, x: (w, x @ w)).lower(numbers(64, 64), numbers(5, 64)).as_text()
    with ir.new_context():
        module = ir.parse_module(text)
        spec = FunctionSpec((weight, x), (weight, TensorSpec("y", "f32", (5, 64))))
        assert not store_in_blocks(module, {"main": spec}, ["w"])


@pytest.mark.parametrize("shape", [(64, 24), (50, 24), (3, 20, 24)])
def test_a_stored_weight_is_restored(shape: tuple[int, ...]) -> None:
    weight = numbers(*shape)
    layout = WeightBlocks("w", tuple(range(len(shape) - 1)), (len(shape) - 1,))
    stored = layout.store(weight)
    assert stored.shape == layout.stored_shape(shape)
    assert stored.shape[2] == layout.width
    np.testing.assert_array_equal(layout.restore(stored, shape), weight)
    turned = WeightBlocks("w", (len(shape) - 1,), tuple(range(len(shape) - 1)))
    np.testing.assert_array_equal(turned.restore(turned.store(weight), shape), weight)


@pytest.mark.parametrize(
    ("unit", "count", "outputs", "width", "rows"),
    [
        (AVX512, 1, 64, 64, 1),
        (AVX512, 8, 64, 64, 8),
        (AVX512, 112, 64, 64, 4),
        (AVX512, 8, 86, 32, 8),  # 128 outputs would be too many
        (AVX512, 33, 64, 64, 3),
        (AVX512, 37, 64, 64, 0),  # a prime: IREE chooses
        (AVX2, 8, 64, 32, 2),
    ],
)
def test_tiles_are_whole_rows_of_a_block(unit: VectorUnit, count: int, outputs: int, width: int, rows: int) -> None:
    _, after, (layout,) = rewritten(lambda w, x: x @ w, numbers(24, outputs), numbers(count, 24), unit)
    assert layout.width == width
    assert unit.rows(count, width) == rows
    assert (f"vector_common_parallel = [1, {rows}, {width}, 0]" in after) == bool(rows)
