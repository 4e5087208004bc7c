"""Rematerialisation in the graph: recompute activations of the forward pass where the backward pass needs them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from planetary.compiler import ir
from planetary.compiler.ir import Block, Operation, Value
from planetary.compiler.step.remat_policy import TapeStep, plan
from planetary.compiler.step.step_module import Plan

_VIEWS = frozenset(
    f"stablehlo.{name}"
    for name in ("reshape", "transpose", "broadcast_in_dim", "slice", "convert", "bitcast_convert", "reverse")
)
_FIXED = frozenset({"stablehlo.while", "stablehlo.if", "stablehlo.case", "stablehlo.custom_call", "stablehlo.rng"})
_DEAR = frozenset(
    f"stablehlo.{name}"
    for name in ("exponential", "log", "tanh", "logistic", "power", "sine", "cosine", "rsqrt", "sqrt", "divide")
)
_DEAR_COST = 8.0  # scalar operations in a transcendental function, roughly


def rematerialise(block: Block, count: int, data: Sequence[Value], roots: Sequence[Value], budget: int) -> Plan:
    """Rewrite a forward and a backward pass so that fewer activations are kept between them.

    Recomputed operations read kept values through a `stablehlo.optimization_barrier`, together with a cotangent the
    backward pass has just then: a compiler can neither merge it with the first computation nor start it early. Results
    of loops and conditionals, and values that depend on no data (constants, transposed weights), are left as they are
    and not counted.

    Args:
        block: has both passes and nothing after them.
        count: operations of the block that are the forward pass, from the start.
        data: the batch.
        roots: the results of the passes: the loss and the gradients.
        budget: bytes that activations may take; the smallest plan is taken where none fits.

    Returns:
        The plan carried out.
    """
    body = ir.operations(block)
    live, active = _live(body, roots), dependent(body, data)
    tape = _Tape([op for op in body[:count] if op in live and op in active and op.name not in _FIXED])
    backward = [op for op in body[count:] if op in live]
    needed = {i for op in backward for i in tape.roots_of(op)}
    steps = [
        TapeStep(
            inputs=() if tape.is_view(i) else tape.roots_of(op),
            nbytes=0 if tape.is_view(i) else sum(_nbytes(result) for result in op.results),
            cost=0.0 if tape.is_view(i) else _cost(op),
            needed=i in needed,
        )
        for i, op in enumerate(tape.operations)
    ]
    chosen = plan(steps, budget)
    place = {op: i for i, op in enumerate(backward)}
    for readers in _readers_by_segment(tape, chosen, backward):
        if readers:
            _Recomputation(tape, chosen, set(data), backward, place, active).emit(readers)
    return chosen


class _Tape:
    """The active operations of a forward pass; a *root* of a view is the operation whose data it shows."""

    def __init__(self, operations: list[Operation]) -> None:
        self.operations = operations
        self._position = {result: i for i, op in enumerate(operations) for result in op.results}
        self._root: list[int] = []
        for i, op in enumerate(operations):
            source = self.position(op.operands[0]) if op.name in _VIEWS else None
            self._root.append(i if source is None else self._root[source])

    def position(self, value: Value) -> int | None:
        """Where a value is computed; None outside the tape."""
        return self._position.get(value)

    def root(self, position: int) -> int:
        return self._root[position]

    def is_view(self, position: int) -> bool:
        return self._root[position] != position

    def roots_of(self, op: Operation) -> tuple[int, ...]:
        """Return the roots of an operation's operands, ascending."""
        found = [self.position(value) for value in values_read(op)]
        return tuple(sorted({self._root[i] for i in found if i is not None}))


_Readers = dict[Operation, list[Value]]  # operations of the backward pass and their operands, in order


def _readers_by_segment(tape: _Tape, plan: Plan, backward: Sequence[Operation]) -> list[_Readers]:
    """For each segment but the last: the readers of values not kept."""
    found: list[_Readers] = [{} for _ in plan.cuts]
    for op in backward:
        for value in values_read(op):
            position = tape.position(value)
            if position is not None and position not in plan.kept:
                segment = bisect.bisect_left(plan.cuts, position)
                if segment < len(found):
                    found[segment].setdefault(op, []).append(value)
    return found


