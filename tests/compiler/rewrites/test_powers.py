"""`power`: constants seen through converts and broadcasts, products and roots in place of it, parity at run time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from plain_iree import run_here

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import differentiate, load_for_differentiation
from planetary.compiler.check.reference import run_reference
from planetary.compiler.rewrites import normalise
from planetary.compiler.rewrites.folding import fold_uniform_constants, uniform_number
from planetary.compiler.rewrites.powers import expand_constant_powers, powers_by_parity

INF, NAN = np.inf, np.nan
BASES = np.array([-INF, -3, -2.5, -1, -0.5, -0.0, 0.0, 0.5, 1, 2, 3.5, INF, NAN, 1e20, 1e-20], np.float32)
EXPONENTS = np.array(
    [-INF, -65, -3, -2, -1.5, -1, -0.5, -0.0, 0, 0.5, 1, 1.5, 2, 3, 4, 7, 65, 66, INF, NAN], np.float32
)

# As torch-mlir exports `x.pow(n)`.
EXPORTED = """
func.func @main(%x: tensor<5xELEMENT>) -> tensor<5xELEMENT> {
  %c = stablehlo.constant dense<N> : tensor<1xKIND>
  %0 = stablehlo.convert %c : (tensor<1xKIND>) -> tensor<1xELEMENT>
  %1 = stablehlo.reshape %0 : (tensor<1xELEMENT>) -> tensor<ELEMENT>
  %2 = stablehlo.broadcast_in_dim %1, dims = [] : (tensor<ELEMENT>) -> tensor<5xELEMENT>
  %3 = stablehlo.power %x, %2 : tensor<5xELEMENT>
  return %3 : tensor<5xELEMENT>
}
"""
POINTS = np.array([-2.5, -1.0, 0.0, 0.5, 3.0], np.float32)


def exported(number: str, kind: str = "i64", element: str = "f32") -> str:
    return EXPORTED.replace("ELEMENT", element).replace("KIND", kind).replace("N>", f"{number}>")


def dynamic(shape: tuple[int, int], element: str = "f32") -> str:
    kind = f"tensor<{shape[0]}x{shape[1]}x{element}>"
    return f"""
