"""Tables of rotary positions among a model's arguments, recognised by their use in the model.

An exporter that makes every tensor of a module an argument passes cos and sin like weights, and a bare `.mlir` says
nothing about roles. Trained from random numbers they are no rotation. Two arguments of one type are such a pair if the
model does nothing but multiply with them, subtracts products of the second (the sine) or negates it, and never those of
the first: x·cos − y·sin, y·cos + x·sin in any usual form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planetary.compiler import ir
from planetary.compiler.ir import Operation, Value

BASE = 10000.0  # base of the wavelengths (Su et al. 2021, arXiv:2104.09864, section 3.2.2)

_TRANSPARENT = frozenset({
    "stablehlo.broadcast_in_dim",
    "stablehlo.convert",
    "stablehlo.reshape",
    "stablehlo.slice",
    "stablehlo.transpose",
})  # fmt: skip


@dataclass(frozen=True)
class RotaryPair:
    """Two arguments of `main`.

    Attributes:
        cos: position of the argument that holds the cosines.
        sin: position of the other.
        halves: whether each row holds the angles twice, for whole heads instead of halves.
    """

    cos: int
    sin: int
    halves: bool


def find_rotary_pairs(main: Operation, length: int) -> list[RotaryPair]:
    """Return the pairs of neighbouring arguments of `main` that are rotary tables for at least `length` positions."""
    arguments = list(ir.entry_block(main).arguments)
    found: list[RotaryPair] = []
    position = 0
    while position + 1 < len(arguments):
        pair = _pair(arguments, position, length)
        found += [pair] if pair is not None else []
        position += 1 if pair is None else 2
    return found


def rotary_table(shape: Sequence[int], of: str, halves: bool) -> np.ndarray:
    """Return cos or sin of position · BASE^(−i/n) as float32: positions along the first dimension above 1, and the
    n frequencies along the last.
    """
    positions = next(size for size in shape if size > 1)
    count = shape[-1] // 2 if halves else shape[-1]
    rates = BASE ** (-np.arange(count) / count)
    angles = np.outer(np.arange(positions), np.tile(rates, 2) if halves else rates)
    return (np.cos(angles) if of == "cos" else np.sin(angles)).astype(np.float32).reshape(shape)


def _pair(arguments: Sequence[Value], position: int, length: int) -> RotaryPair | None:
    first, second = arguments[position : position + 2]
    if not ir.is_tensor(first) or first.type != second.type or not ir.is_float_element(ir.element_of(first)):
        return None
    sizes = [size for size in ir.shape_of(first) if size > 1]
    if len(sizes) != 2 or sizes[0] < length or ir.shape_of(first)[-1] != sizes[1]:
        return None
    uses = [_signs(value) for value in (first, second)]
    if None in uses:
        return None
    negative = [use is not None and -1 in use for use in uses]
    if negative == [False, True]:
        cos, sin = position, position + 1
    elif negative == [True, False]:
        cos, sin = position + 1, position
    else:
        return None
    turned = uses[sin - position]
    return RotaryPair(cos, sin, halves=turned is not None and 0 in turned and sizes[1] % 2 == 0)


def _signs(table: Value) -> set[int] | None:
    """Return how products with a table are used: 1 added, −1 subtracted or with the table negated, 0 with a factor of
    which a part is negated (−1 with it). None if anything but multiplication is done with the table.
    """
    found: set[int] = set()
    todo = [(table, 1)]
    while todo:
        value, sign = todo.pop()
        for use in value.uses:
            op: Operation = use.owner.operation
            if op.name in _TRANSPARENT:
                todo.append((op.results[0], sign))
            elif op.name == "stablehlo.negate":
                todo.append((op.results[0], -sign))
            elif op.name == "stablehlo.multiply":
                found |= _signs_of_product(op, value, sign)
            else:
                return None
    return found or None


def _signs_of_product(op: Operation, table: Value, sign: int) -> set[int]:
    factor = next((operand for operand in op.operands if operand != table), table)
    source = ir.defining_op(factor)
    while source is not None and source.name in _TRANSPARENT:
        source = ir.defining_op(source.operands[0])
    if source is not None and source.name == "stablehlo.concatenate" and any(_is_negated(v) for v in source.operands):
        return {0, -1}
    signs = {-sign if _is_subtracted(use.owner.operation, op.results[0]) else sign for use in op.results[0].uses}
    return signs


def _is_negated(value: Value) -> bool:
    op = ir.defining_op(value)
    return op is not None and op.name == "stablehlo.negate"


def _is_subtracted(op: Operation, value: Value) -> bool:
    return op.name == "stablehlo.subtract" and op.operands[1] == value
