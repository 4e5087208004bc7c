"""Products that sum over dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir
from planetary.compiler.ir import Attribute, Type, Value


def dot_general(
    x: Value,
    y: Value,
    *,
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    contract: tuple[Sequence[int], Sequence[int]],
    element: Type | None = None,
    precision: Attribute | None = None,
    algorithm: Attribute | None = None,
    tiles: Attribute | None = None,
) -> Value:
    """Result dimensions: batch, then the free ones of `x`, then the free ones of `y`; `tiles` are IREE's."""
    x_shape, y_shape = ir.shape_of(x), ir.shape_of(y)
    shape = [x_shape[d] for d in batch[0]]
    shape += [n for d, n in enumerate(x_shape) if d not in batch[0] and d not in contract[0]]
    shape += [n for d, n in enumerate(y_shape) if d not in batch[1] and d not in contract[1]]
    attributes = {"dot_dimension_numbers": ir.dot_dimensions(batch[0], batch[1], contract[0], contract[1])}
    if precision is not None:
        attributes["precision_config"] = precision
    if algorithm is not None:
        attributes["algorithm"] = algorithm
    if tiles is not None:
        attributes["compilation_info"] = tiles
    kind = ir.tensor(shape, element if element is not None else ir.element_of(x))
    return ir.emit("stablehlo.dot_general", [x, y], [kind], attributes).results[0]


def matmul(x: Value, y: Value) -> Value:
    """`x @ y` over the last two dimensions; leading ones are batch dimensions of both."""
    rank = len(ir.shape_of(x))
    lead = list(range(rank - 2))
    return dot_general(x, y, batch=(lead, lead), contract=([rank - 1], [rank - 2]))
