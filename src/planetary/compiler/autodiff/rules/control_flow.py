"""Rules of `while` with a known number of iterations, and of `if` and `case`.

A loop saves, per iteration, the loop-carried values for the backward pass, and recomputes the rest of the iteration
from them; a branch is recomputed from the inputs. The graph does not grow with the number of iterations.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import reverse, static_integers
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, activity, rule_many
from planetary.compiler.ir import Block, Operation, Value
from planetary.core.errors import UnsupportedOpError


@rule_many("stablehlo.while", note="the number of iterations must be known at compile time")
def _while(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    count = static_integers.trip_count(site.op)
    if count == 0:
        return [*cts, *[None] * (len(site.inputs) - len(cts))]
    backward = _LoopBackward(site, cts, count or 0)
    if count is None and backward.is_needed:
        raise UnsupportedOpError(
            site.name,
            ir.location_text(site.op),
            "its number of iterations is not known at compile time; write it as lax.scan, or as lax.fori_loop with"
            " constant bounds",
        )
    return backward.emit()


def _varied(op: Operation, varied: set[int], captured: Sequence[Value]) -> tuple[set[int], set[Value]]:
    """Which loop-carried values change with those in `varied` and with outside values, and all such in the body."""
    body = ir.region_block(op, 1)
    *tape, end = ir.operations(body)
    varied = set(varied)
    while True:
        active = reverse.active_values(tape, [body.arguments[k] for k in sorted(varied)] + list(captured))
        more = {k for k, value in enumerate(end.operands) if value in active} - varied
        if not more:
            return varied, active
        varied |= more


@activity("stablehlo.while")
def _while_activity(op: Operation, active: Set[Value]) -> list[Value]:
    captured = [value for value in ir.captured_values(op) if value in active]
    varied, _ = _varied(op, {k for k, value in enumerate(op.operands) if value in active}, captured)
    return [result for k, result in enumerate(op.results) if k in varied]


@activity("stablehlo.if", "stablehlo.case")
def _branch_activity(op: Operation, active: Set[Value]) -> list[Value]:
    captured = [value for value in ir.captured_values(op) if value in active]
    found: dict[int, None] = {}
    for index in range(len(op.regions)):
        *tape, end = ir.operations(ir.region_block(op, index))
        inside = reverse.active_values(tape, captured)
        found.update((k, None) for k, value in enumerate(end.operands) if value in inside)
    return [op.results[k] for k in found]


class _LoopBackward:
    """Emits the backward loop of one `while`.

    Loop-carried values every iteration hands on unchanged are treated like values used from outside: their cotangents
    are gathered over the iterations in one accumulator each.
    """

    def __init__(self, site: ReverseSite, cts: list[Value | None], count: int) -> None:
        self.site, self.cts, self.count = site, cts, count
        self.body: Block = ir.region_block(site.op, 1)
        self.carried = list(site.op.operands)
        self.arguments = list(self.body.arguments)
        self.ends = list(ir.terminator(self.body).operands)
        self.constant = [k for k, argument in enumerate(self.arguments) if self.ends[k] == argument]
        self._analyse()

    def _analyse(self) -> None:
        """Find the loop-carried values with a cotangent, and the outside values that gather one."""
        site, tape = self.site, ir.operations(self.body)[:-1]
        captured = [v for v, need in self._outside_inputs() if need]
        varied, active = _varied(site.op, {k for k in range(len(self.carried)) if site.needs[k]}, captured)
        useful = {k for k, ct in enumerate(self.cts) if ct is not None}
        while True:
            reached = reverse.reached_values(tape, active, [self.ends[k] for k in sorted(useful)])
            more = {k for k in varied if self.arguments[k] in reached} - useful
            if not more:
                break
            useful |= more
        self.moving = [k for k in sorted(varied & useful) if k not in self.constant]
        gathering: dict[Value, None] = {}
        for k in self.constant:
            if site.needs[k] and self.arguments[k] in reached and self._used(k):
                gathering.setdefault(self.carried[k])
        for value, need in self._outside_inputs():
            if need and value in reached:
                gathering.setdefault(value)
        self.gathering = list(gathering)

    def _used(self, k: int) -> bool:
        """Whether a constant loop-carried value is used by more than the body's return."""
        return any(self.arguments[k] in list(op.operands) for op in ir.operations(self.body)[:-1]) or any(
            self.arguments[k] in ir.captured_values(op) for op in ir.operations(self.body)[:-1]
        )

    def _outside_inputs(self) -> list[tuple[Value, bool]]:
        first = len(self.carried)
        return list(zip(self.site.inputs[first:], self.site.needs[first:], strict=True))

    @property
    def is_needed(self) -> bool:
        """Whether any cotangent changes on the way back through the iterations."""
        return bool(self.moving or self.gathering)

    def emit(self) -> Sequence[Contribution]:
        site = self.site
        parts: list[Contribution] = [None] * len(site.inputs)
        for k in self.constant:
            parts[k] = self.cts[k]
        if not self.is_needed:
            return parts
        saved = {k: self._placeholder(k) for k in range(len(self.carried)) if not self._is_computed(k)}
        starts = [self._ct_or_zero(k) for k in self.moving]
        starts += [ops.zeros(value.type) for value in self.gathering]
        last = ops.scalar(ir.i32(), self.count - 1)
        loop = ops.while_op(
            [last, *starts],
            lambda args: ops.compare(args[0], ops.scalar(ir.i32(), 0), "GE"),
            lambda args: self._step(args, saved),
        )
        ir.erase_dead(ir.region_block(loop, 1))
        self._save({k: value for k, value in saved.items() if ir.has_uses(value)})
        for value in saved.values():
            ir.erase(ir.defining_op(value))
        found = list(loop.results)[1:]
        for k, ct in zip(self.moving, found, strict=False):
            parts[k] = ct
        inputs = list(site.inputs)
        for value, ct in zip(self.gathering, found[len(self.moving) :], strict=True):
            position = inputs.index(value)
            while position in self.moving:  # the same value may also start a changing loop-carried value
                position = inputs.index(value, position + 1)
            held = parts[position]
            parts[position] = ct if held is None else ops.add(held, ct)
        return parts

    def _ct_or_zero(self, k: int) -> Value:
        ct = self.cts[k]
        return ops.zeros(self.carried[k].type) if ct is None else ct

    def _is_computed(self, k: int) -> bool:
        """Whether the value in each iteration is known without saving it."""
        return k in self.constant or self._step_of(k) is not None

    def _step_of(self, k: int) -> int | None:
        value = self.carried[k]
        if ir.shape_of(value) != () or not ir.is_integer_element(ir.element_of(value)):
            return None
        return static_integers.step_of(self.body, k)

    def _placeholder(self, k: int) -> Value:
        """Stands for the saved values of one loop-carried value until it is known whether they are needed."""
        value = self.carried[k]
        return ir.placeholder(ir.tensor([self.count, *ir.shape_of(value)], ir.element_of(value)))

    def _step(self, args: list[Value], saved: dict[int, Value]) -> list[Value]:
        """One iteration of the backward loop: recompute the forward iteration, then pull back through it."""
        time, cts = args[0], args[1:]
        arguments = [self._at(k, time, saved) for k in range(len(self.carried))]
        forward = reverse.replay(self.body, arguments)
        incoming: list[Value | None] = [None] * len(self.carried)
        for k, ct in zip(self.moving, cts, strict=False):
            incoming[k] = ct
        wrt = [arguments[k] for k in self.moving] + self.gathering
        running = dict(zip(self.gathering, cts[len(self.moving) :], strict=True))
        found = reverse.pull_back(forward, incoming, wrt, running)
        before = ops.subtract(time, ops.scalar(ir.i32(), 1))
        filled = [ops.zeros(value.type) if ct is None else ct for value, ct in zip(wrt, found, strict=True)]
        return [before, *filled]

    def _at(self, k: int, time: Value, saved: dict[int, Value]) -> Value:
        """A loop-carried value as it was at the start of iteration `time`."""
        value = self.carried[k]
        if k in self.constant:
            return value
        step = self._step_of(k)
        if step is not None:
            element = ir.element_of(value)
            moved = ops.convert(time, element)
            if step != 1:
                moved = ops.multiply(moved, ops.scalar(element, step))
            return moved if ops.is_zero(value) else ops.add(value, moved)
        return index_first(saved[k], time)

    def _save(self, saved: dict[int, Value]) -> None:
        """Put a loop that also stacks the needed values in place of the forward loop."""
        if not saved:
            return
        op: Operation = self.site.op
        count = len(self.carried)
        condition = ir.region_block(op, 0)

        def test(args: list[Value]) -> Value:
            return reverse.replay(condition, args[:count]).results[0]

        def body(args: list[Value]) -> list[Value]:
            time, stacks = args[count], args[count + 1 :]
            filled = [put_first(s, args[k], time) for k, s in zip(saved, stacks, strict=True)]
            after = reverse.replay(self.body, args[:count]).results
            return [*after, ops.add(time, ops.scalar(ir.i32(), 1)), *filled]

        with ir.insert_before(op), ir.located(op):
            inits = [*self.carried, ops.scalar(ir.i32(), 0), *(ops.zeros(v.type) for v in saved.values())]
            loop = ops.while_op(inits, test, body)
        replaced = reverse.site_replacements(self.site.notes)
        for old, new in zip(op.results, loop.results, strict=False):
            ir.replace_uses(old, new)
            replaced[old] = new
        for value, stack in zip(saved.values(), list(loop.results)[count + 1 :], strict=True):
            ir.replace_uses(value, stack)


