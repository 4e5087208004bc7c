"""Constants, tensors filled with one number, and arithmetic with one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.compiler import ir
from planetary.compiler.ir import Type, Value
from planetary.compiler.ops.arithmetic import add, compare, complex_, divide, multiply


def full(shape: Sequence[int], element: Type, value: complex) -> Value:
    """A tensor filled with one number (rounded to the element type)."""
    if ir.is_complex_element(element):
        kind = ir.tensor(shape, ir.real_element(element))
        number = complex(value)
        return complex_(_splat(kind, number.real), _splat(kind, number.imag))
    return _splat(ir.tensor(shape, element), value.real)


def _splat(kind: Type, value: float) -> Value:
    return ir.emit("stablehlo.constant", [], [kind], {"value": ir.splat_attribute(kind, value)}).results[0]


def full_like(value: Value, number: complex) -> Value:
    return full(ir.shape_of(value), ir.element_of(value), number)


def zeros(kind: Type) -> Value:
    """Zeros of a tensor type."""
    return full(ir.shape_of_type(kind), ir.element_of_type(kind), 0)


def zeros_like(value: Value) -> Value:
    return zeros(value.type)


def is_zero(value: Value) -> bool:
    """Whether a value is a constant that repeats zero."""
    op = ir.defining_op(value)
    return op is not None and op.name == "stablehlo.constant" and ir.is_zero_splat(op)


def scalar(element: Type, value: complex) -> Value:
    return full((), element, value)


def constant(array: np.ndarray) -> Value:
    """An array as a constant (bool, integers, f32, f64, complex64, complex128)."""
    if np.iscomplexobj(array):
        return complex_(constant(np.real(array)), constant(np.imag(array)))
    data = ir.array_attribute(array)
    return ir.emit("stablehlo.constant", [], [data.type], {"value": data}).results[0]


def scale(x: Value, factor: complex) -> Value:
    """`factor * x` with a constant factor."""
    return multiply(x, full_like(x, factor))


def shift(x: Value, term: complex) -> Value:
    """`x + term` with a constant term."""
    return add(x, full_like(x, term))


def reciprocal(x: Value) -> Value:
    return divide(full_like(x, 1), x)


def compare_number(x: Value, number: complex, direction: str) -> Value:
    return compare(x, full_like(x, number), direction)
