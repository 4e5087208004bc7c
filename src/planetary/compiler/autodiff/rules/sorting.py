"""Rules of sort and top-k: the cotangent goes back to where each element came from."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many
from planetary.compiler.autodiff.rules import bodies
from planetary.compiler.ir import Value


@rule_many("stablehlo.sort")
def _sort(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    dimension = ir.integer(site.op, "dimension", -1)
    rank = len(ir.shape_of(site.x))
    dimension = dimension + rank if dimension < 0 else dimension
    comparator = ir.region_block(site.op, 0)
    origin = ops.iota(ir.shape_of(site.x), ir.i32(), dimension)

    def compare(scalars: list[Value]) -> Value:
        # The extra operand's two scalars come last and take no part in the order.
        return bodies.vectorized(comparator, scalars[:-2])[0]

    order = ops.sort([*site.op.operands, origin], dimension, ir.flag(site.op, "is_stable"), compare)[-1]
    wanted = [i for i, (ct, needed) in enumerate(zip(cts, site.needs, strict=False)) if ct is not None and needed]
    # Sorting the cotangents by the place of origin undoes the permutation without a scatter.
    back = ops.sort(
        [order, *(cts[i] for i in wanted)],
        dimension,
        False,
        lambda scalars: ops.compare(scalars[0], scalars[1], "LT"),
    )[1:]
    parts: list[Contribution] = [None] * len(site.inputs)
    for i, value in zip(wanted, back, strict=True):
        parts[i] = value
    return parts


@rule_many("chlo.top_k", "stablehlo.composite @chlo.top_k", "stablehlo.custom_call @mhlo.topk")
def _top_k(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    last = len(ir.shape_of(site.x)) - 1
    return [None if cts[0] is None else put_along(site.x, site.results[1], cts[0], last)]


@rule_many("stablehlo.custom_call @ApproxTopK")
def _approximate_top_k(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    dimension = ir.dictionary(site.op, "mhlo.backend_config")["reduction_dim"]
    back = None if cts[0] is None else put_along(site.x, site.results[1], cts[0], dimension)
    return [back] + [None] * (len(site.inputs) - 1)


def put_along(like: Value, indices: Value, updates: Value, dimension: int) -> Value:
    """Zeros like `like`, with `updates` added at `indices` along one dimension."""
    rank = len(ir.shape_of(like))
    others = [d for d in range(rank) if d != dimension]
    numbers = ir.scatter_dimensions([], [dimension], others, others, [dimension], rank)
    return ops.scatter(ops.zeros(like.type), indices, updates, numbers, ops.binary_body("stablehlo.add"))
