"""Finding, at compile time, how often a loop runs: a small evaluator of scalar integer operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planetary.compiler import ir
from planetary.compiler.ir import Block, Operation, Value

_LONGEST_SIMULATION = 100_000  # iterations tried before a loop that does not simply count is taken for dynamic

_BINARY: dict[str, Callable[[int, int], int]] = {
    "stablehlo.add": lambda a, b: a + b,
    "stablehlo.subtract": lambda a, b: a - b,
    "stablehlo.multiply": lambda a, b: a * b,
    "stablehlo.maximum": max,
    "stablehlo.minimum": min,
    "stablehlo.and": lambda a, b: a & b,
    "stablehlo.or": lambda a, b: a | b,
    "stablehlo.divide": lambda a, b: int(a / b) if abs(a) < 2**50 else abs(a) // abs(b) * (1 if a * b > 0 else -1),
    "stablehlo.remainder": lambda a, b: a - b * int(a / b),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
_SAME = ("stablehlo.convert", "stablehlo.reshape", "stablehlo.broadcast_in_dim")


class NotStatic(Exception):
    """The value depends on something that is known only at run time."""


def evaluate(value: Value, known: Mapping[Value, int]) -> int:
    """The value of a scalar integer or boolean, given those of some block arguments.

    Raises:
        NotStatic: it depends on something else.
    """
    if value in known:
        return known[value]
    if not ir.is_tensor(value) or ir.shape_of(value) != () or not ir.is_integer_element(ir.element_of(value)):
        raise NotStatic
    op = ir.defining_op(value)
    if op is None:
        return evaluate(_loop_invariant_source(value), known)
    if op.name == "stablehlo.constant":
        number = ir.constant_value(op)
        if number is None:
            raise NotStatic
        return int(number.reshape(()))
    if op.name in _SAME:
        return evaluate(op.operands[0], known)
    if op.name in _BINARY:
        right = evaluate(op.operands[1], known)
        if right == 0 and op.name in ("stablehlo.divide", "stablehlo.remainder"):
            raise NotStatic
        return _BINARY[op.name](evaluate(op.operands[0], known), right)
    if op.name == "stablehlo.compare":
        compare = _COMPARE[ir.direction_of(op)]
        return int(compare(evaluate(op.operands[0], known), evaluate(op.operands[1], known)))
    if op.name == "stablehlo.select":
        chosen = op.operands[1] if evaluate(op.operands[0], known) else op.operands[2]
        return evaluate(chosen, known)
    raise NotStatic


def _loop_invariant_source(argument: Value) -> Value:
    """For an argument of a loop body every iteration hands on unchanged: the loop's operand."""
    block: Block = argument.owner
    loop = ir.owner_of_block(block)
    if loop is None or loop.name != "stablehlo.while":
        raise NotStatic
    position = list(block.arguments).index(argument)
    body = ir.region_block(loop, 1)
    if ir.terminator(body).operands[position] != body.arguments[position]:
        raise NotStatic
    return loop.operands[position]


def step_of(block: Block, position: int) -> int | None:
    """The constant a loop body adds to argument `position` each time, or None."""
    op = ir.defining_op(ir.terminator(block).operands[position])
    argument = block.arguments[position]
    if op is None or op.name not in ("stablehlo.add", "stablehlo.subtract"):
        return None
    left, right = op.operands
    try:
        if left == argument:
            amount = evaluate(right, {})
            return amount if op.name == "stablehlo.add" else -amount
        if right == argument and op.name == "stablehlo.add":
            return evaluate(left, {})
    except NotStatic:
        return None
    return None


def trip_count(loop: Operation) -> int | None:
    """How often a `stablehlo.while` runs, or None if not known at compile time."""
    condition, body = ir.region_block(loop, 0), ir.region_block(loop, 1)
    state: dict[int, int] = {}
    for position, value in enumerate(loop.operands):
        try:
            state[position] = evaluate(value, {})
        except NotStatic:
            continue
    ends = list(ir.terminator(body).operands)
    test = ir.terminator(condition).operands[0]
    needed = _needed_positions(test, ends, condition, body)
    if not needed <= set(state):
        return None
    if len(needed) == 1:
        simple = _counted(test, condition, body, next(iter(needed)), state)
        if simple is not None:
            return simple
    count = 0
    try:
        while evaluate(test, {condition.arguments[k]: state[k] for k in needed}):
            known = {body.arguments[k]: state[k] for k in needed}
            state = {k: evaluate(ends[k], known) for k in needed}
            count += 1
            if count > _LONGEST_SIMULATION:
                return None
    except NotStatic:
        return None
    return count


def _counted(test: Value, condition: Block, body: Block, position: int, state: Mapping[int, int]) -> int | None:
    """The closed form for a counter with a constant increment, compared with a bound by `<` or `<=`."""
    op, step, start = ir.defining_op(test), step_of(body, position), state[position]
    if op is None or op.name != "stablehlo.compare" or step is None or step <= 0:
        return None
    if op.operands[0] != condition.arguments[position] or ir.direction_of(op) not in ("LT", "LE"):
        return None
    try:
        bound = evaluate(op.operands[1], {}) + (ir.direction_of(op) == "LE")
    except NotStatic:
        return None
    return max(0, -(-(bound - start) // step))


def _needed_positions(test: Value, ends: list[Value], condition: Block, body: Block) -> set[int]:
    """Loop-carried values the condition depends on, directly or through the body."""
    needed = _arguments_under(test, condition)
    todo = list(needed)
    while todo:
        for position in _arguments_under(ends[todo.pop()], body) - needed:
            needed.add(position)
            todo.append(position)
    return needed


def _arguments_under(value: Value, block: Block) -> set[int]:
    arguments = list(block.arguments)
    found: set[int] = set()
    seen: set[Value] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in arguments:
            found.add(arguments.index(current))
            continue
        op = ir.defining_op(current)
        if op is not None:
            todo.extend(op.operands)
    return found
