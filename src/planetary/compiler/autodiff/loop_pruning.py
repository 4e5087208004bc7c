"""Loops without the values that nothing reads: what differentiation saves and replaces leaves some behind."""

from __future__ import annotations

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import reverse
from planetary.compiler.ir import Block, Operation, Value


def prune_loops(block: Block) -> None:
    """Rebuild every `while` in a block, and in the operations' regions, without needless carried values.

    A carried value is needed if the result is used, if the condition reads it, or if the next value of a needed one is
    computed from it. Pending users must be in place: call it when the block is complete.
    """
    for op in reversed(ir.operations(block)):
        kept = _pruned(op) if op.name == "stablehlo.while" else op
        for index in range(len(kept.regions)):
            if kept.name in ("stablehlo.while", "stablehlo.if", "stablehlo.case"):
                inner = ir.region_block(kept, index)
                ir.erase_dead(inner)
                prune_loops(inner)


def _pruned(op: Operation) -> Operation:
    condition, body = ir.region_block(op, 0), ir.region_block(op, 1)
    ends = list(ir.terminator(body).operands)
    needed = {k for k, result in enumerate(op.results) if ir.has_uses(result)}
    needed |= _read(condition, list(ir.terminator(condition).operands))
    while True:
        more = _read(body, [ends[k] for k in sorted(needed)]) - needed
        if not more:
            break
        needed |= more
    order = sorted(needed)
    if len(order) == len(ends):
        return op

    def filled(args: list[Value]) -> list[Value]:
        # Dropped values are read by nothing that stays; their starting values only stand in while copying.
        given = dict(zip(order, args, strict=True))
        return [given.get(k, operand) for k, operand in enumerate(op.operands)]

    def after(args: list[Value]) -> list[Value]:
        results = reverse.replay(body, filled(args)).results
        return [results[k] for k in order]

    with ir.insert_before(op), ir.located(op):
        slim = ops.while_op(
            [op.operands[k] for k in order], lambda args: reverse.replay(condition, filled(args)).results[0], after
        )
    for k, result in zip(order, slim.results, strict=True):
        ir.replace_uses(op.results[k], result)
    ir.erase(op)
    for index in range(2):
        ir.erase_dead(ir.region_block(slim, index))
    return slim


def _read(block: Block, values: list[Value]) -> set[int]:
    """Positions of the block's arguments that `values` are computed from."""
    wanted = set(values)
    for op in reversed(ir.operations(block)):
        if any(result in wanted for result in op.results):
            wanted.update(op.operands)
            if len(op.regions):
                wanted.update(ir.captured_values(op))
    return {k for k, argument in enumerate(block.arguments) if argument in wanted}
