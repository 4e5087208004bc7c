"""Element by element: arithmetic, comparison, choice, conversion."""

from __future__ import annotations

from planetary.compiler import ir
from planetary.compiler.ir import Type, Value


def unary(name: str, x: Value) -> Value:
    """An op with the operand's type, by full name, e.g. `unary("chlo.erf", x)`."""
    return ir.emit(name, [x], [x.type]).results[0]


def binary(name: str, x: Value, y: Value) -> Value:
    return ir.emit(name, [x, y], [x.type]).results[0]


def add(x: Value, y: Value) -> Value:
    return binary("stablehlo.add", x, y)


def subtract(x: Value, y: Value) -> Value:
    return binary("stablehlo.subtract", x, y)


def multiply(x: Value, y: Value) -> Value:
    return binary("stablehlo.multiply", x, y)


def divide(x: Value, y: Value) -> Value:
    return binary("stablehlo.divide", x, y)


def maximum(x: Value, y: Value) -> Value:
    return binary("stablehlo.maximum", x, y)


def minimum(x: Value, y: Value) -> Value:
    return binary("stablehlo.minimum", x, y)


def power(x: Value, y: Value) -> Value:
    return binary("stablehlo.power", x, y)


def remainder(x: Value, y: Value) -> Value:
    return binary("stablehlo.remainder", x, y)


def and_(x: Value, y: Value) -> Value:
    return binary("stablehlo.and", x, y)


def or_(x: Value, y: Value) -> Value:
    return binary("stablehlo.or", x, y)


def not_(x: Value) -> Value:
    return unary("stablehlo.not", x)


def negate(x: Value) -> Value:
    return unary("stablehlo.negate", x)


def exponential(x: Value) -> Value:
    return unary("stablehlo.exponential", x)


def log(x: Value) -> Value:
    return unary("stablehlo.log", x)


def sqrt(x: Value) -> Value:
    return unary("stablehlo.sqrt", x)


def rsqrt(x: Value) -> Value:
    return unary("stablehlo.rsqrt", x)


def tanh(x: Value) -> Value:
    return unary("stablehlo.tanh", x)


def cosine(x: Value) -> Value:
    return unary("stablehlo.cosine", x)


def sine(x: Value) -> Value:
    return unary("stablehlo.sine", x)


def sign(x: Value) -> Value:
    return unary("stablehlo.sign", x)


def floor(x: Value) -> Value:
    return unary("stablehlo.floor", x)


def abs_(x: Value) -> Value:
    """Magnitude; of a complex tensor the result is real."""
    kind = ir.tensor(ir.shape_of(x), ir.real_element(ir.element_of(x)))
    return ir.emit("stablehlo.abs", [x], [kind]).results[0]


def square(x: Value) -> Value:
    return multiply(x, x)


def real(x: Value) -> Value:
    return ir.emit("stablehlo.real", [x]).results[0] if ir.is_complex(x) else x


def imag(x: Value) -> Value:
    return ir.emit("stablehlo.imag", [x]).results[0]


def complex_(re: Value, im: Value) -> Value:
    return ir.emit("stablehlo.complex", [re, im]).results[0]


def conj(x: Value) -> Value:
    """Complex conjugate; a real tensor is returned as it is."""
    return complex_(real(x), negate(imag(x))) if ir.is_complex(x) else x


def compare(x: Value, y: Value, direction: str, kind: str | None = None) -> Value:
    """Boolean tensor; direction is one of `EQ NE LT LE GT GE`."""
    attributes = {"comparison_direction": ir.compare_direction(direction)}
    if kind is not None:
        attributes["compare_type"] = ir.compare_kind(kind)
    return ir.emit("stablehlo.compare", [x, y], attributes=attributes).results[0]


def select(condition: Value, x: Value, y: Value) -> Value:
    """`x` where the condition (same shape or scalar) holds, else `y`."""
    return ir.emit("stablehlo.select", [condition, x, y], [x.type]).results[0]


def convert(x: Value, element: Type) -> Value:
    """Convert to another element type; nothing is emitted if it is the same."""
    if ir.element_of(x) == element:
        return x
    return ir.emit("stablehlo.convert", [x], [ir.tensor(ir.shape_of(x), element)]).results[0]
