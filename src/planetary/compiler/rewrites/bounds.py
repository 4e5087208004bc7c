"""Indices of gathers and scatters, kept inside the operand.

A gather clamps a start index that would reach out of bounds; a scatter drops such an update. IREE 3.13 does neither:
its gather reads, and its scatter writes, beyond the operand (`tests/compiler/backends/test_compiler_defects.py`). So
both are written out here, before differentiation: what is derived from them is in bounds, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.ir import Operation, Value


@dataclass(frozen=True)
class Window:
    """Where the slices of a gather, or the updates of a scatter, lie in the operand.

    Attributes:
        offset: dimensions of the slices tensor that run inside a window.
        collapsed: operand dimensions of window size 1 that are left out of the slices tensor.
        operand_batch: operand dimensions that go with `indices_batch`, also left out.
        indices_batch: dimensions of the indices that go with `operand_batch`.
        index_map: operand dimension each component of an index vector moves along.
        vector_dim: dimension of the indices that holds the index vectors (may be one past the last).
        sizes: window size per operand dimension.
    """

    offset: list[int]
    collapsed: list[int]
    operand_batch: list[int]
    indices_batch: list[int]
    index_map: list[int]
    vector_dim: int
    sizes: list[int]

    def gather_numbers(self) -> ir.Attribute:
        return ir.gather_dimensions(
            self.offset,
            self.collapsed,
            self.operand_batch,
            self.indices_batch,
            self.index_map,
            self.vector_dim,
        )

    def scatter_numbers(self) -> ir.Attribute:
        return ir.scatter_dimensions(
            self.offset,
            self.collapsed,
            self.operand_batch,
            self.indices_batch,
            self.index_map,
            self.vector_dim,
        )


def gather_window(op: Operation, sizes: Sequence[int]) -> Window:
    """Return the slices of a gather; `sizes`: of one, in each dimension of the operand."""
    n = ir.gather_numbers(op)
    return Window(
        list(n.offset_dims),
        list(n.collapsed_slice_dims),
        list(n.operand_batching_dims),
        list(n.start_indices_batching_dims),
        list(n.start_index_map),
        n.index_vector_dim,
        list(sizes),
    )


def scatter_window(op: Operation, operand: Value, updates: Value) -> Window:
    """Return the updates of a scatter."""
    n = ir.scatter_numbers(op)
    offset = list(n.update_window_dims)
    left_out = {*n.inserted_window_dims, *n.input_batching_dims}
    window_shape = [ir.shape_of(updates)[d] for d in offset]
    sizes = [1 if d in left_out else window_shape.pop(0) for d in range(len(ir.shape_of(operand)))]
    return Window(
        offset,
        list(n.inserted_window_dims),
        list(n.input_batching_dims),
        list(n.scatter_indices_batching_dims),
        list(n.scattered_dims_to_operand_dims),
        n.index_vector_dim,
        sizes,
    )


def _limits(window: Window, operand: Value, indices: Value) -> Value:
    """The largest legal start index of each index component, in the shape of the indices."""
    shape = ir.shape_of(operand)
    element = ir.element_of(indices)
    largest = [shape[d] - window.sizes[d] for d in window.index_map]
    top = 2 ** (ir.width_of(element) - (0 if ir.is_unsigned(element) else 1)) - 1
    row = ops.convert(ops.constant(np.asarray([min(n, top) for n in largest], np.int64)), element)
    wide = ir.shape_of(indices)
    if window.vector_dim == len(wide):
        return ops.broadcast_scalar(ops.reshape(row, []), wide)
    return ops.broadcast_in_dim(row, wide, [window.vector_dim])


def clamped(window: Window, operand: Value, indices: Value) -> Value:
    """Return indices as a gather takes them, of windows that lie inside the operand."""
    low = ops.zeros_like(indices)
    return ops.minimum(ops.maximum(indices, low), _limits(window, operand, indices))


def in_bounds(window: Window, operand: Value, indices: Value, updates: Value) -> Value:
    """Return booleans in the shape of the updates: whether their window lies inside the operand."""
    wide = ir.shape_of(updates)
    each = _inside(window, operand, indices)
    return ops.broadcast_in_dim(each, wide, [d for d in range(len(wide)) if d not in window.offset])


def _inside(window: Window, operand: Value, indices: Value) -> Value:
    """Return a boolean an index vector."""
    above = ops.compare(indices, ops.zeros_like(indices), "GE")
    below = ops.compare(indices, _limits(window, operand, indices), "LE")
    each = ops.and_(above, below)
    shape = ir.shape_of(indices)
    if window.vector_dim < len(shape):
        true = ops.scalar(ir.boolean(), 1)
        each = ops.reduce([each], [true], [window.vector_dim], ops.binary_body("stablehlo.and"))[0]
    return each


def bound_indices(module: ir.Module) -> None:
    """Write out, in place, what becomes of indices out of bounds. Meaning: unchanged."""

    def visit(op: Operation) -> None:
        if op.operation.name == "stablehlo.gather":
            found.append((op.operation, _clamp))
        elif op.operation.name == "stablehlo.scatter":
            found.append((op.operation, _drop))

    found: list[tuple[Operation, Callable[[Operation], None]]] = []
    ir.walk(module, visit)
    for op, rewrite in found:
        with ir.insert_before(op), ir.located(op):
            rewrite(op)


def _clamp(op: Operation) -> None:
    x, indices = op.operands
    window = gather_window(op, ir.ints(op, "slice_sizes"))
    if window.index_map:  # IREE's gather takes ui8 and ui16 for signed ones
        op.operands[1] = clamped(window, x, _at_least_32_bits(indices))


def _drop(op: Operation) -> None:
    """Let updates out of bounds go to rows that are cut off again."""
    count = len(op.results)
    xs, indices, updates = op.operands[:count], op.operands[count], op.operands[count + 1 :]
    window = scatter_window(op, xs[0], updates[0])
    if not window.index_map:
        return
    shape = ir.shape_of(xs[0])
    space = [window.sizes[d] if d in window.index_map else 0 for d in range(len(shape))]
    indices = _at_least_32_bits(indices)
    outside = dataclasses.replace(window, sizes=[0] * len(shape))  # the first place behind each dimension
    inside = ops.broadcast_in_dim(
        _inside(window, xs[0], indices),
        ir.shape_of(indices),
        [d for d in range(len(ir.shape_of(indices))) if d != window.vector_dim],
    )
    places = ops.select(inside, indices, _limits(outside, xs[0], indices))
    none = [0] * len(shape)
    wide = [ops.pad(x, ops.scalar(ir.element_of(x), 0), none, space, none) for x in xs]
    again = ir.clone(op, [*wide, places, *updates])
    again.attributes["indices_are_sorted"] = ir.flag_attribute(False)
    for result, x, found in zip(op.results, wide, again.results, strict=True):
        found.set_type(x.type)
        ir.replace_uses(result, ops.slice_(found, none, shape))
    op.erase()


def _at_least_32_bits(indices: Value) -> Value:
    """A narrow type need not hold the place behind the last row."""
    return ops.convert(indices, ir.i32()) if ir.width_of(ir.element_of(indices)) < 32 else indices
