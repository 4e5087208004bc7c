"""Operations with regions: reductions, scatter, sort, loops and branches; and gather, scatter's counterpart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planetary.compiler import ir
from planetary.compiler.ir import Attribute, Operation, Type, Value
from planetary.compiler.ops.arithmetic import binary
from planetary.compiler.ops.constants import scalar

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
