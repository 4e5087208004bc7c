"""Rules of gather and scatter, with batching dimensions, repeated and out-of-bounds indices.

A gather clamps a start index that would reach out of bounds; a scatter drops such an update. The backward
operations therefore clamp (after a gather) or mask (after a scatter).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule, rule_many
from planetary.compiler.autodiff.rules import bodies
from planetary.compiler.ir import Value
from planetary.compiler.rewrites.bounds import Window, clamped, gather_window, in_bounds, scatter_window
from planetary.core.errors import UnsupportedOpError


def _masked_gather(window: Window, source: Value, indices: Value, like: Value, inside: Value) -> Value:
    """Emit the values a scatter with the same numbers would have written, zero where it dropped the update."""
    kind = ir.tensor(ir.shape_of(like), ir.element_of(source))
    taken = ops.gather(source, indices, window.gather_numbers(), window.sizes, kind)
    return ops.select(inside, taken, ops.zeros(kind))


# --- gather -----------------------------------------------------------------------------------------------


@rule("stablehlo.gather")
def _gather(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, indices = site.inputs
    window = gather_window(site.op, ir.ints(site.op, "slice_sizes"))
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
    return [_add_back(site, ct, x, indices, gather_window(site.op, [int(n) for n in known])), None, None]


def _add_back(site: ReverseSite, ct: Value, x: Value, indices: Value, window: Window) -> Value:
    return ops.scatter(
        ops.zeros(x.type),
        clamped(window, x, indices),
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
    window = scatter_window(site.op, x, updates)
    inside = in_bounds(window, x, indices, updates)
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
