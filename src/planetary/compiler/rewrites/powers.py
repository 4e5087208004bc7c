"""Powers: constant exponents become products and roots; those known only at run time get their sign by parity."""

from __future__ import annotations

from planetary.compiler import ir, ops
from planetary.compiler.ir import Module, Operation, Value
from planetary.compiler.rewrites.folding import uniform_number

MOST_FACTORS = 64
"""An integer exponent up to this becomes products: seven multiplications or fewer for most, eleven at the most."""


def expand_constant_powers(module: Module) -> None:
    """Rewrite, in place, `power` of floats with a uniform constant exponent.

    Integers from -64 to 64 become products (of the reciprocal's denominator, if negative), ±0.5 becomes `sqrt` and
    `rsqrt`. Why: compilers compute `power` as `exp(y·log(x))`, which is slow, and wrong for negative bases where
    the compiler does not see that the exponent is an integer; a product has an exact derivative, also at base 0,
    and x⁰ none. Meaning: unchanged but for rounding, and negative
    exponents may give 0 below the smallest normal number; products of f16 and bf16 are taken in f32 and rounded once.
    """
    found: list[Operation] = []
    ir.walk(module.operation, lambda op: found.append(op) if op.name == "stablehlo.power" else None)
    for op in found:
        base, exponent = op.operands
        number = uniform_number(exponent)
        if number is None or not ir.is_float_element(ir.element_of(base)):
            continue
        with ir.insert_before(op), ir.located(op):
            replaced = _expanded(base, float(number))
        if replaced is not None:
            ir.replace_uses(op.results[0], replaced)
            op.erase()


def _expanded(base: Value, exponent: float) -> Value | None:
    """Emit `base ** exponent` without `power`; None if it needs one."""
    element = ir.element_of(base)
    if abs(exponent) == 0.5:
        # By IEEE 754 the powers of -0 are those of +0, and -inf ** 0.5 is inf, where sqrt has -0 and NaN.
        root = ops.sqrt if exponent > 0 else ops.rsqrt
        at_infinity = ops.full_like(base, float("inf") if exponent > 0 else 0.0)
        lowest = ops.compare_number(base, float("-inf"), "EQ")
        return ops.select(lowest, at_infinity, root(ops.shift(base, 0.0)))
    if not abs(exponent) <= MOST_FACTORS or exponent != int(exponent):
        return None
    count = int(exponent)
    if count == 0:
        return ops.full_like(base, 1)
    if count in (1, 2):
        return base if count == 1 else ops.square(base)
    narrow = ir.width_of(element) < 32
    wide = ops.convert(base, ir.f32()) if narrow else base
    product = _product(wide, abs(count))
    if count < 0:
        product = ops.reciprocal(product)
    return ops.convert(product, element) if narrow else product


def _product(base: Value, count: int) -> Value:
    """Emit `base` multiplied `count` times, by repeated squaring: no factor is larger than the result."""
    squared, result = base, None
    while True:
        if count & 1:
            result = squared if result is None else ops.multiply(result, squared)
        count >>= 1
        if not count:
            assert result is not None
            return result
        squared = ops.square(squared)


def powers_by_parity(module: Module) -> None:
    """Compute, in place, `power` of floats from the power of the base's magnitude, with the cases of IEEE 754 apart.

    Why: IREE 3.13 lowers a power whose exponent is not a constant to `exp(y·log(x))`: NaN for every negative base,
    and for y = 0 at base 0. Meaning: unchanged: the sign follows the parity of integer exponents, x⁰ and 1^y are 1
    and x¹ is x; a finite negative base with another exponent gives NaN. f16 and bf16 are computed in f32.
    """
    found: list[Operation] = []
    ir.walk(module.operation, lambda op: found.append(op) if op.name == "stablehlo.power" else None)
    for op in found:
        base, exponent = op.operands
        number = uniform_number(base)
        if not ir.is_float_element(ir.element_of(base)) or (number is not None and 0 < number < float("inf")):
            continue  # of a positive number, the logarithm is right, and so is the power of 0
        with ir.insert_before(op), ir.located(op):
            ir.replace_uses(op.results[0], _by_parity(base, exponent))
        op.erase()


def _by_parity(base: Value, exponent: Value) -> Value:
    element = ir.element_of(base)
    if ir.width_of(element) < 32:
        wide = _by_parity(ops.convert(base, ir.f32()), ops.convert(exponent, ir.f32()))
        return ops.convert(wide, element)
    one = ops.full_like(base, 1)
    magnitude = ops.abs_(base)
    found = ops.power(magnitude, exponent)
    found = ops.select(ops.compare(magnitude, one, "EQ"), one, found)  # 1 ** inf is inf * log(1) = NaN else
    whole = ops.compare(ops.floor(exponent), exponent, "EQ")  # infinities are whole, and even
    half = ops.scale(exponent, 0.5)
    odd = ops.and_(whole, ops.compare(ops.floor(half), half, "NE"))
    found = ops.select(ops.and_(odd, _has_sign(base)), ops.negate(found), found)
    below = ops.compare_number(base, 0, "LT")
    finite = ops.compare_number(base, float("-inf"), "GT")
    imaginary = ops.and_(ops.and_(below, finite), ops.not_(whole))
    found = ops.select(imaginary, ops.full_like(base, float("nan")), found)
    found = ops.select(ops.compare(exponent, one, "EQ"), base, found)
    return ops.select(ops.compare_number(exponent, 0, "EQ"), one, found)


def _has_sign(value: Value) -> Value:
    """Emit whether the sign bit is set; it is for -0."""
    integer = ir.i64() if ir.width_of(ir.element_of(value)) == 64 else ir.i32()
    bits = ir.emit("stablehlo.bitcast_convert", [value], [ir.tensor(ir.shape_of(value), integer)]).results[0]
    return ops.compare_number(bits, 0, "LT")
