"""Walking, copying, rewiring and erasing the operations of a block."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jaxlib.mlir import ir as mlir

from planetary.compiler.ir.attributes import flag
from planetary.compiler.ir.emission import record
from planetary.compiler.ir.handles import Block, Location, Operation, Type, Value


def insert_at(block: Block) -> mlir.InsertionPoint:
    """Context manager: builders append to the end of `block`."""
    return mlir.InsertionPoint(block)


def insert_before(op: Operation) -> mlir.InsertionPoint:
    """Context manager: builders insert just before `op`."""
    return mlir.InsertionPoint(op)


def insert_after(op: Operation) -> mlir.InsertionPoint:
    """Context manager: builders insert just after `op`, in the order in which they are called."""
    return mlir.InsertionPoint.after(op)


def located(op: Operation) -> Location:
    """Context manager: builders carry the location of `op`."""
    return op.location


_FRAME = re.compile(r'"([^"]+\.py)":(\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/planetary/compiler/", "<frozen ")


def location_text(op: Operation) -> str:
    """Where an op stands: the function, file and line of the model's source, as far as they are known."""
    return source_place(str(op.operation.location))


def source_place(location: str) -> str:
    """Return where an operation stands, for people: the innermost line that is no library's.

    Args:
        location: as MLIR prints it, e.g. `loc("jit(loss)/tanh"("model.py":12:0 to :9))`, with the callers around it.
    """
    frames = _FRAME.findall(location)
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)]
    name = re.search(r'"([^"]+)"(?!:\d)', location)
    within = f"in {name[1].rstrip(':')}" if name else ""
    if frames:
        file, line = (own or frames)[0]
        return f"{file}, line {line} {within}".rstrip()
    if text := re.search(r'"-":(\d+)', location):
        return f"line {text[1]} of the StableHLO text"
    return within or "an unknown place"


def has_source_line(op: Operation) -> bool:
    """Whether the location of an op names a line of Python."""
    return '.py":' in str(op.operation.location)


def add_call_site(op: Operation, call: Operation) -> None:
    """Let the location of an inlined op go on with that of the call."""
    op.operation.location = mlir.Location.callsite(op.operation.location, [call.operation.location])


def terminator(block: Block) -> Operation:
    """The `return` at the end of a block."""
    operations = block.operations
    return operations[len(operations) - 1]


def operations(block: Block) -> list[Operation]:
    """All operations of a block in order, as plain operations."""
    return [op.operation for op in block.operations]


def walk(root: Operation, visit: Callable[[Operation], None]) -> None:
    """Call `visit` on every operation under `root`, including itself, in order.

    `visit` must not raise (the bindings would turn it into a `RuntimeError`) nor erase or insert operations.
    """

    def step(op: Operation) -> mlir.WalkResult:
        visit(op.operation)
        return mlir.WalkResult.ADVANCE

    root.operation.walk(step, mlir.WalkOrder.PRE_ORDER)


def clone(op: Operation, operands: Sequence[Value]) -> Operation:
    """A copy of `op` at the insertion point with other operands (regions are copied as they are)."""
    copy = op.operation.clone().operation  # never a typed view: a view's `name` may be an attribute of the op
    for position, operand in enumerate(operands):
        copy.operands[position] = operand
    return record(copy)


def has_uses(value: Value) -> bool:
    return any(True for _ in value.uses)


def uses_of(value: Value) -> list[tuple[Operation, int]]:
    """The operations that use a value, each with the operand's position."""
    return [(use.owner.operation, use.operand_number) for use in value.uses]


_EFFECTS = {"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"}


def _may_be_erased(op: Operation) -> bool:
    if op.name in _EFFECTS or any(has_uses(result) for result in op.results):
        return False
    return op.name != "stablehlo.custom_call" or not flag(op, "has_side_effect")


def erase_dead(block: Block) -> None:
    """Erase every operation of a block without uses, last first (a block's return stays)."""
    body = operations(block)
    for op in reversed(body[:-1]):
        if _may_be_erased(op):
            op.erase()


def erase_dead_after(block: Block, mark: Operation | None) -> None:
    """Like `erase_dead`, for a block without a return yet, down to `mark` (exclusive; None: the whole
    block).
    """
    for op in reversed(operations(block)):
        if mark is not None and op == mark:
            return
        if _may_be_erased(op):
            op.erase()


def captured_values(op: Operation) -> list[Value]:
    """Values from outside that the regions of `op` use, in order of first use."""
    if len(op.regions) == 0:
        return []
    inside: set[Value] = set()
    used: dict[Value, None] = {}

    def scan(block: Block) -> None:
        inside.update(block.arguments)
        for inner in operations(block):
            for operand in inner.operands:
                used.setdefault(operand)
            inside.update(inner.results)
            for region in inner.regions:
                for nested in region.blocks:
                    scan(nested)

    for region in op.regions:
        for block in region.blocks:
            scan(block)
    return [value for value in used if value not in inside]


def replace_captured(op: Operation, mapping: Mapping[Value, Value]) -> None:
    """Inside the regions of `op`, use `mapping[v]` wherever `v` was used."""

    def visit(inner: Operation) -> None:
        if inner == op:
            return
        for position, operand in enumerate(inner.operands):
            if operand in mapping:
                inner.operands[position] = mapping[operand]

    walk(op, visit)


def region_block(op: Operation, index: int) -> Block:
    """The single block of region `index`."""
    return op.operation.regions[index].blocks[0]


def owner_of_block(block: Block) -> Operation | None:
    """The operation in whose region a block stands."""
    owner = block.owner
    return None if owner is None else owner.operation


def placeholder(kind: Type) -> Value:
    """A value of a type that will be replaced; erase the operation afterwards."""
    return mlir.Operation.create("builtin.unrealized_conversion_cast", results=[kind], operands=[]).results[0]


def erase(op: Operation) -> None:
    op.operation.erase()


def replace_uses(value: Value, other: Value) -> None:
    value.replace_all_uses_with(other)


def defining_op(value: Value) -> Operation | None:
    """The operation whose result `value` is; None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, mlir.Block) else owner.operation
