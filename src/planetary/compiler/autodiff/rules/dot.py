"""Rules of contractions."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule
from planetary.compiler.ir import Attribute, Value


@rule("stablehlo.dot_general")
def _dot_general(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    numbers = ir.dot_numbers(site.op)
    batch = (list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions))
    contract = (list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions))
    return contraction_gradients(site, ct, batch, contract)


@rule("stablehlo.dot")
def _dot(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    last = len(ir.shape_of(site.x)) - 1
    return contraction_gradients(site, ct, ([], []), ([last], [0]))


def contraction_gradients(
    site: ReverseSite, ct: Value, batch: tuple[list[int], list[int]], contract: tuple[list[int], list[int]]
) -> Sequence[Contribution]:
    """Both gradients of a contraction whose result is ordered batch, free of x, free of y."""
    x, y = site.inputs
    free_x = [d for d in range(len(ir.shape_of(x))) if d not in batch[0] and d not in contract[0]]
    free_y = [d for d in range(len(ir.shape_of(y))) if d not in batch[1] and d not in contract[1]]
    lead = list(range(len(batch[0])))
    ct_x = [len(lead) + i for i in range(len(free_x))]
    ct_y = [len(lead) + len(free_x) + i for i in range(len(free_y))]
    how = {name: ir.attribute(site.op, name) for name in ("precision_config", "algorithm")}
    by_x = by_y = None
    if site.needs[0]:
        by_x = _gradient(
            x,
            (batch[0], contract[0], free_x),
            y,
            (batch[1], contract[1], free_y),
            ct,
            (lead, ct_y, ct_x),
            how,
        )
    if site.needs[1]:
        by_y = _gradient(
            y,
            (batch[1], contract[1], free_y),
            x,
            (batch[0], contract[0], free_x),
            ct,
            (lead, ct_x, ct_y),
            how,
        )
    return [by_x, by_y]


def _gradient(  # noqa: PLR0917 - three tensors, each with its dimensions
    mine: Value,
    my_dims: tuple[list[int], list[int], list[int]],
    other: Value,
    other_dims: tuple[list[int], list[int], list[int]],
    ct: Value,
    ct_dims: tuple[list[int], list[int], list[int]],
    how: dict[str, Attribute | None],
) -> Value:
    """Contract `ct` with `other` over the other's free dimensions.

    Dimension triples: of `mine` and `other` (batch, contracting, free), of `ct` (batch, free of other,
    free of mine). Of the two operand orders the one is taken whose result is already laid out like
    `mine`.
    """
    batch, contracting, free = my_dims
    other_batch, other_contracting, other_free = other_dims
    # The contracted dimensions of `other`, in the order in which they stand in it, as dimensions of `mine`.
    from_other = [contracting[other_contracting.index(d)] for d in sorted(other_contracting)]
    ct_first = batch + free + from_other
    other_first = batch + from_other + free
    element = ir.element_of(ct)
    precision, algorithm = how["precision_config"], how["algorithm"]
    wide = ops.convert(other, element) if algorithm is None else other
    if _disorder(other_first) < _disorder(ct_first):
        layout = other_first
        pair, dims = (wide, ct), (other_batch, ct_dims[0], other_free, ct_dims[1])
    else:
        layout = ct_first
        pair, dims = (ct, wide), (ct_dims[0], other_batch, ct_dims[1], other_free)
    product = ops.dot_general(
        pair[0],
        pair[1],
        batch=(dims[0], dims[1]),
        contract=(dims[2], dims[3]),
        element=element,
        precision=precision,
        algorithm=algorithm,
    )
    placed = ops.transpose(product, [layout.index(d) for d in range(len(layout))])
    return ops.convert(placed, ir.element_of(mine))


def _disorder(layout: list[int]) -> int:
    """How far a dimension order is from the identity (0: no transpose is needed)."""
    return sum(1 for position, dimension in enumerate(layout) if position != dimension)
