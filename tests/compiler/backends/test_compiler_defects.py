"""A minimal reproducer of each defect of IREE that `planetary.compiler.rewrites.normalise` works around.

Each test asserts that the defect is still there. When one fails, IREE has mended it: delete the rewrite it names, and
the test with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from plain_iree import compile_for, run_here

from planetary.compiler import ir
from planetary.compiler.backends.pipeline import compiler_version
from planetary.compiler.rewrites import normalise
from planetary.compiler.rewrites.angles import reduce_angles
from planetary.compiler.rewrites.bounds import bound_indices
from planetary.compiler.rewrites.integers import narrow_integers
from planetary.core.errors import CompileError

pytestmark = pytest.mark.compiles

MENDED = f"IREE {compiler_version()} has mended this: delete"


def complaint_about(text: str, target: str) -> str:
    try:
        compile_for(target, text)
    except CompileError as error:
        return str(error)
    return ""


def rewritten(text: str, rewrite: Callable[[ir.Module], None]) -> str:
    with ir.new_context():
        module = ir.parse_module(text)
        rewrite(module)
        return ir.to_text(module)


NEGATED_SUM = """
func.func @main(%x: tensor<4x64xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %minus = stablehlo.negate %x : tensor<4x64xf32>
  %sum = stablehlo.reduce(%minus init: %zero) applies stablehlo.add across dimensions = [1]
      : (tensor<4x64xf32>, tensor<f32>) -> tensor<4xf32>
  return %sum : tensor<4xf32>
}
"""


@pytest.mark.parametrize("target", ["cuda:sm_80", "hip:gfx942", "hip:gfx1100", "metal"])
def test_a_negation_folded_into_a_sum_does_not_compile(target: str) -> None:
    # IREE's words for "this reduction has no neutral element": it made a subtracting one of it.
    complaint = complaint_about(NEGATED_SUM, target)
    assert "neutral element" in complaint or "identity value" in complaint, (
        f"{MENDED} normalise.negate_to_subtract once no target here fails any more; it said {complaint!r}"
    )
    assert compile_for(target, rewritten(NEGATED_SUM, normalise.negate_to_subtract))


CONDITION_TIMES_MATRIX = """
func.func @main(%matrix: tensor<128x256xf32>, %condition: tensor<128xi1>) -> tensor<256xf32> {
  %x = stablehlo.convert %condition : (tensor<128xi1>) -> tensor<128xf32>
  %y = stablehlo.dot_general %x, %matrix, contracting_dims = [0] x [0]
      : (tensor<128xf32>, tensor<128x256xf32>) -> tensor<256xf32>
  return %y : tensor<256xf32>
}
"""


def test_a_converted_condition_times_a_matrix_does_not_compile() -> None:
    complaint = complaint_about(CONDITION_TIMES_MATRIX, "cpu:host")
    assert "linalg.vecmat" in complaint, f"{MENDED} normalise.conditions_to_selects; it said {complaint!r}"
    matrix, condition = np.arange(128 * 256, dtype=np.float32).reshape(128, 256), np.arange(128) % 3 == 0
    text = rewritten(CONDITION_TIMES_MATRIX, normalise.conditions_to_selects)
    np.testing.assert_allclose(run_here(text, matrix, condition), matrix[condition].sum(0), rtol=1e-5)


LONG_SUM = """
func.func @main(%x: tensor<512x512xf32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<512x512xf32>, tensor<f32>) -> tensor<f32>
  return %sum : tensor<f32>
}
"""


def test_a_long_sum_is_inexact() -> None:
    tenths = np.full((512, 512), 0.1, np.float32)
    expected = tenths.astype(np.float64).sum()

    def error(text: str) -> float:
        return float(abs(run_here(text, tenths) - expected) / expected)

    assert error(LONG_SUM) > 1e-3, f"{MENDED} normalise.split_long_reductions"
    assert error(rewritten(LONG_SUM, normalise.split_long_reductions)) < 1e-5


SUM_OF_SMALL = """
func.func @main(%x: tensor<3xSIZExf32>) -> tensor<3xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [1]
      : (tensor<3xSIZExf32>, tensor<f32>) -> tensor<3xf32>
  return %sum : tensor<3xf32>
}
"""


@pytest.mark.parametrize("size", [49152, 50257, 50261])
def test_a_sum_loses_what_is_small_beside_it(size: int) -> None:
    """As of the probabilities over a vocabulary: beside one of 1 the others are below half a unit of the last place."""
    terms = np.full((3, size), 2e-8, np.float32)
    terms[:, 0] = 1
    exact = terms[0].astype(np.float64).sum()
    text = SUM_OF_SMALL.replace("SIZE", str(size))
    assert np.abs(run_here(text, terms) - exact).max() > 1e-4, (
        f"{MENDED} the parts of a dimension in split_long_reductions"
    )
    assert np.abs(run_here(rewritten(text, normalise.split_long_reductions), terms) - exact).max() < 5e-5


def test_the_sine_of_many_turns_is_inexact() -> None:
    text = "func.func @main(%x: tensor<256xf32>) -> tensor<256xf32> {\n  %0 = stablehlo.sine %x : tensor<256xf32>\n"
    text += "  return %0 : tensor<256xf32>\n}"
    angles = np.linspace(8000, 8192, 256, dtype=np.float32)
    exact = np.sin(angles.astype(np.float64))
    assert np.abs(run_here(text, angles) - exact).max() > 1e-4, f"{MENDED} rewrites.angles"
    assert np.abs(run_here(rewritten(text, reduce_angles), angles) - exact).max() < 5e-7


DIFFERENCES = """
func.func @main(%x: tensor<4x64xf32>, %w: tensor<64x64xf32>) -> tensor<4x64x64xf32> {
  %s = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<4x64xf32>, tensor<64x64xf32>) -> tensor<4x64xf32>
  %rows = stablehlo.broadcast_in_dim %s, dims = [0, 1] : (tensor<4x64xf32>) -> tensor<4x64x64xf32>
  %columns = stablehlo.broadcast_in_dim %s, dims = [0, 2] : (tensor<4x64xf32>) -> tensor<4x64x64xf32>
  %all = stablehlo.subtract %rows, %columns : tensor<4x64x64xf32>
  return %all : tensor<4x64x64xf32>
}
"""


def test_the_differences_of_a_products_elements_are_all_zero() -> None:
    x, w = np.ones((4, 64), np.float32), np.tile(np.arange(64, dtype=np.float32), (64, 1))
    product = x @ w
    expected = product[:, :, None] - product[:, None, :]
    found = run_here(DIFFERENCES, x, w)
    # Zeros, or what the memory held before, NaN among it.
    assert not np.allclose(found, expected), f"{MENDED} normalise.keep_apart_broadcasts"
    found = run_here(rewritten(DIFFERENCES, normalise.keep_apart_broadcasts), x, w)
    np.testing.assert_array_equal(found, expected)


ONE_HOT_PRODUCT = """
func.func @main(%wanted: tensor<8xi32>, %table: tensor<32x16xf32>) -> tensor<8x16xf32> {
  %row = stablehlo.iota dim = 1 : tensor<8x32xi32>
  %each = stablehlo.broadcast_in_dim %wanted, dims = [0] : (tensor<8xi32>) -> tensor<8x32xi32>
  %hit = stablehlo.compare EQ, %each, %row : (tensor<8x32xi32>, tensor<8x32xi32>) -> tensor<8x32xi1>
  %one_hot = stablehlo.convert %hit : (tensor<8x32xi1>) -> tensor<8x32xf32>
  %rows = stablehlo.dot_general %one_hot, %table, contracting_dims = [1] x [0]
      : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
  return %rows : tensor<8x16xf32>
}
"""
LOOKUP = """
func.func @main(%wanted: tensor<8xi32>, %table: tensor<32x16xf32>) -> tensor<8x16xf32> {
  %rows = "stablehlo.gather"(%table, %wanted) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
      collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 16>}>
      : (tensor<32x16xf32>, tensor<8xi32>) -> tensor<8x16xf32>
  return %rows : tensor<8x16xf32>
}
"""


def test_converted_boolean_changes_sign_when_optimised() -> None:
    """Why `lookups_to_matmuls` makes its one-hot matrix with a select."""
    wanted, table = np.arange(8, dtype=np.int32), np.ones((32, 16), np.float32)
    flags = ("--iree-opt-level=O2",)
    found = run_here(ONE_HOT_PRODUCT, wanted, table, flags=flags)
    assert (found == -1).all(), f"{MENDED} the select in normalise.lookups_to_matmuls, a convert will do"
    found = run_here(rewritten(LOOKUP, normalise.lookups_to_matmuls), wanted, table, flags=flags)
    assert (found == 1).all()


def test_a_gather_beyond_the_table_is_not_clamped() -> None:
    """Of index vectors in a dimension of their own. It reads the memory behind the table; a scatter writes there."""
    text = LOOKUP.replace("%wanted: tensor<8xi32>", "%wanted: tensor<8x1xi32>")
    text = text.replace("(tensor<32x16xf32>, tensor<8xi32>)", "(tensor<32x16xf32>, tensor<8x1xi32>)")
    wanted, table = np.arange(25, 33, dtype=np.int32)[:, None], np.ones((32, 16), np.float32)
    assert not (run_here(text, wanted, table) == 1).all(), f"{MENDED} bounds.bound_indices"
    assert (run_here(rewritten(text, bound_indices), wanted, table) == 1).all()


def test_rows_above_127_are_not_found_by_bytes() -> None:
    """A gather takes unsigned bytes for signed ones, and unsigned numbers of 16 bits alike."""
    text = LOOKUP.replace("32x16", "200x16").replace("%wanted: tensor<8xi32>", "%wanted: tensor<8x1xui8>")
    text = text.replace("(tensor<200x16xf32>, tensor<8xi32>)", "(tensor<200x16xf32>, tensor<8x1xui8>)")
    wanted, table = np.arange(120, 136, 2, np.uint8)[:, None], np.arange(3200, dtype=np.float32).reshape(200, 16)
    assert not np.array_equal(run_here(text, wanted, table), table[wanted[:, 0]]), f"{MENDED} the cast in bounds._clamp"
    np.testing.assert_array_equal(run_here(rewritten(text, bound_indices), wanted, table), table[wanted[:, 0]])


NARROW_SUMS = """
func.func @main(%x: tensor<512x256xf32>, %w: tensor<512x256xf32>) -> tensor<256x256xf32> {
  %0 = stablehlo.convert %x : (tensor<512x256xf32>) -> tensor<512x256xbf16>
  %1 = stablehlo.convert %w : (tensor<512x256xf32>) -> tensor<512x256xbf16>
  %2 = stablehlo.dot_general %0, %1, contracting_dims = [0] x [0]
      : (tensor<512x256xbf16>, tensor<512x256xbf16>) -> tensor<256x256xbf16>
  %3 = stablehlo.convert %2 : (tensor<256x256xbf16>) -> tensor<256x256xf32>
  return %3 : tensor<256x256xf32>
}
"""


def test_a_product_with_a_narrow_result_is_summed_in_it() -> None:
    rng = np.random.default_rng(0)
    # Whole numbers of at most 7 bits are exact in bf16.
    x, w = (rng.integers(-127, 128, (512, 256)).astype(np.float32) for _ in range(2))
    expected = x.T.astype(np.float64) @ w

    def error(text: str) -> float:
        return float(np.abs(run_here(text, x, w) - expected).max() / np.abs(expected).max())

    assert error(NARROW_SUMS) > 2**-7, f"{MENDED} normalise.contractions_to_f32"
    assert error(rewritten(NARROW_SUMS, normalise.contractions_to_f32)) <= 2**-8


SORTS_IN_A_LOOP = """
func.func @main(%x: tensor<3x16x4xf32>) -> tensor<16x4xi32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %none = stablehlo.constant dense<0> : tensor<16x4xi32>
  %rows = stablehlo.iota dim = 1 : tensor<16x4xi32>
  %r:2 = stablehlo.while(%i = %zero, %sum = %none) : tensor<i32>, tensor<16x4xi32>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %slice = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 16, 4]
        : (tensor<3x16x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x16x4xf32>
    %part = stablehlo.reshape %slice : (tensor<1x16x4xf32>) -> tensor<16x4xf32>
    %first:2 = "stablehlo.sort"(%part, %rows) <{dimension = 1 : i64, is_stable = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
      %less = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %less : tensor<i1>
    }) : (tensor<16x4xf32>, tensor<16x4xi32>) -> (tensor<16x4xf32>, tensor<16x4xi32>)
    %scale = stablehlo.convert %first#1 : (tensor<16x4xi32>) -> tensor<16x4xf32>
    %other = stablehlo.subtract %scale, %part : tensor<16x4xf32>
    %second:2 = "stablehlo.sort"(%other, %rows) <{dimension = 1 : i64, is_stable = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
      %less = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %less : tensor<i1>
    }) : (tensor<16x4xf32>, tensor<16x4xi32>) -> (tensor<16x4xf32>, tensor<16x4xi32>)
    %sums = stablehlo.add %sum, %second#1 : tensor<16x4xi32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sums : tensor<i32>, tensor<16x4xi32>
  }
  return %r#1 : tensor<16x4xi32>
}
"""


def test_sorts_in_a_loop_share_their_row_numbers() -> None:
    x = np.random.default_rng(0).normal(size=(3, 16, 4)).astype(np.float32)
    expected = np.zeros((16, 4), np.int32)
    for part in x:
        expected += np.argsort(np.argsort(part, kind="stable") - part, kind="stable").astype(np.int32)
    assert not np.array_equal(run_here(SORTS_IN_A_LOOP, x), expected), f"{MENDED} normalise.own_sorted_values"
    text = rewritten(SORTS_IN_A_LOOP, normalise.own_sorted_values)
    np.testing.assert_array_equal(run_here(text, x), expected)


SELECTED_SUM = """
func.func @main(%wanted: tensor<512xi32>, %x: tensor<512x64xf32>) -> tensor<512xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<512x64xf32>
  %position = stablehlo.iota dim = 1 : tensor<512x64xi32>
  %each = stablehlo.broadcast_in_dim %wanted, dims = [0] : (tensor<512xi32>) -> tensor<512x64xi32>
  %hit = stablehlo.compare EQ, %each, %position : (tensor<512x64xi32>, tensor<512x64xi32>) -> tensor<512x64xi1>
  %chosen = stablehlo.select %hit, %x, %zeros : tensor<512x64xi1>, tensor<512x64xf32>
  %sum = stablehlo.reduce(%chosen init: %zero) applies stablehlo.add across dimensions = [1]
      : (tensor<512x64xf32>, tensor<f32>) -> tensor<512xf32>
  return %sum : tensor<512xf32>
}
"""


def test_sum_over_positional_selection_fails_for_metal() -> None:
    complaint = complaint_about(SELECTED_SUM, "metal")
    assert "memref.alloc" in complaint, f"{MENDED} normalise.counters_from_memory; it said {complaint!r}"
    text = rewritten(SELECTED_SUM, normalise.counters_from_memory)
    assert compile_for("metal", text)
    wanted, x = np.arange(512, dtype=np.int32) % 64, np.random.default_rng(0).standard_normal((512, 64), np.float32)
    np.testing.assert_array_equal(run_here(text, wanted, x), x[np.arange(512), wanted])


CAUSAL = """
func.func @main(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %none = stablehlo.constant dense<0> : tensor<64x64xi64>
  %zeros = stablehlo.constant dense<0.0> : tensor<64x64xf32>
  %counter = stablehlo.iota dim = 0 : tensor<64xi64>
  %rows = stablehlo.broadcast_in_dim %counter, dims = [0] : (tensor<64xi64>) -> tensor<64x64xi64>
  %columns = stablehlo.broadcast_in_dim %counter, dims = [1] : (tensor<64xi64>) -> tensor<64x64xi64>
  %ahead = stablehlo.subtract %columns, %rows : tensor<64x64xi64>
  %seen = stablehlo.compare LE, %ahead, %none, SIGNED : (tensor<64x64xi64>, tensor<64x64xi64>) -> tensor<64x64xi1>
  %result = stablehlo.select %seen, %x, %zeros : tensor<64x64xi1>, tensor<64x64xf32>
  return %result : tensor<64x64xf32>
}
"""


def test_vectors_of_wide_integers_do_not_compile_for_vulkan() -> None:
    complaint = complaint_about(CAUSAL, "vulkan")
    assert "i64" in complaint, f"{MENDED} rewrites.integers; it said {complaint!r}"
    text = rewritten(CAUSAL, narrow_integers)
    assert "i64>" not in text
    assert compile_for("vulkan", text)
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    np.testing.assert_array_equal(run_here(text, x), np.tril(x))


@pytest.mark.parametrize("target", ["vulkan", "metal"])
def test_sixteen_bit_floats_on_shaders_are_refused(target: str) -> None:
    complaint = complaint_about(NARROW_SUMS, target)
    assert "computes with bf16" in complaint
    assert "export the model in float32" in complaint
