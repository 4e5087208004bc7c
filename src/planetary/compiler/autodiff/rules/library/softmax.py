"""Softmax, its logarithm, and the logarithm of a sum of exponentials, each with one rule.

All three subtract some value m, constant along the summed dimensions, before the exponential, and do not depend on it:
JAX stops the gradient there, which leaves no trace in an export. The derivative by m, zero by mathematics and noise by
arithmetic (with ties of the maximum to be shared out), is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, Rule, pattern
from planetary.compiler.ir import Operation, Value

_Found = tuple[list[Value], Rule]


@pattern("jax.nn.softmax", "stablehlo.divide")
def _softmax(op: Operation) -> _Found | None:
    exponentials = op.operands[0]
    total, places = _source(op.operands[1], any_type=True)
    summed = _sum_of(total)
    if summed is None or summed[0] != exponentials or not _is_made_by(exponentials, "stablehlo.exponential"):
        return None
    dimensions = summed[1]
    if not _are_kept(places, exponentials, dimensions):
        return None

    def rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
        ct = cts[0]
        assert ct is not None
        weighted = ops.multiply(ct, site.y)
        return [
            ops.subtract(weighted, ops.multiply(site.y, _spread(ops.reduce_sum(weighted, dimensions), dimensions, ct)))
        ]

    return [_unshifted(exponentials, dimensions)], rule


@pattern("jax.nn.log_softmax", "stablehlo.subtract")
def _log_softmax(op: Operation) -> _Found | None:
    shifted = op.operands[0]
    logarithm, places = _source(op.operands[1])
    found = _log_of_sum(logarithm, places)
    if found is None or _argument_of(found.exponentials) != shifted:
        return None
    dimensions = found.dimensions
    if not _are_kept(found.places, shifted, dimensions):
        return None

    def rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
        ct = cts[0]
        assert ct is not None
        ratio = ops.divide(ops.reduce_sum(ct, dimensions), ops.convert(found.total, ir.element_of(ct)))
        return [ops.subtract(ct, ops.multiply(_spread(ratio, dimensions, ct), found.exponentials))]

    return [_unshifted(found.exponentials, dimensions)], rule


@pattern("jax.nn.logsumexp", "stablehlo.add")
def _log_sum_exp(op: Operation) -> _Found | None:
    found = _log_of_sum(op.operands[0])
    if found is None:
        return None
    exponentials, dimensions = found.exponentials, found.dimensions
    shifted = ir.defining_op(_argument_of(exponentials))
    if shifted is None or shifted.name != "stablehlo.subtract":
        return None
    taken, taken_places = _source(shifted.operands[1])
    given, given_places = _source(op.operands[1])
    kept = [d for d in range(len(ir.shape_of(exponentials))) if d not in dimensions]
    place_of = {mine: its for mine, its in zip(found.places, kept, strict=True) if mine is not None}
    if taken != given or taken_places != [None if d is None else place_of.get(d) for d in given_places]:
        return None

    def rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
        ct = cts[0]
        assert ct is not None
        total = ops.convert(found.total, ir.element_of(ct))
        ratio = ops.divide(ops.reshape(ct, ir.shape_of(total)), total)
        return [ops.multiply(_spread(ratio, dimensions, exponentials), exponentials)]

    return [shifted.operands[0]], rule


@dataclass(frozen=True)
class _LogOfSum:
    """log(sum(exponentials)) over dimensions; `places` maps the dimensions of `total`, the sum.

    The sum may be in a wider type than the exponentials.
    """

    exponentials: Value
    total: Value
    dimensions: list[int]
    places: list[int | None]


def _log_of_sum(value: Value, places: list[int | None] | None = None) -> _LogOfSum | None:
    if not _is_made_by(value, "stablehlo.log"):
        return None
    total = _argument_of(value)
    if _is_made_by(total, "stablehlo.abs"):  # of a sum of exponentials: JAX takes it in case there are weights
        total = _argument_of(total)
    total, places = _source(total, places, any_type=True)
    summed = _sum_of(total)
    if summed is None or not _is_made_by(summed[0], "stablehlo.exponential"):
        return None
    return _LogOfSum(summed[0], total, summed[1], places)


def _sum_of(value: Value) -> tuple[Value, list[int]] | None:
    """(summand, dimensions) if a value is a sum over dimensions, of a tensor perhaps converted before, else None."""
    op = ir.defining_op(value)
    if op is None or op.name != "stablehlo.reduce" or len(op.results) != 1 or not ops.is_zero(op.operands[1]):
        return None
    body = ir.operations(ir.region_block(op, 0))
    if len(body) != 2 or body[0].name != "stablehlo.add":
        return None
    return _unconverted(op.operands[0]), ir.ints(op, "dimensions")


def _unconverted(value: Value) -> Value:
    op = ir.defining_op(value)
    if op is not None and op.name == "stablehlo.convert" and ir.is_float_element(ir.element_of(op.operands[0])):
        return op.operands[0]
    return value


def _is_made_by(value: Value, name: str) -> bool:
    op = ir.defining_op(value)
    return op is not None and op.name == name


def _argument_of(value: Value) -> Value:
    op = ir.defining_op(value)
    assert op is not None
    return op.operands[0]


def _unshifted(exponentials: Value, dimensions: list[int]) -> Value:
    """x, where the exponentials are those of x - m with an m that is constant along the dimensions."""
    argument = _argument_of(exponentials)
    op = ir.defining_op(argument)
    if op is None or op.name != "stablehlo.subtract":
        return argument
    _, places = _source(op.operands[1])
    return argument if any(d in dimensions for d in places) else op.operands[0]


def _source(
    value: Value, places: list[int | None] | None = None, any_type: bool = False
) -> tuple[Value, list[int | None]]:
    """Return the source of a broadcast value, and which dimension of the value each source dimension became.

    None stands for a dimension of length 1, which may have become any. `places` maps the value's own dimensions;
    with `any_type` it may have been converted on the way.
    """
    if places is None:
        places = [None if n == 1 else d for d, n in enumerate(ir.shape_of(value))]
    while True:
        if any_type:
            value = _unconverted(value)
        op = ir.defining_op(value)
        if op is None or op.name not in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
            return value, places
        inner = op.operands[0]
        shape = ir.shape_of(inner)
        if op.name == "stablehlo.broadcast_in_dim":
            became = ir.ints(op, "broadcast_dimensions")
            places = [None if n == 1 else places[became[d]] for d, n in enumerate(shape)]
        else:
            long = [d for d, n in enumerate(ir.shape_of(value)) if n != 1]
            if [n for n in shape if n != 1] != [ir.shape_of(value)[d] for d in long]:
                return value, places
            rest = iter(long)
            places = [None if n == 1 else places[next(rest)] for n in shape]
        value = inner


def _are_kept(places: list[int | None], like: Value, dimensions: list[int]) -> bool:
    """Whether a reduced tensor, spread to the shape of `like`, lies along the dimensions it kept."""
    shape = ir.shape_of(like)
    kept = [d for d in range(len(shape)) if d not in dimensions]
    return places == [None if shape[d] == 1 else d for d in kept]


def _spread(reduced: Value, dimensions: list[int], like: Value) -> Value:
    shape = ir.shape_of(like)
    return ops.broadcast_in_dim(reduced, shape, [d for d in range(len(shape)) if d not in dimensions])
