"""Rules of `reduce`: sums, extrema, and any associative body through a balanced tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.reverse import pull_back_through
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many
from planetary.compiler.autodiff.rules import bodies
from planetary.compiler.ir import Block, Value


@rule_many(
    "stablehlo.reduce",
    note="max and min share the cotangent equally among ties, as JAX does; other bodies must be associative",
)
def _reduce(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    count = len(site.results)
    body = ir.region_block(site.op, 0)
    dimensions = ir.ints(site.op, "dimensions")
    kind = bodies.single_operation(body) if count == 1 else None
    ct = cts[0]
    if kind == "stablehlo.add" and ct is not None:
        by_x = spread(ct, site.x, dimensions) if site.needs[0] else None
        by_init = ops.reduce_sum(ct, list(range(len(ir.shape_of(ct))))) if site.needs[1] else None
        return [by_x, by_init]
    extremum = bodies.is_extremum(body) if count == 1 else None
    if extremum is not None and ct is not None and not site.needs[1]:
        return [_by_ties(site, ct, dimensions, extremum), None]
    return _by_tree(site, cts, body, dimensions, kind)


def spread(ct: Value, x: Value, dimensions: Sequence[int]) -> Value:
    """Repeat a reduced value along the reduced dimensions of `x`."""
    kept = [d for d in range(len(ir.shape_of(x))) if d not in dimensions]
    return ops.broadcast_in_dim(ct, ir.shape_of(x), kept)


def _by_ties(site: ReverseSite, ct: Value, dimensions: list[int], extremum: str) -> Value:
    x, init = site.x, site.inputs[1]
    chosen = ops.compare(x, spread(site.y, x, dimensions), "EQ")
    ones = ops.convert(chosen, ir.element_of(x))
    count = ops.reduce_sum(ones, dimensions)
    if not _is_neutral(init, extremum):  # it may be the result, which then depends on no element
        nothing = ops.zeros_like(count)
        none_chosen = ops.compare(count, nothing, "EQ")
        by_init = ops.compare(site.y, ops.broadcast_scalar(init, ir.shape_of(count)), "EQ")
        count = ops.select(ops.and_(none_chosen, by_init), ops.full_like(count, 1.0), count)
    return ops.multiply(spread(ops.divide(ct, count), x, dimensions), ones)


def _is_neutral(init: Value, extremum: str) -> bool:
    """Whether an initial value is a constant that never wins: infinite, in its real part if it is complex."""
    real = (ir.splat_of(init) or "").removeprefix("(").partition(",")[0]
    return real in _INFINITIES[extremum]


_INFINITIES = {  # as MLIR prints them: f32, f64, f16, bf16
    "maximum": ("0xFF800000", "0xFFF0000000000000", "0xFC00", "0xFF80"),
    "minimum": ("0x7F800000", "0x7FF0000000000000", "0x7C00", "0x7F80"),
}


def _by_tree(
    site: ReverseSite, cts: list[Value | None], body: Block, dimensions: list[int], kind: str | None
) -> Sequence[Contribution]:
    """Differentiate an equal computation: halve the reduced elements until one is left."""
    count = len(site.results)
    xs, inits = site.inputs[:count], site.inputs[count : 2 * count]

    def build() -> list[Value]:
        flat = [_reduced_first(x, dimensions) for x in xs]
        # Without elements the initial value is the result, neutral or not.
        skip = kind == "stablehlo.multiply" and 0 not in ir.shape_of(flat[0])[:1] and _is_one(inits[0])
        return tree(body, flat, None if skip else inits)

    return pull_back_through(site, cts, build)


def _is_one(init: Value) -> bool:
    op = ir.defining_op(init)
    value = None if op is None else ir.constant_value(op)
    return value is not None and value.size == 1 and value.reshape(()) == 1


def _reduced_first(x: Value, dimensions: list[int]) -> Value:
    shape = ir.shape_of(x)
    kept = [d for d in range(len(shape)) if d not in dimensions]
    front = ops.transpose(x, [*dimensions, *kept])
    return ops.reshape(front, [math.prod(shape[d] for d in dimensions), *(shape[d] for d in kept)])


def tree(body: Block, xs: list[Value], inits: Sequence[Value] | None) -> list[Value]:
    """Reduce the first dimension of several tensors together with an associative scalar body, in their order: the body
    may choose the first of equals.

    Args:
        body: takes the accumulators, then the elements.
        xs: tensors `[n, ...]` of one shape.
        inits: scalar initial values, combined in last; None if they are neutral (then n must not be 0).
    """
    rest = list(ir.shape_of(xs[0])[1:])
    length = ir.shape_of(xs[0])[0]
    if length == 0:
        assert inits is not None
        return [ops.broadcast_scalar(init, rest) for init in inits]
    while length > 1:
        half = length // 2
        first = [ops.slice_dim(x, 0, 0, 2 * half, 2) for x in xs]
        second = [ops.slice_dim(x, 0, 1, 2 * half, 2) for x in xs]
        merged = bodies.vectorized(body, [*first, *second])
        if length % 2:
            last = [ops.slice_dim(x, 0, length - 1, length) for x in xs]
            merged = [ops.concatenate([m, x], 0) for m, x in zip(merged, last, strict=True)]
        xs, length = merged, half + length % 2
    results = [ops.reshape(x, rest) for x in xs]
    if inits is None:
        return results
    return bodies.vectorized(body, [*(ops.broadcast_scalar(init, rest) for init in inits), *results])
