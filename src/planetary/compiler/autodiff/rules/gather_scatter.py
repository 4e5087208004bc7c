"""Rules of gather and scatter, with batching dimensions, repeated and out-of-bounds indices.

A gather clamps a start index that would reach out of bounds; a scatter drops such an update. The backward
operations therefore clamp (after a gather) or mask (after a scatter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule, rule_many
from planetary.compiler.autodiff.rules import bodies
from planetary.compiler.ir import Operation, Value
from planetary.core.errors import UnsupportedOpError


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


def _gather_window(op: Operation, sizes: Sequence[int]) -> Window:
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


def _scatter_window(op: Operation, operand: Value, updates: Value) -> Window:
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


def _clamped(window: Window, operand: Value, indices: Value) -> Value:
    low = ops.zeros_like(indices)
    return ops.minimum(ops.maximum(indices, low), _limits(window, operand, indices))


def _in_bounds(window: Window, operand: Value, indices: Value, updates: Value) -> Value:
    """Booleans in the shape of the updates: whether their window lies inside the operand."""
    above = ops.compare(indices, ops.zeros_like(indices), "GE")
    below = ops.compare(indices, _limits(window, operand, indices), "LE")
    each = ops.and_(above, below)
    shape = ir.shape_of(indices)
    if window.vector_dim < len(shape):
        each = ops.reduce([each], [ops.scalar(ir.boolean(), 1)], [window.vector_dim], ops.binary_body("stablehlo.and"))[
            0
        ]
    wide = ir.shape_of(updates)
    return ops.broadcast_in_dim(each, wide, [d for d in range(len(wide)) if d not in window.offset])


def _masked_gather(window: Window, source: Value, indices: Value, like: Value, inside: Value) -> Value:
    """Emit the values a scatter with the same numbers would have written, zero where it dropped the update."""
    kind = ir.tensor(ir.shape_of(like), ir.element_of(source))
    taken = ops.gather(source, indices, window.gather_numbers(), window.sizes, kind)
    return ops.select(inside, taken, ops.zeros(kind))


# --- gather -----------------------------------------------------------------------------------------------


@rule("stablehlo.gather")
def _gather(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, indices = site.inputs
    window = _gather_window(site.op, ir.ints(site.op, "slice_sizes"))
    return [_add_back(site, ct, x, indices, window), None]


@rule("stablehlo.dynamic_gather", note="the slice sizes must be a constant")
def _dynamic_gather(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, indices, sizes = site.inputs
    source = ir.defining_op(sizes)
    known = None if source is None else ir.constant_value(source)
    if known is None:
        raise UnsupportedOpError(
            site.name, ir.location_text(site.op), "its slice sizes are computed; make them a constant"
        )
    return [_add_back(site, ct, x, indices, _gather_window(site.op, [int(n) for n in known])), None, None]


def _add_back(site: ReverseSite, ct: Value, x: Value, indices: Value, window: Window) -> Value:
    return ops.scatter(
        ops.zeros(x.type),
        _clamped(window, x, indices),
        ct,
        window.scatter_numbers(),
        ops.binary_body("stablehlo.add"),
        is_sorted=ir.flag(site.op, "indices_are_sorted"),
    )


@rule("stablehlo.torch_index_select")
def _torch_index_select(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, indices = site.inputs
    dimension, batch = ir.integer(site.op, "dim"), ir.integer(site.op, "batch_dims")
    rank, index_rank = len(ir.shape_of(x)), len(ir.shape_of(indices))
    lead = list(range(batch))
    offset = list(range(batch, rank + index_rank - batch - 1))
    inner = range(dimension, dimension + index_rank - batch)
    sizes = [1 if d in (*lead, dimension) else n for d, n in enumerate(ir.shape_of(x))]
    window = Window([d for d in offset if d not in inner], [dimension], lead, lead, [dimension], index_rank, sizes)
    return [_add_back(site, ct, x, indices, window), None]


# --- scatter ----------------------------------------------------------------------------------------------


@rule_many(
    "stablehlo.scatter",
    note="bodies: add, subtract, multiply (unique indices), min, max (ties share, as in JAX), overwrite",
)
def _scatter(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    count = len(site.results)
    ct = cts[0]
    body = ir.region_block(site.op, 0)
    kind = _scatter_kind(body) if count == 1 and ct is not None else None
    if kind is None or ct is None:
        raise UnsupportedOpError(
            site.name,
            ir.location_text(site.op),
            "only scatters of one operand that add, subtract, multiply, take the minimum or maximum, or"
            " overwrite have a rule; rewrite the update function with one of them",
        )
    x, indices, updates = site.inputs
    window = _scatter_window(site.op, x, updates)
    inside = _in_bounds(window, x, indices, updates)
    by_x, by_updates = _SCATTER_RULES[kind](site, ct, window, inside)
    return [by_x if site.needs[0] else None, None, by_updates if site.needs[2] else None]


def _scatter_kind(body: ir.Block) -> str | None:
    if bodies.returned_argument(body) == 1:
        return "overwrite"
    if bodies.returned_argument(body) == 0:
        return "keep"
    name = bodies.single_operation(body)
    if name == "stablehlo.subtract" and ir.operations(body)[0].operands[0] != body.arguments[0]:
        return None
    return name if name in _SCATTER_RULES else None


_Pair = tuple[Value | None, Value | None]


def _scatter_keep(site: ReverseSite, ct: Value, window: Window, inside: Value) -> _Pair:
    return ct, None


def _scatter_add(site: ReverseSite, ct: Value, window: Window, inside: Value) -> _Pair:
    if not site.needs[2]:
        return ct, None
    return ct, _masked_gather(window, ct, site.inputs[1], site.inputs[2], inside)


def _scatter_subtract(site: ReverseSite, ct: Value, window: Window, inside: Value) -> _Pair:
    _, taken = _scatter_add(site, ct, window, inside)
    return ct, None if taken is None else ops.negate(taken)


def _again(site: ReverseSite, x: Value, updates: Value) -> Value:
    """The same scatter of other values."""
    return ir.clone(site.op, [x, site.inputs[1], updates]).results[0]


def _scatter_multiply(site: ReverseSite, ct: Value, window: Window, inside: Value) -> _Pair:
    x, indices, updates = site.inputs
    if site.needs[2] and not ir.flag(site.op, "unique_indices"):
        raise UnsupportedOpError(
            site.name,
            ir.location_text(site.op),
            "a multiplying scatter with possibly repeated indices has no gradient by its updates (nor in"
            " JAX); pass unique_indices=True",
        )
    by_x = _again(site, ct, updates) if site.needs[0] else None
    by_updates = None
    if site.needs[2]:
        by_updates = _masked_gather(window, ops.multiply(ct, x), indices, updates, inside)
    return by_x, by_updates


def _scatter_overwrite(site: ReverseSite, ct: Value, window: Window, inside: Value) -> _Pair:
    x, indices, updates = site.inputs
    taken = _masked_gather(window, ct, indices, updates, inside)
    if ir.flag(site.op, "unique_indices"):
        return _again(site, ct, ops.zeros(updates.type)), taken
    # Several updates may write one element and only one of them stays: number them, scatter the numbers
    # in the same way, and let the gradient go to the number that stayed.
    width = ir.i32()
    shape = ir.shape_of(updates)
    singles = [1 if d in window.offset else n for d, n in enumerate(shape)]
    numbers = ops.shift(ops.iota([int(np.prod(singles, dtype=np.int64))], width, 0), 1)
    numbers = ops.broadcast_in_dim(ops.reshape(numbers, singles), shape, list(range(len(shape))))
    stayed = ops.scatter(
        ops.full(ir.shape_of(x), width, 0),
        indices,
        numbers,
        window.scatter_numbers(),
        lambda args: [args[1]],
        is_sorted=ir.flag(site.op, "indices_are_sorted"),
    )
    untouched = ops.compare_number(stayed, 0, "EQ")
    by_x = ops.select(untouched, ct, ops.zeros_like(ct))
    won = ops.compare(_masked_gather(window, stayed, indices, updates, inside), numbers, "EQ")
    return by_x, ops.select(won, taken, ops.zeros(updates.type))


def _scatter_extremum(site: ReverseSite, ct: Value, window: Window, inside: Value) -> _Pair:
    """Every contender (the old value and each update) that equals the result gets an equal share."""
    x, indices, updates = site.inputs
    element = ir.element_of(x)
    final = _masked_gather(window, site.y, indices, updates, inside)
    hits = ops.select(
        ops.and_(ops.compare(updates, final, "EQ"), inside),
        ops.full_like(updates, 1),
        ops.zeros_like(updates),
    )
    kept = ops.convert(ops.compare(x, site.y, "EQ"), element)
    votes = ops.scatter(kept, indices, hits, window.scatter_numbers(), ops.binary_body("stablehlo.add"))
    share = ops.divide(ct, votes)
    by_x = ops.multiply(share, kept)
    by_updates = ops.multiply(_masked_gather(window, share, indices, updates, inside), hits)
    return by_x, by_updates


_SCATTER_RULES = {
    "keep": _scatter_keep,
    "overwrite": _scatter_overwrite,
    "stablehlo.add": _scatter_add,
    "stablehlo.subtract": _scatter_subtract,
    "stablehlo.multiply": _scatter_multiply,
    "stablehlo.maximum": _scatter_extremum,
    "stablehlo.minimum": _scatter_extremum,
}
