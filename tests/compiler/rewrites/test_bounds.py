"""Indices out of bounds, which a gather clamps and a scatter drops: against XLA's own, and by IREE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import GatherScatterMode
from plain_iree import compile_for
from vjp_oracle import run_stablehlo

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import value_and_gradients
from planetary.compiler.rewrites import normalise
from planetary.compiler.rewrites.bounds import bound_indices
from planetary.runtime.iree_device import open_device

X = np.arange(24, dtype=np.float32).reshape(6, 4) - 7
ROWS = np.array([5, 6, -1, 2, 9000, 2, -7, 0], np.int32)  # six rows: half of these are beyond
PLACES = np.stack([ROWS, ROWS[::-1]], 1)
NEW = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
UNCHECKED = GatherScatterMode.PROMISE_IN_BOUNDS


def windows(x: Any, rows: Any) -> Any:
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return jax.lax.gather(x, rows[:, None], numbers, (2, 4), mode=UNCHECKED)


def put_windows(x: Any, rows: Any, new: Any) -> Any:
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    new = jnp.stack([new, new + 1], 1)
    return jax.lax.scatter_add(x, rows[:, None], new, numbers, mode=GatherScatterMode.FILL_OR_DROP)


def at(x: Any, rows: Any) -> Any:
    """Rows as they are: JAX wraps negative ones otherwise."""
    return x.at[rows.astype(jnp.uint32) if rows.dtype == jnp.int32 else rows]


CASES: dict[str, Any] = {
    "gather": lambda x, i, new: windows(x, i)[:, 0],
    "gather of windows": lambda x, i, new: windows(x, i),
    "gather of elements": lambda x, i, new: x[i % 9, i[::-1]],
    "gathers in a batch": lambda x, i, new: jax.vmap(lambda row, j: row[j])(x, i[:6]),
    "add": lambda x, i, new: at(x, i).add(new, mode="drop"),
    "add windows": put_windows,
    "add elements": lambda x, i, new: at(x, i).add(new[:, 0:1], mode="drop")[:, 1:],
    "overwrite": lambda x, i, new: at(x, i).set(new, mode="drop"),
    "largest": lambda x, i, new: at(x, i).max(new, mode="drop"),
    "multiply": lambda x, i, new: at(x, i).multiply(new, mode="drop", unique_indices=True),
    "in a batch": lambda x, i, new: jax.vmap(lambda row, j, v: row.at[j].add(v, mode="drop"))(x, i[:6], new[:6, 0]),
    "two indices": lambda x, i, new: x.at[i, i[::-1]].add(new[:, 0], mode="drop"),
    "rows of eight bits": lambda x, i, new: windows(jnp.tile(x, (30, 1)), i.astype(jnp.uint8)),
    "of eight bits": lambda x, i, new: at(jnp.tile(x, (30, 1)), i.astype(jnp.uint8)).add(new, mode="drop"),
}


def bounded(text: str, *, iree: bool = False) -> str:
    with ir.new_context():
        module = ir.parse_module(text)
        bound_indices(module)
        if iree:
            normalise.rewrite_for_iree(module)
        ir.verify(module)
        return ir.to_text(module)


def lowered(case: str) -> tuple[str, list[np.ndarray]]:
    given = [X, ROWS, NEW]
    return jax.jit(CASES[case], keep_unused=True).lower(*given).as_text(), given


@pytest.mark.parametrize("case", CASES)
def test_meaning_stays(case: str) -> None:
    text, given = lowered(case)
    for found, expected in zip(run_stablehlo(bounded(text), given), run_stablehlo(text, given), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_gradient_stays(case: str) -> None:
    """A clamped row gets the gradient of its lookups, a dropped update none."""
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(256), jnp.float32)

    def loss(x: Any, i: Any, new: Any) -> Any:
        y = CASES[case](x, i, new).ravel()
        return jnp.sum(y * weights[: y.size]) if y.size <= weights.size else jnp.sum(y * y)

    given = [X, ROWS, NEW]
    text = jax.jit(loss, keep_unused=True).lower(*given).as_text()
    found = run_stablehlo(value_and_gradients(bounded(text), [0, 2]), given)
    expected = run_stablehlo(value_and_gradients(text, [0, 2]), given)
    if not case.startswith(("gather", "rows")):  # JAX takes the rows of a lookup without a check to be in bounds
        expected[1:] = jax.grad(loss, (0, 2))(*given)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.compiles
@pytest.mark.parametrize("case", ["gather", "gather of windows", "rows of eight bits", "add", "overwrite", "largest"])
def test_iree_has_the_same_values(case: str) -> None:
    import iree.runtime as iree

    text, given = lowered(case)
    device = open_device("cpu", 0, 1)
    config = iree.Config(device=device)
    program = compile_for("cpu:host", bounded(text, iree=True))
    module = iree.load_vm_module(iree.VmModule.copy_buffer(config.vm_instance, program), config)
    found = module.main(*[iree.asdevicearray(device, array) for array in given])
    np.testing.assert_array_equal(found.to_host(), run_stablehlo(text, given)[0])