func.func @main(%x: {kind}, %y: {kind}) -> {kind} {{
  %0 = stablehlo.power %x, %y : {kind}
  return %0 : {kind}
}}
"""


def assert_same_numbers(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=float(np.finfo(np.float32).tiny))
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(expected)[there])


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_constant_exponents_give_what_ieee_754_says(exponent: float) -> None:
    bits = f'"0x{np.float32(exponent)[None].tobytes().hex()}"'
    text = exported(bits, "f32").replace("<5x", f"<{len(BASES)}x")
    with np.errstate(all="ignore"):
        expected = np.power(BASES, np.full_like(BASES, exponent))  # of an array: numpy takes roots of its own of 0.5
    with ir.new_context():
        module = load_for_differentiation(text)
        found = ir.evaluate(module, [BASES])[0]
        kept = ir.contains(module, "stablehlo.power")
    assert_same_numbers(found, expected)
    assert kept == (not abs(exponent) <= 64 or abs(exponent) == 1.5)


@pytest.mark.parametrize(("number", "kind"), [("2", "i64"), ("2", "i32"), ("2.0", "f64"), ("2.0", "bf16")])
def test_exported_square_is_a_product_before_differentiation(number: str, kind: str) -> None:
    with ir.new_context():
        module = load_for_differentiation(exported(number, kind))
        assert not ir.contains(module, "stablehlo.power")
        assert not ir.contains(module, "stablehlo.convert")
        np.testing.assert_array_equal(ir.evaluate(module, [POINTS])[0], POINTS**2)


@pytest.mark.parametrize("exponent", [-3, -2, -1, 0, 1, 2, 3, 8])
def test_derivatives_of_integer_powers_are_exact_at_zero(exponent: int) -> None:
    text = differentiate(exported(str(exponent)))
    assert "stablehlo.power" not in text
    (found,) = run_reference(text, "main", [POINTS, np.ones(5, np.float32)], ["f32"])
    with np.errstate(divide="ignore"):
        slope = exponent * POINTS ** np.float32(exponent - 1) if exponent else np.zeros(5, np.float32)
    np.testing.assert_allclose(found, slope, rtol=1e-6)


@pytest.mark.parametrize("exponent", [1.5, 2.5, 65.0])
def test_other_powers_are_folded_after_differentiation(exponent: float) -> None:
    text = differentiate(exported(str(exponent), "f64"))
    assert text.count("stablehlo.power") == (exponent == 2.5)  # x ** 0.5 is a root, x ** 64 are products
    at = np.array([0.0, 0.5, 1.0, 1.25, 1.5], np.float32)
    (found,) = run_reference(text, "main", [at, np.ones(5, np.float32)], ["f32"])
    np.testing.assert_allclose(found, exponent * at.astype(np.float64) ** (exponent - 1), rtol=3e-5)


def test_products_of_bf16_are_rounded_once() -> None:
    with ir.new_context():
        module = load_for_differentiation(exported("7", element="bf16"))
        text = ir.to_text(module)
    assert "power" not in text
    x = np.linspace(-1.7, 1.9, 5).astype(ml_dtypes.bfloat16)
    (bits,) = run_reference(text, "main", [x.view(np.uint16)], ["bf16"])
    np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16), (x.astype(np.float32) ** 7).astype(ml_dtypes.bfloat16))


def test_dynamic_exponents_keep_the_interpreters_numbers() -> None:
    x, y = np.meshgrid(BASES, EXPONENTS)
    with np.errstate(all="ignore"):
        expected = np.power(x, y)
    with ir.new_context():
        module = ir.parse_module(dynamic(x.shape))
        assert_same_numbers(ir.evaluate(module, [x, y])[0], expected)
        powers_by_parity(module)
        assert_same_numbers(ir.evaluate(module, [x, y])[0], expected)


def test_a_positive_constant_base_is_left_alone() -> None:
    text = """
    func.func @main(%y: tensor<4xf32>) -> tensor<4xf32> {
      %c = stablehlo.constant dense<1.0e4> : tensor<4xf32>
      %0 = stablehlo.power %c, %y : tensor<4xf32>
      return %0 : tensor<4xf32>
    }
    """
    with ir.new_context():
        module = ir.parse_module(text)
        powers_by_parity(module)
        assert not ir.contains(module, "stablehlo.select")


def test_gradients_of_a_dynamic_power() -> None:
    """By base and exponent, as the formulas have it; by the base 0 where the exponent is 0, at base 0 too."""
    text = differentiate(dynamic((1, 6)), [0, 1])
    x = np.array([[-2.0, -1.5, 0.0, 0.0, 0.0, 3.0]], np.float32)
    y = np.array([[2.0, 3.0, 0.0, 1.0, 2.0, 1.5]], np.float32)
    by_x, by_y = run_reference(text, "main", [x, y, np.ones_like(x)], ["f32", "f32"])
    np.testing.assert_allclose(by_x, [[-4.0, 6.75, 0.0, 1.0, 0.0, 1.5 * 3**0.5]], rtol=1e-6)
    assert np.all(np.isnan(by_y[0, :2]))  # a negative number has no power of a nearby exponent
    np.testing.assert_allclose(by_y[0, 2:], [0.0, 0.0, 0.0, np.log(3) * 3**1.5], rtol=1e-6)


@pytest.mark.compiles
def test_power_of_run_time_exponent_needs_the_rewrite() -> None:
    x, y = np.array([[-2.0, -1.0, 0.0]], np.float32), np.full((1, 3), 2, np.float32)
    found = run_here(dynamic(x.shape), x, y)
    assert np.isnan(found).any(), "IREE has mended this: delete powers.powers_by_parity"


@pytest.mark.compiles
def test_compiled_powers_are_the_interpreters() -> None:
    x, y = np.meshgrid(BASES, EXPONENTS)
    with np.errstate(all="ignore"):
        expected = np.power(x, y)
    with ir.new_context():
        module = ir.parse_module(dynamic(x.shape))
        normalise.rewrite_for_iree(module)
        text = ir.to_text(module)
    assert_same_numbers(run_here(text, x, y), expected)


def test_folding_keeps_64_bit_arithmetic_and_what_it_cannot_know() -> None:
    text = """
    func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
      %end = stablehlo.constant dense<8> : tensor<i64>
      %one = stablehlo.constant dense<1> : tensor<i64>
      %mixed = stablehlo.constant dense<[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]> : tensor<8xf32>
      %0 = stablehlo.convert %end : (tensor<i64>) -> tensor<f64>
      %1 = stablehlo.convert %one : (tensor<i64>) -> tensor<f64>
      %2 = stablehlo.divide %0, %1 : tensor<f64>
      %3 = stablehlo.ceil %2 : tensor<f64>
      %4 = stablehlo.convert %3 : (tensor<f64>) -> tensor<i64>
      %5 = stablehlo.reshape %4 : (tensor<i64>) -> tensor<1xi64>
      %6 = stablehlo.dynamic_iota %5, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
      %7 = stablehlo.convert %6 : (tensor<8xi64>) -> tensor<8xf32>
      %8 = stablehlo.add %7, %mixed : tensor<8xf32>
      %9 = stablehlo.add %8, %x : tensor<8xf32>
      return %9 : tensor<8xf32>
    }
    """
    x = np.zeros(8, np.float32)
    with ir.new_context():
        module = ir.parse_module(text)
        fold_uniform_constants(module)
        folded = ir.to_text(module)
        found = ir.evaluate(module, [x])[0]
    assert "f64" not in folded
    assert "dynamic_iota" not in folded
    np.testing.assert_array_equal(found, np.arange(8) + np.tile([1, 2], 4))


def test_a_uniform_number_is_seen_through_shapes_only() -> None:
    with ir.new_context():
        module = ir.parse_module(exported("[2.0]", "f32"))
        block = ir.entry_block(ir.main_function(module))
        spread = ir.operations(block)[3].results[0]
        assert uniform_number(spread) is None  # a convert stands between
        fold_uniform_constants(module)
        expand_constant_powers(module)
        assert not ir.contains(module, "stablehlo.power")