def index_first(stack: Value, index: Value) -> Value:
    """`stack[index]`."""
    shape = ir.shape_of(stack)
    starts = [index] + [ops.scalar(ir.element_of(index), 0)] * (len(shape) - 1)
    return ops.reshape(ops.dynamic_slice(stack, starts, [1, *shape[1:]]), shape[1:])


def put_first(stack: Value, value: Value, index: Value) -> Value:
    """`stack` with `value` at `index`."""
    shape = ir.shape_of(stack)
    starts = [index] + [ops.scalar(ir.element_of(index), 0)] * (len(shape) - 1)
    return ops.dynamic_update_slice(stack, ops.reshape(value, [1, *shape[1:]]), starts)


@rule_many("stablehlo.if", "stablehlo.case")
def _branches(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    used = [value for value, need in zip(site.inputs[1:], site.needs[1:], strict=True) if need]
    blocks = [ir.region_block(site.op, index) for index in range(len(site.op.regions))]
    reached: set[Value] = set()
    for block in blocks:
        tape = ir.operations(block)
        active = reverse.active_values(tape[:-1], used)
        ends = [end for end, ct in zip(tape[-1].operands, cts, strict=True) if ct is not None]
        reached |= reverse.reached_values(tape[:-1], active, ends)
    wrt = [value for value in used if value in reached]
    if not wrt:
        return [None] * len(site.inputs)

    def backward(block: Block) -> list[Value]:
        found = reverse.pull_back(reverse.replay(block, []), cts, wrt)
        return [ops.zeros(v.type) if ct is None else ct for v, ct in zip(wrt, found, strict=True)]

    op = ops.case_op(
        site.inputs[0], [value.type for value in wrt], [lambda block=block: backward(block) for block in blocks]
    )
    for index in range(len(blocks)):
        ir.erase_dead(ir.region_block(op, index))
    found = dict(zip(wrt, op.results, strict=True))
    return [None, *(found.pop(value, None) for value in site.inputs[1:])]
