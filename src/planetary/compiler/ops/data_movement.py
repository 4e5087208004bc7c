"""Operations that move elements without arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir
from planetary.compiler.ir import Type, Value


def broadcast_in_dim(x: Value, shape: Sequence[int], dimensions: Sequence[int]) -> Value:
    """Operand dimension `i` becomes result dimension `dimensions[i]`; nothing is emitted for an identity."""
    if ir.shape_of(x) == tuple(shape) and list(dimensions) == list(range(len(shape))):
        return x
    kind = ir.tensor(shape, ir.element_of(x))
    attributes = {"broadcast_dimensions": ir.ints_attribute(dimensions)}
    return ir.emit("stablehlo.broadcast_in_dim", [x], [kind], attributes).results[0]


def broadcast_scalar(x: Value, shape: Sequence[int]) -> Value:
    return broadcast_in_dim(x, shape, [])


def reshape(x: Value, shape: Sequence[int]) -> Value:
    if ir.shape_of(x) == tuple(shape):
        return x
    return ir.emit("stablehlo.reshape", [x], [ir.tensor(shape, ir.element_of(x))]).results[0]


def transpose(x: Value, permutation: Sequence[int]) -> Value:
    """Result dimension `i` is operand dimension `permutation[i]`; nothing is emitted for an identity."""
    if list(permutation) == list(range(len(permutation))):
        return x
    return ir.emit("stablehlo.transpose", [x], attributes={"permutation": ir.ints_attribute(permutation)}).results[0]


def slice_(x: Value, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] | None = None) -> Value:
    strides = strides if strides is not None else [1] * len(start)
    attributes = {
        "start_indices": ir.ints_attribute(start),
        "limit_indices": ir.ints_attribute(limit),
        "strides": ir.ints_attribute(strides),
    }
    return ir.emit("stablehlo.slice", [x], attributes=attributes).results[0]


def slice_dim(x: Value, dimension: int, start: int, limit: int, stride: int = 1) -> Value:
    """Slice one dimension, keep the others whole."""
    shape = ir.shape_of(x)
    starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
    starts[dimension], limits[dimension], strides[dimension] = start, limit, stride
    return slice_(x, starts, limits, strides)


def pad(
    x: Value, value: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None
) -> Value:
    """Pad (or crop, with negative numbers) with the scalar `value`."""
    interior = interior if interior is not None else [0] * len(low)
    if not any(low) and not any(high) and not any(interior):
        return x
    attributes = {
        "edge_padding_low": ir.ints_attribute(low),
        "edge_padding_high": ir.ints_attribute(high),
        "interior_padding": ir.ints_attribute(interior),
    }
    return ir.emit("stablehlo.pad", [x, value], attributes=attributes).results[0]


def concatenate(parts: Sequence[Value], dimension: int) -> Value:
    attributes = {"dimension": ir.integer_attribute(dimension)}
    return ir.emit("stablehlo.concatenate", parts, attributes=attributes).results[0]


def reverse(x: Value, dimensions: Sequence[int]) -> Value:
    if not dimensions:
        return x
    return ir.emit("stablehlo.reverse", [x], attributes={"dimensions": ir.ints_attribute(dimensions)}).results[0]


def iota(shape: Sequence[int], element: Type, dimension: int) -> Value:
    attributes = {"iota_dimension": ir.integer_attribute(dimension)}
    return ir.emit("stablehlo.iota", [], [ir.tensor(shape, element)], attributes).results[0]


def dynamic_slice(x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
    attributes = {"slice_sizes": ir.ints_attribute(sizes)}
    return ir.emit("stablehlo.dynamic_slice", [x, *starts], attributes=attributes).results[0]


def dynamic_update_slice(x: Value, update: Value, starts: Sequence[Value]) -> Value:
    return ir.emit("stablehlo.dynamic_update_slice", [x, update, *starts], [x.type]).results[0]