@dataclass
class _Recomputation:
    """Computes one segment again in the backward pass."""

    tape: _Tape
    plan: Plan
    data: set[Value]
    backward: Sequence[Operation]
    place: dict[Operation, int]  # place in `backward`
    active: AbstractSet[Operation]  # operations that depend on the batch
    copies: dict[Value, Value] = field(default_factory=dict)

    def emit(self, readers: _Readers) -> None:
        """Let the readers read copies of this segment's values instead of the first ones."""
        first = next(iter(readers))
        wanted, entries = self._closure([value for values in readers.values() for value in values])
        with ir.insert_before(first), ir.located(first):
            guarded = [*entries, *self._cotangent(first)]
            barrier = ir.emit("stablehlo.optimization_barrier", guarded, [value.type for value in guarded])
            self.copies.update(zip(entries, list(barrier.results)[: len(entries)], strict=True))
            for position in sorted(wanted):
                op = self.tape.operations[position]
                copy = ir.clone(op, [self.copies.get(value, value) for value in op.operands])
                if len(op.regions):
                    ir.replace_captured(copy, self.copies)
                self.copies.update(zip(op.results, copy.results, strict=True))
        for op, values in readers.items():
            replaced = {value: self.copies[value] for value in values}
            for position, operand in enumerate(op.operands):
                if operand in replaced:
                    op.operands[position] = replaced[operand]
            if len(op.regions):
                ir.replace_captured(op, replaced)

    def _closure(self, values: Sequence[Value]) -> tuple[set[int], list[Value]]:
        """Positions to compute again for `values`, and the values they start from, in order of first use."""
        wanted: set[int] = set()
        entries: dict[Value, None] = {}
        open_ = list(values)
        while open_:
            value = open_.pop()
            position = self.tape.position(value)
            if position is None or position in self.plan.kept:
                if position is not None or value in self.data:
                    entries.setdefault(value)
            elif position not in wanted:
                wanted.add(position)
                open_ += values_read(self.tape.operations[position])
        return wanted, list(entries)

    def _cotangent(self, first: Operation) -> list[Value]:
        """The newest value of the backward pass that depends on the batch and is used from `first` on.

        A constant would be there from the start and delay nothing.
        """
        start = self.place[first]
        for position in range(start - 1, -1, -1):
            if self.backward[position] not in self.active:
                continue
            for result in self.backward[position].results:
                if any(self.place.get(_outermost(use.owner, self.place), -1) >= start for use in result.uses):
                    return [result]
        return []


def _outermost(op: Operation, place: dict[Operation, int]) -> Operation:
    """The operation of the block in which a user stands."""
    found = op.operation
    while found not in place and found.parent is not None:
        found = found.parent.operation
    return found


def values_read(op: Operation) -> list[Value]:
    return [*op.operands, *ir.captured_values(op)]


def _live(body: Sequence[Operation], roots: Sequence[Value]) -> set[Operation]:
    """Operations the roots depend on."""
    wanted = set(roots)
    found: set[Operation] = set()
    for op in reversed(body):
        if any(result in wanted for result in op.results):
            found.add(op)
            wanted.update(values_read(op))
    return found


def dependent(body: Sequence[Operation], data: Sequence[Value]) -> set[Operation]:
    """Return the operations that depend on some values."""
    known = set(data)
    found: set[Operation] = set()
    for op in body:
        if any(value in known for value in values_read(op)):
            found.add(op)
            known.update(op.results)
    return found


def _size(value: Value) -> int:
    return math.prod(ir.shape_of(value))


def _nbytes(value: Value) -> int:
    element = ir.element_of(value)
    width = 2 * ir.width_of(ir.real_element(element)) if ir.is_complex_element(element) else ir.width_of(element)
    return _size(value) * max(1, width // 8)


def _cost(op: Operation) -> float:
    """Scalar operations, roughly."""
    out = sum(_size(result) for result in op.results)
    if op.name == "stablehlo.dot_general":
        contracted = ir.dot_numbers(op).lhs_contracting_dimensions
        return 2.0 * out * math.prod(ir.shape_of(op.operands[0])[d] for d in contracted)
    if op.name == "stablehlo.dot":
        return 2.0 * out * ir.shape_of(op.operands[0])[-1]
    if op.name == "stablehlo.convolution":
        kernel = op.operands[1]
        features = ir.shape_of(kernel)[ir.conv_numbers(op).kernel_output_feature_dimension]
        return 2.0 * out * _size(kernel) / max(1, features)
    largest = max([out, *(_size(value) for value in op.operands)])
    return largest * (_DEAR_COST if op.name in _DEAR else 1.0)
