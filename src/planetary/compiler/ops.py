"""Builders of single StableHLO operations, made of `ir.emit` alone.

Each emits at the current insertion point and returns the result value. Shapes are tuples of ints, element
types are MLIR types (see `ir`). Builders whose name would hide a Python builtin end in an underscore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planetary.compiler import ir
from planetary.compiler.ir import Attribute, Operation, Type, Value

# --- constants --------------------------------------------------------------------------------------------


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


# --- elementwise ------------------------------------------------------------------------------------------


def unary(name: str, x: Value) -> Value:
    """An op whose result has its operand's type, by its full name, e.g. `unary("chlo.erf", x)`."""
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


def scale(x: Value, factor: complex) -> Value:
    """`factor * x` with a constant factor."""
    return multiply(x, full_like(x, factor))


def shift(x: Value, term: complex) -> Value:
    """`x + term` with a constant term."""
    return add(x, full_like(x, term))


def reciprocal(x: Value) -> Value:
    return divide(full_like(x, 1), x)


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


def compare_number(x: Value, number: complex, direction: str) -> Value:
    return compare(x, full_like(x, number), direction)


def select(condition: Value, x: Value, y: Value) -> Value:
    """`x` where the condition (same shape or scalar) holds, else `y`."""
    return ir.emit("stablehlo.select", [condition, x, y], [x.type]).results[0]


def convert(x: Value, element: Type) -> Value:
    """Convert to another element type; nothing is emitted if it is the same."""
    if ir.element_of(x) == element:
        return x
    return ir.emit("stablehlo.convert", [x], [ir.tensor(ir.shape_of(x), element)]).results[0]


# --- shape ------------------------------------------------------------------------------------------------


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


# --- contractions and reductions --------------------------------------------------------------------------


def dot_general(
    x: Value,
    y: Value,
    *,
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    contract: tuple[Sequence[int], Sequence[int]],
    element: Type | None = None,
    precision: Attribute | None = None,
    algorithm: Attribute | None = None,
) -> Value:
    """Result dimensions: batch, then the free ones of `x`, then the free ones of `y`."""
    x_shape, y_shape = ir.shape_of(x), ir.shape_of(y)
    shape = [x_shape[d] for d in batch[0]]
    shape += [n for d, n in enumerate(x_shape) if d not in batch[0] and d not in contract[0]]
    shape += [n for d, n in enumerate(y_shape) if d not in batch[1] and d not in contract[1]]
    attributes = {"dot_dimension_numbers": ir.dot_dimensions(batch[0], batch[1], contract[0], contract[1])}
    if precision is not None:
        attributes["precision_config"] = precision
    if algorithm is not None:
        attributes["algorithm"] = algorithm
    kind = ir.tensor(shape, element if element is not None else ir.element_of(x))
    return ir.emit("stablehlo.dot_general", [x, y], [kind], attributes).results[0]


def matmul(x: Value, y: Value) -> Value:
    """`x @ y` over the last two dimensions; leading ones are batch dimensions of both."""
    rank = len(ir.shape_of(x))
    lead = list(range(rank - 2))
    return dot_general(x, y, batch=(lead, lead), contract=([rank - 1], [rank - 2]))


Body = Callable[[list[Value]], Sequence[Value]]


def reduce(xs: Sequence[Value], inits: Sequence[Value], dimensions: Sequence[int], body: Body) -> list[Value]:
    """Reduce several tensors together; `body` gets the accumulators, then the elements, all scalars."""
    kept = [n for d, n in enumerate(ir.shape_of(xs[0])) if d not in dimensions]
    results = [ir.tensor(kept, ir.element_of(x)) for x in xs]
    attributes = {"dimensions": ir.ints_attribute(dimensions)}
    op = ir.emit("stablehlo.reduce", [*xs, *inits], results, attributes, regions=1)
    scalars = [init.type for init in inits]
    ir.fill_region(op, 0, scalars + scalars, body)
    return list(op.results)


def binary_body(name: str) -> Body:
    """The reduction body of one binary op, e.g. `binary_body("stablehlo.add")`."""
    return lambda args: [binary(name, args[0], args[1])]


def reduce_sum(x: Value, dimensions: Sequence[int]) -> Value:
    """Sum over dimensions, which disappear; nothing is emitted for an empty list."""
    if not dimensions:
        return x
    return reduce([x], [scalar(ir.element_of(x), 0)], dimensions, binary_body("stablehlo.add"))[0]


def reduce_op(x: Value, init: complex, dimensions: Sequence[int], name: str) -> Value:
    return reduce([x], [scalar(ir.element_of(x), init)], dimensions, binary_body(name))[0]


def gather(
    x: Value,
    indices: Value,
    dimensions: Attribute,
    sizes: Sequence[int],
    result: Type,
    *,
    is_sorted: bool = False,
) -> Value:
    attributes = {
        "dimension_numbers": dimensions,
        "slice_sizes": ir.ints_attribute(sizes),
        "indices_are_sorted": ir.flag_attribute(is_sorted),
    }
    return ir.emit("stablehlo.gather", [x, indices], [result], attributes).results[0]


def scatter(
    x: Value,
    indices: Value,
    updates: Value,
    dimensions: Attribute,
    body: Body,
    *,
    is_sorted: bool = False,
    unique: bool = False,
) -> Value:
    """`body` gets (value in x, update), both scalars."""
    attributes = {
        "scatter_dimension_numbers": dimensions,
        "indices_are_sorted": ir.flag_attribute(is_sorted),
        "unique_indices": ir.flag_attribute(unique),
    }
    op = ir.emit("stablehlo.scatter", [x, indices, updates], [x.type], attributes, regions=1)
    kind = ir.tensor((), ir.element_of(x))
    ir.fill_region(op, 0, [kind, kind], body)
    return op.results[0]


def sort(
    xs: Sequence[Value], dimension: int, is_stable: bool, comparator: Callable[[list[Value]], Value]
) -> list[Value]:
    """`comparator` gets two scalars per operand (left, right, left, right, …) and returns a boolean."""
    attributes = {"dimension": ir.integer_attribute(dimension), "is_stable": ir.flag_attribute(is_stable)}
    op = ir.emit("stablehlo.sort", xs, [x.type for x in xs], attributes, regions=1)
    scalars = [ir.tensor((), ir.element_of(x)) for x in xs for _ in range(2)]
    ir.fill_region(op, 0, scalars, lambda args: [comparator(args)])
    return list(op.results)


# --- control flow -----------------------------------------------------------------------------------------


def while_op(inits: Sequence[Value], condition: Callable[[list[Value]], Value], body: Body) -> Operation:
    """A loop; both functions get the loop-carried values."""
    kinds = [x.type for x in inits]
    op = ir.emit("stablehlo.while", inits, kinds, regions=2)
    ir.fill_region(op, 0, kinds, lambda args: [condition(args)])
    ir.fill_region(op, 1, kinds, body)
    return op


def case_op(index: Value, results: Sequence[Type], branches: Sequence[Callable[[], Sequence[Value]]]) -> Operation:
    """A scalar boolean `index` makes an `if` (branches: true, false), an i32 a `case`."""
    name = "stablehlo.if" if ir.is_boolean_element(ir.element_of(index)) else "stablehlo.case"
    op: Operation = ir.emit(name, [index], results, regions=len(branches))
    for position, branch in enumerate(branches):
        ir.fill_region(op, position, [], lambda _, branch=branch: branch())
    return op
