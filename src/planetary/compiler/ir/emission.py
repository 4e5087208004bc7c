"""Emits operations at the insertion point, and remembers them for who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from jaxlib.mlir import ir as mlir
from jaxlib.mlir.dialects import stablehlo as hlo

from planetary.compiler.ir.handles import Attribute, Operation, Type, Value

_recorders: list[list[Operation]] = []


@contextmanager
def recording() -> Iterator[list[Operation]]:
    """Collect the operations emitted inside the `with` at this nesting level, in order."""
    tape: list[Operation] = []
    _recorders.append(tape)
    try:
        yield tape
    finally:
        _recorders.pop()
    if _recorders:
        _recorders[-1].extend(tape)


@contextmanager
def not_recording() -> Iterator[None]:
    """Record nothing that is emitted inside the `with`: for work on another module during a recording."""
    _recorders.append([])
    try:
        yield
    finally:
        _recorders.pop()


def record(op: Operation) -> Operation:
    """Tell the innermost `recording` of an operation."""
    if _recorders:
        _recorders[-1].append(op)
    return op


def emit(
    name: str,
    operands: Sequence[Value],
    results: Sequence[Type] | None = None,
    attributes: dict[str, Attribute] | None = None,
    regions: int = 0,
) -> Operation:
    """Emit any operation by name; result types are inferred where `results` is None."""
    return record(
        mlir.Operation.create(
            name,
            results=None if results is None else list(results),
            operands=list(operands),
            attributes=attributes or {},
            regions=regions,
            infer_type=results is None,
        ).operation
    )


def elementwise(name: str, *operands: Value) -> Value:
    """Emit an op whose one result has the type of the first operand, e.g. `elementwise("chlo.erf", x)`."""
    return emit(name, operands, [operands[0].type]).results[0]


def fill_region(
    op: Operation, index: int, types: Sequence[Type], build: Callable[[list[Value]], Sequence[Value]]
) -> None:
    """Give region `index` of `op` one block with arguments of `types`; `build` emits the operations."""
    unknown = mlir.Location.unknown()
    block = mlir.Block.create_at_start(op.operation.regions[index], list(types), [unknown] * len(types))
    _recorders.append([])  # operations inside the region are not part of a recording outside
    try:
        with mlir.InsertionPoint(block):
            hlo.ReturnOp(list(build(list(block.arguments))))
    finally:
        _recorders.pop()
