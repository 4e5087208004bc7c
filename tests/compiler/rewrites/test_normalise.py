from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.rewrites import normalise
from planetary.core.artifact_label import ArtifactLabel, read_label
from planetary.core.errors import TrustError


def _lower(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).as_text()


def _rewritten(text: str, rewrite) -> str:
    with ir.new_context():
        module = ir.parse_module(text)
        rewrite(module)
        ir.verify(module)
        return ir.to_text(module)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1,)])
def test_a_lookup_becomes_a_matmul_with_the_same_rows(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((7, 4)).astype(np.float32)
    # Indices outside the table too: a gather clamps them.
    indices = rng.integers(0, 12, shape).astype(np.int32)
    before = _lower(lambda t, i: t.at[i].get(mode="clip"), table, indices)
    after = _rewritten(before, normalise.lookups_to_matmuls)
    assert "stablehlo.gather" in before
    assert "stablehlo.gather" not in after
    expected = run_reference(before, "main", [table, indices], ["f32"])[0]
    np.testing.assert_array_equal(run_reference(after, "main", [table, indices], ["f32"])[0], expected)


def test_a_lookup_by_slices_becomes_a_matmul_too() -> None:
    table, indices = np.arange(28, dtype=np.float32).reshape(7, 4), np.array([[0, 6], [3, 9]], np.int32)
    row = jax.vmap(jax.vmap(lambda i: jax.lax.dynamic_slice(table, (i, 0), (1, 4))))
    before = _lower(row, indices)
    after = _rewritten(before, normalise.lookups_to_matmuls)
    assert "start_index_map = [0, 1]" in before
    assert "stablehlo.gather" not in after
    expected = run_reference(before, "main", [indices], ["f32"])[0]
    np.testing.assert_array_equal(run_reference(after, "main", [indices], ["f32"])[0], expected)


@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 5)])
def test_a_pick_from_each_row_becomes_a_selection(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, indices = rng.standard_normal(shape).astype(np.float32), rng.integers(0, 7, shape[:-1]).astype(np.int32)
    x[..., 0] = np.inf  # what is not picked has no influence
    indices = np.maximum(indices, 1)
    before = _lower(lambda x, i: jnp.take_along_axis(x, i[..., None], -1, mode="clip"), x, indices)
    after = _rewritten(before, normalise.picks_to_selects)
    assert "operand_batching_dims" in before
    assert "stablehlo.gather" not in after
    expected = run_reference(before, "main", [x, indices], ["f32"])[0]
    np.testing.assert_array_equal(run_reference(after, "main", [x, indices], ["f32"])[0], expected)


def test_only_values_spread_across_dimensions_get_a_barrier() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for function, barriers in (
        (lambda x: x[:, :, None] - x[:, None, :], 1),
        (lambda x: jax.lax.map(lambda row: row[:, None] - row[None, :], x), 1),
        (lambda x: x[:, :, None] - 2 * x[:, :, None], 0),
        (lambda x: x - jnp.mean(x, axis=1, keepdims=True), 0),
    ):
        before = _lower(function, x)
        after = _rewritten(before, normalise.keep_apart_broadcasts)
        assert after.count("optimization_barrier") == barriers
        expected = run_reference(before, "main", [x], ["f32"])[0]
        np.testing.assert_array_equal(run_reference(after, "main", [x], ["f32"])[0], expected)


def test_other_gathers_stay() -> None:
    x, i = np.zeros((4, 5), np.float32), np.zeros((3,), np.int32)
    for function in (
        lambda x, i: x[:, i],
        lambda x, i: x[i, i],
        lambda x, i: jnp.take_along_axis(x, i[:, None] + jnp.zeros((1, 5), jnp.int32), 0),
    ):
        text = _lower(function, x, i)
        assert _rewritten(text, normalise.before_differentiation).count("gather") == text.count("gather") > 0


def test_lookup_in_a_large_table_stays() -> None:
    """One-hot rows of such a table would take as much memory as a model's logits."""
    table, i = np.zeros((normalise.ONE_HOT_ROWS + 1, 2), np.float32), np.zeros((3,), np.int32)
    for rows, gathers in ((table, 1), (table[1:], 0)):
        text = _lower(lambda t, i: t.at[i].get(mode="clip"), rows, i)
        assert _rewritten(text, normalise.before_differentiation).count('"stablehlo.gather"') == gathers


def test_negate_becomes_a_subtraction() -> None:
    x = np.array([1.5, -2.0, np.inf], np.float32)
    text = _lower(lambda x: -x, x)
    after = _rewritten(text, normalise.negate_to_subtract)
    assert "stablehlo.negate" not in after
    np.testing.assert_array_equal(run_reference(after, "main", [x], ["f32"])[0], -x)


def test_long_sums_are_split_and_others_stay() -> None:
    long, short = np.ones((300, 400), np.float32), np.ones((20, 30), np.float32)
    text = _lower(lambda a, b: (jnp.sum(a), jnp.sum(b), jnp.max(a)), long, short)
    after = _rewritten(text, normalise.split_long_reductions)
    assert text.count("stablehlo.reduce(") == 3
    assert after.count("stablehlo.reduce(") == 4
    found = run_reference(after, "main", [long, short], ["f32"] * 3)
    assert [float(x) for x in found] == [120_000.0, 600.0, 1.0]


def test_the_label_is_baked_in_and_can_be_read_back() -> None:
    label = ArtifactLabel("3.13.0", "cpu", "host", 'x86"64\\', "ab" * 32)
    text = "func.func @train_step(%p: tensor<2xf32>, %s: tensor<i32>) -> tensor<2xf32> { return %p : tensor<2xf32> }"
    after = _rewritten(text, lambda module: normalise.for_target(module, label, [0]))
    assert "iree.abi.output = 0" in after
    assert "planetary-artifact" in after
    assert read_label(b"xx" + label.encode().encode() + b"\x00yy") == label


@pytest.mark.parametrize("data", [b"", b"no label", b'planetary-artifact {"iree": 3}\x00'])
def test_bytes_without_a_label_are_not_trusted(data: bytes) -> None:
    with pytest.raises(TrustError):
        read_label(data)
