"""Rules of elementwise arithmetic. Where several derivatives are legal the choice is JAX's, and the note
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, inactive, rule, rule_many
from planetary.compiler.ir import Value


def factor_rule(name: str, factor: Callable[[Value, Value], Value], note: str = "") -> None:
    """Register a one-operand op by the derivative: `factor(x, f(x))`."""

    def apply(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
        return [ops.multiply(ct, factor(site.x, site.y))]

    rule(name, note=note)(apply)


# --- linear -----------------------------------------------------------------------------------------------


@rule("stablehlo.add")
def _add(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ct, ct]


@rule("stablehlo.subtract")
def _subtract(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ct, ops.negate(ct) if site.needs[1] else None]


@rule("stablehlo.negate")
def _negate(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.negate(ct)]


@rule("stablehlo.multiply")
def _multiply(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, y = site.inputs
    return [
        ops.multiply(ct, y) if site.needs[0] else None,
        ops.multiply(ct, x) if site.needs[1] else None,
    ]


@rule("stablehlo.divide")
def _divide(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, y = site.inputs
    by_x = ops.divide(ct, y) if site.needs[0] else None
    by_y = None
    if site.needs[1]:
        by_y = ops.multiply(ops.multiply(ops.negate(ct), x), ops.reciprocal(ops.square(y)))
    return [by_x, by_y]


# --- powers, exponentials, roots --------------------------------------------------------------------------

factor_rule("stablehlo.exponential", lambda x, y: y)
factor_rule("stablehlo.exponential_minus_one", lambda x, y: ops.shift(y, 1))
factor_rule("stablehlo.sqrt", lambda x, y: ops.divide(ops.full_like(x, 0.5), y))
factor_rule("stablehlo.rsqrt", lambda x, y: ops.scale(ops.divide(y, x), -0.5))
factor_rule("stablehlo.cbrt", lambda x, y: ops.scale(ops.reciprocal(ops.square(y)), 1 / 3))
factor_rule("stablehlo.logistic", lambda x, y: ops.multiply(y, ops.subtract(ops.full_like(y, 1), y)))
factor_rule("chlo.square", lambda x, y: ops.scale(x, 2))


@rule("stablehlo.log")
def _log(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.divide(ct, site.x)]


@rule("stablehlo.log_plus_one")
def _log_plus_one(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.divide(ct, ops.shift(site.x, 1))]


def _replace_zero(x: Value) -> Value:
    return ops.select(ops.compare_number(x, 0, "EQ"), ops.full_like(x, 1), x)


@rule("stablehlo.power", note="by the base: 0 where the exponent is 0; by the exponent at base 0: log is taken of 1")
def _power(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, y = site.inputs
    by_x = by_y = None
    if site.needs[0]:
        # x ** 0 is 1 everywhere: 0 * x ** -1 would be NaN at base 0 (and is, in JAX, for an exponent of floats).
        constant = ops.compare_number(y, 0, "EQ")
        slope = ops.multiply(y, ops.power(x, ops.shift(y, -1)))
        by_x = ops.multiply(ct, ops.select(constant, ops.zeros_like(y), slope))
    if site.needs[1]:
        by_y = ops.multiply(ct, ops.multiply(ops.log(_replace_zero(x)), site.y))
    return [by_x, by_y]


# --- trigonometric ----------------------------------------------------------------------------------------

factor_rule("stablehlo.sine", lambda x, y: ops.cosine(x))
factor_rule("stablehlo.cosine", lambda x, y: ops.negate(ops.sine(x)))
factor_rule("stablehlo.tan", lambda x, y: ops.shift(ops.square(y), 1))
factor_rule("chlo.tan", lambda x, y: ops.shift(ops.square(y), 1))


@rule("stablehlo.tanh")
def _tanh(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    y = site.y
    return [ops.multiply(ops.add(ct, ops.multiply(ct, y)), ops.subtract(ops.full_like(y, 1), y))]


@rule("stablehlo.atan2")
def _atan2(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, y = site.inputs
    norm = ops.add(ops.square(x), ops.square(y))
    return [
        ops.multiply(ct, ops.divide(y, norm)) if site.needs[0] else None,
        ops.multiply(ct, ops.divide(ops.negate(x), norm)) if site.needs[1] else None,
    ]


# --- choices ----------------------------------------------------------------------------------------------


@rule("stablehlo.maximum", "stablehlo.minimum", note="a tie gives half to each side, as in JAX")
def _extremum(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, y = site.inputs
    tie = ops.compare(x, y, "EQ")
    half, one, zero = (ops.full_like(ct, share) for share in (0.5, 1, 0))

    def side(mine: Value) -> Value:
        won = ops.compare(mine, site.y, "EQ")
        return ops.multiply(ct, ops.select(won, ops.select(tie, half, one), zero))

    return [side(x) if site.needs[0] else None, side(y) if site.needs[1] else None]


@rule("stablehlo.abs", note="at 0 the derivative is 1 for real numbers and 0 for complex ones, as in JAX")
def _abs(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x = site.x
    if not ir.is_complex(x):
        return [ops.select(ops.compare_number(x, 0, "GE"), ct, ops.negate(ct))]
    magnitude = _replace_zero(site.y)
    zero = ops.zeros_like(magnitude)
    direction = ops.divide(ops.conj(x), ops.complex_(magnitude, zero))
    return [ops.multiply(ops.complex_(ct, zero), direction)]


@rule("stablehlo.remainder", note="by the divisor: minus the truncated quotient")
def _remainder(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, y = site.inputs
    by_y = None
    if site.needs[1]:
        ratio = ops.divide(x, y)
        whole = ops.multiply(ops.sign(ratio), ops.floor(ops.abs_(ratio)))
        by_y = ops.multiply(ops.negate(ct), whole)
    return [ct, by_y]


def sum_to_shape_of(ct: Value, like: Value) -> Value:
    """The cotangent of a scalar operand that was used for every element."""
    if ir.shape_of(ct) == ir.shape_of(like):
        return ct
    return ops.reduce_sum(ct, list(range(len(ir.shape_of(ct)))))


@rule("stablehlo.clamp", note="at a bound the gradient is zero, as in JAX")
def _clamp(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    low, x, high = site.inputs
    shape = ir.shape_of(x)
    zero = ops.zeros_like(ct)
    wide_low = low if ir.shape_of(low) == shape else ops.broadcast_scalar(low, shape)
    wide_high = high if ir.shape_of(high) == shape else ops.broadcast_scalar(high, shape)

    def where(first: Value, second: Value) -> Value:
        return ops.select(ops.and_(first, second), ct, zero)

    by_low = by_x = by_high = None
    if site.needs[0]:
        part = where(ops.compare(wide_low, x, "GT"), ops.compare(wide_low, wide_high, "LT"))
        by_low = sum_to_shape_of(part, low)
    if site.needs[1]:
        by_x = where(ops.compare(x, wide_low, "GT"), ops.compare(x, wide_high, "LT"))
    if site.needs[2]:
        part = ops.select(ops.compare(wide_high, x, "LT"), ct, zero)
        by_high = sum_to_shape_of(part, high)
    return [by_low, by_x, by_high]


@rule("stablehlo.select")
def _select(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    condition, x, y = site.inputs
    zero = ops.zeros_like(ct)
    if x == y:
        # JAX puts such a choice before each branch of a `cond` under `vmap`. On a branch not taken the cotangent is
        # zero, but may have become 0 * inf = NaN on the way; JAX stops it here.
        others = ops.select(ops.compare(ct, ct, "EQ"), ct, zero)
        return [None, ops.select(condition, ct, others), None]
    return [
        None,
        ops.select(condition, ct, zero) if site.needs[1] else None,
        ops.select(condition, zero, ct) if site.needs[2] else None,
    ]


# --- types and complex numbers ----------------------------------------------------------------------------


@rule("stablehlo.convert")
def _convert(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [convert_cotangent(ct, ir.element_of(site.x))]


def convert_cotangent(ct: Value, element: ir.Type) -> Value:
    """The transpose of `convert`: a real operand gets the real part, a complex one a zero imaginary part."""
    if ir.is_complex(ct) and not ir.is_complex_element(element):
        return ops.convert(ops.real(ct), element)
    return ops.convert(ct, element)


@rule("stablehlo.reduce_precision", note="the cotangent is rounded the same way, as in JAX")
def _reduce_precision(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ir.clone(site.op, [ct]).results[0]]


@rule("stablehlo.real")
def _real(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    if not ir.is_complex(site.x):
        return [ct]
    return [ops.complex_(ct, ops.zeros_like(ct))]


@rule("stablehlo.imag")
def _imag(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    if not ir.is_complex(site.x):
        return [None]
    return [ops.complex_(ops.zeros_like(ct), ops.negate(ct))]


@rule("stablehlo.complex")
def _complex(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [
        ops.real(ct) if site.needs[0] else None,
        ops.negate(ops.imag(ct)) if site.needs[1] else None,
    ]


@rule("chlo.conj")
def _conj(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.conj(ct)]


@rule_many("stablehlo.optimization_barrier")
def _optimization_barrier(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    return cts


inactive(
    "piecewise constant: the derivative is zero wherever it exists",
    "stablehlo.ceil",
    "stablehlo.floor",
    "stablehlo.round_nearest_afz",
    "stablehlo.round_nearest_even",
    "stablehlo.sign",
)
inactive(
    "works on integers, booleans or bit patterns, which carry no gradient",
    "stablehlo.and",
    "stablehlo.bitcast_convert",
    "stablehlo.compare",
    "stablehlo.count_leading_zeros",
    "stablehlo.is_finite",
    "stablehlo.not",
    "stablehlo.or",
    "stablehlo.popcnt",
    "stablehlo.shift_left",
    "stablehlo.shift_right_arithmetic",
    "stablehlo.shift_right_logical",
    "stablehlo.xor",
    "chlo.is_inf",
    "chlo.is_neg_inf",
    "chlo.is_pos_inf",
    "chlo.mulhi",
)
inactive(
    "makes values from nothing",
    "chlo.constant",
    "chlo.constant_like",
    "stablehlo.constant",
    "stablehlo.create_token",
    "stablehlo.dynamic_iota",
    "stablehlo.iota",
    "stablehlo.partition_id",
    "stablehlo.replica_id",
    "stablehlo.rng_bit_generator",
    "stablehlo.get_dimension_size",
)
