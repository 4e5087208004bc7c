"""Which matrices of a graph choose: a mixture's routers, found by the use of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planetary.compiler import ir
from planetary.compiler.frontend.adapted_products import called_block
from planetary.compiler.frontend.export import Model
from planetary.compiler.ir import Block

_Names = frozenset[str]
_NONE: _Names = frozenset()
_REARRANGED = frozenset(f"stablehlo.{name}" for name in ("transpose", "reshape", "convert", "slice"))
_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")


def routers(model: Model) -> set[str]:
    """Return the matrices whose products are ordered before the next product: each other's larger, or the largest k.

    Loops are not looked into: their matrices are stacks.
    """
    with ir.new_context():
        module = ir.parse_module(model.stablehlo)  # a name of its own: operations do not keep the module alive
        block = ir.entry_block(ir.main_function(module))
        matrices = [
            frozenset({one.name}) if one.role in ("param", "buffer") and len(one.shape) == 2 else _NONE
            for one in model.manifest.arguments
        ]
        found: set[str] = set()
        _follow(block, matrices, [_NONE] * len(matrices), found)
        return found


def _follow(
    block: Block, matrices: Sequence[_Names], scores: Sequence[_Names], found: set[str]
) -> tuple[list[_Names], list[_Names]]:
    """Add the routers of a block to `found`; return what its results are made of, as for its arguments.

    Args:
        block: of operations, in order.
        matrices: that each argument is, or is a part of.
        scores: matrices whose products each argument is computed from, without another product between.
        found: gets the routers.
    """
    plain = dict(zip(block.arguments, matrices, strict=True))
    multiplied = dict(zip(block.arguments, scores, strict=True))
    for op in ir.operations(block):
        wholes = [plain.get(operand, _NONE) for operand in op.operands]
        parts = [multiplied.get(operand, _NONE) for operand in op.operands]
        if op.name in ("func.return", "stablehlo.return"):
            return wholes, parts
        if (body := called_block(op)) is not None:
            made, computed = _follow(body, wholes, parts, found)
        elif op.name in _PRODUCTS:
            made, computed = [_NONE], [_NONE.union(*wholes)]
        else:
            found |= _ordered(op, parts)
            made = [_NONE.union(*wholes) if op.name in _REARRANGED else _NONE] * len(op.results)
            computed = [_NONE.union(*parts)] * len(op.results)
        plain |= zip(op.results, made, strict=True)
        multiplied |= zip(op.results, computed, strict=True)
    return [], []


def _ordered(op: Any, parts: Sequence[_Names]) -> _Names:
    """Return the matrices whose scores an operation orders; `parts`: of each operand."""
    largest = op.name == "stablehlo.reduce" and len(op.results) > 1  # argmax: a value and its place
    if largest or op.name in ("chlo.top_k", "stablehlo.sort"):
        return parts[0]
    # A number is compared with itself to see whether it is one.
    if op.name == "stablehlo.compare" and op.operands[0] != op.operands[1]:
        return parts[0] & parts[1]
    return _NONE
