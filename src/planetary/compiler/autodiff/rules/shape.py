"""Rules of operations that move elements: reshape, transpose, broadcast, slice, pad, concatenate, reverse."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, InPlace, ReverseSite, rule
from planetary.compiler.ir import Value


@rule("stablehlo.reshape", "stablehlo.dynamic_reshape")
def _reshape(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.reshape(ct, ir.shape_of(site.x))]


@rule("stablehlo.transpose")
def _transpose(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.transpose(ct, inverse_permutation(ir.ints(site.op, "permutation")))]


def inverse_permutation(permutation: Sequence[int]) -> list[int]:
    inverse = [0] * len(permutation)
    for position, source in enumerate(permutation):
        inverse[source] = position
    return inverse


@rule("stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
def _broadcast_in_dim(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [unbroadcast(ct, ir.shape_of(site.x), ir.ints(site.op, "broadcast_dimensions"))]


def unbroadcast(ct: Value, shape: Sequence[int], dimensions: Sequence[int]) -> Value:
    """Sum over the dimensions a broadcast of a tensor of `shape` made or stretched."""
    wide = ir.shape_of(ct)
    kept = [d for n, d in zip(shape, dimensions, strict=True) if n == wide[d]]
    total = ops.reduce_sum(ct, [d for d in range(len(wide)) if d not in kept])
    in_order = sorted(kept)
    total = ops.transpose(total, [in_order.index(d) for d in kept])
    return ops.reshape(total, shape)


@rule("stablehlo.broadcast")
def _broadcast(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.reduce_sum(ct, list(range(len(ir.ints(site.op, "broadcast_sizes")))))]


@rule("stablehlo.slice")
def _slice(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    shape, part = ir.shape_of(site.x), ir.shape_of(ct)
    if 0 in part:
        return [None]
    start, strides = ir.ints(site.op, "start_indices"), ir.ints(site.op, "strides")
    high = [n - (s + (k - 1) * t + 1) for n, s, k, t in zip(shape, start, part, strides, strict=True)]
    zero = ops.scalar(ir.element_of(ct), 0)
    return [ops.pad(ct, zero, start, high, [t - 1 for t in strides])]


@rule("stablehlo.pad")
def _pad(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x = site.x
    by_x = by_fill = None
    inner = None
    if 0 not in ir.shape_of(x):
        low, high = ir.ints(site.op, "edge_padding_low"), ir.ints(site.op, "edge_padding_high")
        interior = ir.ints(site.op, "interior_padding")
        zero = ops.scalar(ir.element_of(ct), 0)
        inner = ops.pad(ct, zero, [-n for n in low], [-n for n in high])
        if any(interior):
            inner = ops.slice_(inner, [0] * len(low), ir.shape_of(inner), [n + 1 for n in interior])
    if site.needs[0]:
        by_x = inner
    if site.needs[1]:
        by_fill = ops.reduce_sum(ct, list(range(len(ir.shape_of(ct)))))
        if inner is not None:
            inside = ops.reduce_sum(inner, list(range(len(ir.shape_of(inner)))))
            by_fill = ops.subtract(by_fill, inside)
    return [by_x, by_fill]


@rule("stablehlo.concatenate")
def _concatenate(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    dimension = ir.integer(site.op, "dimension")
    parts: list[Contribution] = []
    start = 0
    for value, needed in zip(site.inputs, site.needs, strict=True):
        limit = start + ir.shape_of(value)[dimension]
        parts.append(ops.slice_dim(ct, dimension, start, limit) if needed else None)
        start = limit
    return parts


@rule("stablehlo.reverse")
def _reverse(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ops.reverse(ct, ir.ints(site.op, "dimensions"))]


@rule("stablehlo.dynamic_slice")
def _dynamic_slice(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    starts = site.inputs[1:]
    sizes = ir.ints(site.op, "slice_sizes")

    def onto(gathered: Value) -> Value:
        # Read, add and write back only the slice: in a loop this keeps a step's cost to the slice's size.
        if ops.is_zero(gathered):
            return ops.dynamic_update_slice(gathered, ct, starts)
        here = ops.dynamic_slice(gathered, starts, sizes)
        return ops.dynamic_update_slice(gathered, ops.add(here, ct), starts)

    return [InPlace(onto)] + [None] * len(starts)


@rule("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    update, starts = site.inputs[1], site.inputs[2:]
    by_x = ops.dynamic_update_slice(ct, ops.zeros(update.type), starts) if site.needs[0] else None
    by_update = ops.dynamic_slice(ct, starts, ir.shape_of(update)) if site.needs[1] else None
    return [by_x, by_update] + [None] * len(starts)
