"""A training step of very many tensors as several functions, for IREE.

IREE 3.13 takes time for a function that grows faster than the number of tensors it takes and gives, and an optimizer
has four for each parameter (bench/results/start.md). The first stage computes whatever several parameters need: loss,
gradients, their norm, counts. Each later one gives a few parameters of one kind, with their state, the new values; one
function serves all parameters of a kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from planetary.compiler import ir
from planetary.compiler.rewrites.normalise import mark_in_place
from planetary.core.artifact_label import Stage, StagedFunction

PARAMETERS = 4
"""Most parameters of one call."""

_REPEATED = {"stablehlo.constant", "stablehlo.iota", "stablehlo.broadcast_in_dim", "stablehlo.convert"}
"""Operations a stage repeats, rather than take their results, where these are larger than the operands."""


def into_stages(module: ir.Module, name: str, replaced: Sequence[int]) -> StagedFunction:
    """Replace a function, in place, by stages; return their calls. Meaning: unchanged.

    Args:
        module: with the function, which nothing calls.
        name: of the function; the names of the stages begin with it.
        replaced: the argument that each of the first results replaces. A stage writes over it where no later stage
            takes it.
    """
    function = ir.functions(module)[name]
    step = _Step(function, replaced)
    first, groups = step.divided()
    parts = _parts(module, step, groups)
    taken = [step.cone(part)[0] for part in parts]
    last = {value: stage for stage, values in enumerate(taken, 1) for value in values}
    passed = [value for value in last if value not in step.arguments]

    def mark(made: ir.Operation, stage: int, arguments: Sequence[ir.Value], results: Sequence[int]) -> None:
        place = {value: i for i, value in enumerate(arguments) if last.get(value, 0) <= stage}
        mark_in_place(made, [place.get(step.replaced_by(result)) for result in results])

    names: dict[str, str] = {}  # function names by the text of the body
    called = [f"{name}_0"]
    for stage, (part, arguments) in enumerate(zip(parts, taken, strict=True), 1):
        made = step.emit(module, f"{name}_part", part)
        mark(made, stage, arguments, part)
        text = ir.to_local_text(made)
        if text in names:
            ir.erase_function(made)
        else:
            names[text] = f"{name}_{len(names) + 1}"
            ir.rename_function(made, names[text])
        called.append(names[text])
    ir.return_values(function, [*(step.results[i] for i in first), *passed])
    used = {value: None for value in step.arguments if ir.has_uses(value)}

    numbers, stages, final = dict(step.arguments), list[Stage](), dict[int, int]()
    count = len(numbers)
    numbers.update((value, count + len(first) + i) for i, value in enumerate(passed))
    for stage, (values, results) in enumerate(zip([list(used), *taken], [first, *parts], strict=True)):
        final.update((result, count + i) for i, result in enumerate(results))
        given = len(results) + (0 if stage else len(passed))
        released = tuple(numbers[value] for value in passed if last[value] == stage)
        stages.append(Stage(called[stage], tuple(numbers[value] for value in values), given, released))
        count += given
    ir.drop_arguments(function, [i for value, i in step.arguments.items() if value not in used])
    mark(function, 0, list(used), first)
    ir.rename_function(function, called[0])
    return StagedFunction(name, tuple(stages), tuple(final[i] for i in range(len(final))))


def _parts(module: ir.Module, step: _Step, groups: Sequence[list[int]]) -> list[list[int]]:
    """Return the results of each later stage: of a few groups that are made alike."""
    kinds: dict[str, list[list[int]]] = {}
    for group in groups:
        made = step.emit(module, "kind", group)
        kinds.setdefault(ir.to_local_text(made), []).append(group)
        ir.erase_function(made)
    return [
        [result for group in kind[i : i + PARAMETERS] for result in group]
        for kind in kinds.values()
        for i in range(0, len(kind), PARAMETERS)
    ]


class _Step:
    """The operations of a function, and the dependences of the results.

    Attributes:
        arguments: of the function, with their places.
        results: of the function.
    """

    def __init__(self, function: ir.Operation, replaced: Sequence[int]) -> None:
        block = ir.entry_block(function)
        self.arguments: dict[ir.Value, int] = {value: i for i, value in enumerate(block.arguments)}
        self.results: list[ir.Value] = list(ir.terminator(block).operands)
        given = list(self.arguments)
        self._replaced = [given[i] for i in replaced]
        self._operations = ir.operations(block)[:-1]
        self._maker = {value: i for i, op in enumerate(self._operations) for value in op.results}
        self._needs = [[*op.operands, *ir.captured_values(op)] for op in self._operations]
        self._shared: set[int] = set()

    def replaced_by(self, result: int) -> ir.Value | None:
        """Return the argument a result replaces."""
        return self._replaced[result] if result < len(self._replaced) else None

    def divided(self) -> tuple[list[int], list[list[int]]]:
        """Return the results of the first stage, and the others in groups that have only this stage in common."""
        first = {
            i
            for i, value in enumerate(self.results)
            if self.replaced_by(i) is None or value in self.arguments or _is_single(value)
        }
        self._shared = set(self.cone(first)[1])
        rest = {i: self.cone([i]) for i in range(len(self.results)) if i not in first}
        writers = {self._replaced[i]: i for i in rest}
        groups = {i: [i] for i in rest}
        for i, (read, _) in rest.items():
            for other in {writers[value] for value in read if value in writers}:
                if groups[other] is not groups[i]:
                    groups[i].extend(groups[other])
                    groups.update((j, groups[i]) for j in groups[other])
        readers: dict[int, set[int]] = {}
        for i, (_, needed) in rest.items():
            for op in needed:
                readers.setdefault(op, set()).add(groups[i][0])
        self._shared |= {op for op, found in readers.items() if len(found) > 1}
        first |= {i for i in rest if self._maker[self.results[i]] in self._shared}
        several = {found[0]: [i for i in sorted(found) if i not in first] for found in groups.values()}
        return sorted(first), [group for group in several.values() if group]

    def cone(self, results: Iterable[int]) -> tuple[list[ir.Value], list[int]]:
        """Return the values a stage takes to make results, and the operations, in order."""
        taken: dict[ir.Value, None] = {}
        order: dict[int, None] = {}
        stack = [(self.results[i], False) for i in reversed([*results])]
        while stack:
            value, is_ready = stack.pop()
            maker = self._maker.get(value)
            if maker is None or (maker in self._shared and not self._is_repeated(maker)):
                taken.setdefault(value)
            elif is_ready:
                order.setdefault(maker)
            elif maker not in order:
                stack.append((value, True))
                stack.extend((needed, False) for needed in reversed(self._needs[maker]))
        return list(taken), list(order)

    def _is_repeated(self, number: int) -> bool:
        op = self._operations[number]
        return op.name in _REPEATED and sum(map(_bits, op.operands)) < _bits(op.results[0])

    def emit(self, module: ir.Module, name: str, results: Sequence[int]) -> ir.Operation:
        """Add a function that makes some results of the values a stage takes."""
        taken, order = self.cone(results)
        with ir.new_function(module, name, [value.type for value in taken]) as (arguments, finish):
            copies = dict(zip(taken, arguments, strict=True))
            for number in order:
                op = self._operations[number]
                copy = ir.clone(op, [copies[value] for value in op.operands])
                ir.replace_captured(copy, copies)
                copies.update(zip(op.results, copy.results, strict=True))
            finish([copies[self.results[i]] for i in results])
        return ir.functions(module)[name]


def _is_single(value: ir.Value) -> bool:
    return math.prod(ir.shape_of(value)) == 1


def _bits(value: ir.Value) -> int:
    return math.prod(ir.shape_of(value)) * ir.width_of(ir.element_of(value))
