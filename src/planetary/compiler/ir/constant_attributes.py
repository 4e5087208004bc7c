"""The numbers of constants, as attributes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir as mlir

from planetary.compiler.ir.element_types import (
    boolean,
    element_of_type,
    is_boolean_element,
    is_integer_element,
    shape_of_type,
    tensor,
)
from planetary.compiler.ir.graph import defining_op
from planetary.compiler.ir.handles import Attribute, Operation, Type, Value


def constant_value(op: Operation) -> np.ndarray | None:
    """The value of a `stablehlo.constant` of integers, booleans or f32/f64; None for any other op or type."""
    if op.operation.name != "stablehlo.constant":
        return None
    try:
        return np.asarray(op.operation.attributes["value"])
    except (TypeError, ValueError, BufferError):
        return None


def constant_number(op: Operation) -> int | float | None:
    """The number a `stablehlo.constant` of integers or floats repeats; None for any other op, type or value."""
    if op.operation.name != "stablehlo.constant":
        return None
    try:
        data = op.operation.attributes["value"]
    except TypeError:  # the bindings have no attribute for complex numbers
        return None
    if not isinstance(data, mlir.DenseElementsAttr) or not data.is_splat:
        return None
    number = data.get_splat_value()
    if isinstance(number, mlir.FloatAttr):
        return float(number.value)
    return int(number.value) if isinstance(number, mlir.IntegerAttr | mlir.BoolAttr) else None


def is_zero_splat(op: Operation) -> bool:
    """Whether a `stablehlo.constant` repeats the number zero."""
    return splat_of(op.results[0]) in _ZEROS


_ZEROS = {"0", "false", "0.000000e+00", "-0.000000e+00", "(0.000000e+00,0.000000e+00)"}


def splat_of(value: Value) -> str | None:
    """The number, as MLIR prints it, that a constant repeats, however it is spread over a shape; None for others."""
    op = defining_op(value)
    while op is not None and op.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        op = defining_op(op.operands[0])
    if op is None or op.name != "stablehlo.constant":
        return None
    try:
        data = op.attributes["value"]
    except TypeError:  # the bindings have no attribute for complex numbers
        found = re.search(r"dense<(\([^()]*\))>", op.get_asm(large_elements_limit=8))
        return None if found is None else found.group(1)
    if not isinstance(data, mlir.DenseElementsAttr) or not data.is_splat:
        return None
    return str(data).rpartition(" : ")[0].removeprefix("dense<").removesuffix(">")


def splat_attribute(kind: Type, value: float) -> Attribute:
    """A dense attribute of tensor type `kind` (integers or floats) that repeats one number."""
    element = element_of_type(kind)
    if is_integer_element(element):
        return mlir.DenseElementsAttr.get_splat(kind, mlir.IntegerAttr.get(element, int(value)))
    return mlir.DenseElementsAttr.get_splat(kind, mlir.FloatAttr.get(element, float(value)))


def array_attribute(array: np.ndarray) -> Attribute:
    """A dense attribute that holds an array of booleans, integers, f32 or f64."""
    data: Any = np.asarray(array, order="C")
    if array.dtype == np.bool_:
        kind = tensor(array.shape, boolean())
        if array.size == 0:
            return splat_attribute(kind, 0)
        return mlir.DenseElementsAttr.get([mlir.BoolAttr.get(bool(b)) for b in array.reshape(-1)], kind)
    if array.size == 0:
        like: Any = np.zeros((1,), array.dtype)
        return splat_attribute(tensor(array.shape, element_of_type(mlir.DenseElementsAttr.get(like).type)), 0)
    return mlir.DenseElementsAttr.get(data)


def elements_attribute(values: Sequence[Attribute], kind: Type) -> Attribute:
    """A dense attribute of tensor type `kind` from the elements' attributes."""
    return mlir.DenseElementsAttr.get(list(values), kind)


def raw_attribute(data: bytes, kind: Type) -> Attribute:
    """A dense attribute of tensor type `kind` from its elements' bytes (a boolean takes a whole one)."""
    element, shape = element_of_type(kind), shape_of_type(kind)
    if is_boolean_element(element):
        return array_attribute(np.frombuffer(data, np.bool_).reshape(shape))
    size = len(data) // max(1, int(np.prod(shape)))
    words: Any = np.frombuffer(data, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]).reshape(shape)
    return mlir.DenseElementsAttr.get(words, type=element, shape=list(shape))


def resource_name(value: Attribute) -> str | None:
    """The name of the resource with a constant's value; None where the constant holds the value itself."""
    try:
        printed = str(mlir.DenseResourceElementsAttr(value))
    except (ValueError, TypeError):
        return None
    found = re.match(r'dense_resource<"?([^">]*)"?>', printed)
    return found.group(1) if found else None
