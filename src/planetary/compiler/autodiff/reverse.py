"""Reverse-mode differentiation of a block of operations. It knows no operation: see `rule_table`.

The forward pass copies a block to the insertion point and keeps the copies as a *tape*. The backward pass walks the
tape backwards, asks each operation's rule for contributions, and gathers them per value. A value without an entry has
cotangent zero: nothing is emitted for it.

Conventions for complex numbers are those of `jax.vjp`: the cotangent of z = f(w) is transposed, not conjugated, so of a
holomorphic f is multiplied by f'(w).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import rule_table as table
from planetary.compiler.ir import Block, Operation, Value
from planetary.core.errors import UnsupportedOpError


@dataclass(frozen=True)
class Forward:
    """A copied block: arguments and results in the new place, and the copied operations in order."""

    arguments: list[Value]
    results: list[Value]
    tape: list[Operation]


def replay(block: Block, arguments: Sequence[Value], outside: Mapping[Value, Value] | None = None) -> Forward:
    """Copy the operations of `block` to the insertion point, without the return.

    Args:
        block: a function body without calls, or a region of a control-flow operation.
        arguments: the values that stand for the block's arguments.
        outside: replacements for values the block uses from outside; others are used as they are.
    """
    mapping: dict[Value, Value] = dict(outside or {})
    mapping.update(zip(block.arguments, arguments, strict=True))
    tape: list[Operation] = []
    body = ir.operations(block)
    for op in body[:-1]:
        copy = ir.clone(op, [mapping.get(value, value) for value in op.operands])
        if len(op.regions):
            ir.replace_captured(copy, mapping)
        mapping.update(zip(op.results, copy.results, strict=True))
        tape.append(copy)
    results = [mapping.get(value, value) for value in body[-1].operands]
    return Forward(list(arguments), results, tape)


def record(build: Callable[[], Sequence[Value]], arguments: Sequence[Value]) -> Forward:
    """Run a function that emits operations and keep them as a tape, to differentiate an equivalent of
    some op.
    """
    with ir.recording() as tape:
        results = list(build())
    return Forward(list(arguments), results, tape)


def active_values(tape: Sequence[Operation], sources: Sequence[Value]) -> set[Value]:
    """Values through which a change of `sources` can reach the end of the tape as a differentiable number."""
    active = {value for value in sources if ir.is_differentiable_type(value.type)}
    if not active:
        return active
    for op in tape:
        if not _touches(op, active):
            continue
        entry = table.find(op)
        if entry is not None and entry.inactive is not None:
            continue
        changing = table.changing_results(op, active)
        active.update(result for result in changing if ir.is_differentiable_type(result.type))
    return active


def _touches(op: Operation, values: set[Value]) -> bool:
    if any(operand in values for operand in op.operands):
        return True
    return len(op.regions) > 0 and any(value in values for value in ir.captured_values(op))


def reached_values(tape: Sequence[Operation], active: set[Value], results: Sequence[Value]) -> set[Value]:
    """Active values that receive a cotangent when `results` have one, by structure alone."""
    reached = {value for value in results if value in active}
    for op in reversed(tape):
        if not any(result in reached for result in op.results):
            continue
        reached.update(value for value in op.operands if value in active)
        if len(op.regions):
            reached.update(value for value in ir.captured_values(op) if value in active)
    return reached


class _Gathered:
    """Cotangents by value."""

    def __init__(self) -> None:
        self.by_value: dict[Value, Value] = {}

    def add(self, value: Value, contribution: table.Contribution) -> None:
        if contribution is None:
            return
        held = self.by_value.get(value)
        if isinstance(contribution, table.InPlace):
            self.by_value[value] = contribution.onto(held if held is not None else ops.zeros(value.type))
        elif held is None:
            self.by_value[value] = contribution
        else:
            self.by_value[value] = ops.add(held, contribution)


def pull_back(
    forward: Forward,
    cotangents: Sequence[Value | None],
    wrt: Sequence[Value],
    running: Mapping[Value, Value] | None = None,
) -> list[Value | None]:
    """Emit the backward operations of a tape at the insertion point.

    Args:
        forward: the result of `replay`.
        cotangents: one per result of the forward pass; None stands for zero.
        wrt: values (arguments, or outside values the tape uses) whose cotangents are wanted.
        running: cotangents of `wrt` values to continue from, e.g. the accumulators of a loop.

    Returns:
        One cotangent per `wrt` value, None where it is zero. `forward.results` is brought up to date
        where the backward pass needed another form of the forward pass (loops).

    Raises:
        UnsupportedOpError: an operation without a rule lies between a `wrt` value and a result.
    """
    active = active_values(forward.tape, wrt)
    gathered = _Gathered()
    gathered.by_value.update(running or {})
    for value, cotangent in zip(forward.results, cotangents, strict=True):
        if cotangent is not None and value in active:
            gathered.add(value, cotangent)
    notes: dict[object, object] = {}
    for op in reversed(forward.tape):
        results = list(op.results)
        incoming = [gathered.by_value.pop(result, None) for result in results]
        if all(cotangent is None for cotangent in incoming):
            continue
        if not _touches(op, active):
            continue
        whole = table.match_pattern(op)
        inputs = [*op.operands, *ir.captured_values(op)] if whole is None else whole[0]
        needs = [value in active for value in inputs]
        if not any(needs):
            continue
        with ir.located(op):
            site = table.ReverseSite(op, inputs, results, needs, notes)
            parts = _contributions(site, incoming) if whole is None else whole[1](site, incoming)
            for value, needed, part in zip(inputs, needs, parts, strict=True):
                if needed:
                    gathered.add(value, part)
    forward.results[:] = [site_replacements(notes).get(value, value) for value in forward.results]
    return [gathered.by_value.get(value) for value in wrt]


def site_replacements(notes: dict[object, object]) -> dict[Value, Value]:
    """Return forward results a rule replaced by equal ones, e.g. of a loop that also saves its states."""
    return cast("dict[Value, Value]", notes.setdefault("replaced", {}))


def _contributions(site: table.ReverseSite, cotangents: list[Value | None]) -> list[table.Contribution]:
    entry = table.find(site.op)
    if entry is None:
        raise UnsupportedOpError(table.key_of(site.op), ir.location_text(site.op))
    if entry.inactive is not None:
        return [None] * len(site.inputs)
    if entry.rule is None:
        raise UnsupportedOpError(entry.name, ir.location_text(site.op), entry.unsupported or "")
    parts = list(entry.rule(site, cotangents))
    missing = len(site.inputs) - len(parts)
    if any(site.needs[len(parts) :]):
        raise UnsupportedOpError(
            entry.name,
            ir.location_text(site.op),
            "its body uses a value from outside that the gradient depends on; pass that value as an operand",
        )
    return parts + [None] * missing


def pull_back_through(
    site: table.ReverseSite, cotangents: Sequence[Value | None], build: Callable[[], Sequence[Value]]
) -> list[table.Contribution]:
    """A rule by way of another: emit a computation equal to the operation's and differentiate that."""
    forward = record(build, site.inputs)
    wanted = [i for i, needed in enumerate(site.needs) if needed]
    found = pull_back(forward, cotangents, [site.inputs[i] for i in wanted])
    by_position = dict(zip(wanted, found, strict=True))
    return [by_position.get(i) for i in range(len(site.inputs))]
