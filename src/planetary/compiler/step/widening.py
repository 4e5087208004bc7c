"""Matrices held in fewer bits are widened anew by each operation that takes one, in both passes."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir
from planetary.compiler.ir import Block, Operation, Value
from planetary.compiler.step.remat import dependent, values_read


def widen_at_each_use(block: Block, stored: Sequence[Value], data: Sequence[Value]) -> None:
    """Rewrite a block so that no widened matrix outlives the operation that reads it.

    Widened once, all matrices would be there in float32 from the start of a step to the backward pass. Each copy reads
    the stored form through a `stablehlo.optimization_barrier`, together with the other operand of its reader: a
    compiler can neither merge the copies nor start one early. A second barrier keeps the widening out of the product's
    own loop, where IREE 3.13 repeats it for each tile and takes twice the time.

    Args:
        block: has both passes, or the forward pass alone, and nothing after them.
        stored: codes and scales.
        data: the batch.
    """
    body = ir.operations(block)
    active, widening = dependent(body, data), dependent(body, stored)
    makers = {result: op for op in body if op in widening and op not in active for result in op.results}
    moving = {*data, *(result for op in body if op in active for result in op.results)}
    place = {op: i for i, op in enumerate(body)}
    for reader in body:
        read = values_read(reader) if reader in active else []
        if wide := [value for value in read if value in makers]:
            guard = next(value for value in read if value in moving)
            with ir.insert_before(reader), ir.located(reader):
                copies = _copies(wide, makers, place, stored, guard)
            for position, operand in enumerate(reader.operands):
                if operand in copies:
                    reader.operands[position] = copies[operand]
            if len(reader.regions):
                ir.replace_captured(reader, copies)


def _copies(
    wide: Sequence[Value],
    makers: dict[Value, Operation],
    place: dict[Operation, int],
    stored: Sequence[Value],
    guard: Value,
) -> dict[Value, Value]:
    """Emit the operations behind some values once more, after `guard`; return the copy of each value."""
    wanted: dict[Operation, None] = {}
    sources: dict[Value, None] = {}
    open_ = list(wide)
    while open_:
        value = open_.pop()
        if value in makers and makers[value] not in wanted:
            wanted.setdefault(makers[value])
            open_ += values_read(makers[value])
        elif value in stored:
            sources.setdefault(value)
    guarded = [*sources, guard]
    barrier = ir.emit("stablehlo.optimization_barrier", guarded, [value.type for value in guarded])
    copies = dict(zip(sources, barrier.results, strict=False))
    for op in sorted(wanted, key=place.__getitem__):
        copy = ir.clone(op, [copies.get(value, value) for value in op.operands])
        copies.update(zip(op.results, copy.results, strict=True))
    whole = ir.emit("stablehlo.optimization_barrier", [copies[value] for value in wide], [v.type for v in wide])
    return dict(zip(wide, whole.results, strict=True))
