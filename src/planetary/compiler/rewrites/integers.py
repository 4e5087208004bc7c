"""64-bit integers that need no more than 32 bits are computed in 32.

Exporters write token ids, positions and counts as i64. IREE 3.13 cannot lower vectors of i64 for Vulkan and Metal
("failed to legalize operation 'vector.broadcast'", `tests/compiler/backends/test_compiler_defects.py`), and elsewhere
they take twice the memory. Ranges are followed from constants, counters, narrower integers and booleans; a value
without proof keeps the type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planetary.compiler import ir, ops
from planetary.compiler.ir import Block, Operation, Value

Range = tuple[int, int]

_LOWEST, _HIGHEST = -(1 << 31), (1 << 31) - 1

# Operations whose result has only elements of their first operands, and how many of the operands those are.
_MOVES = {
    **dict.fromkeys(("reshape", "broadcast_in_dim", "transpose", "slice", "reverse", "dynamic_slice", "gather"), 1),
    "pad": 2,
}


def narrow_integers(module: ir.Module) -> None:
    """Narrow, in place, i64 arithmetic of a module to i32 where the ranges fit. Meaning: unchanged."""
    for function in ir.functions(module).values():
        block = ir.entry_block(function)
        _Narrowing().run(block)
        ir.erase_dead(block)


@dataclass
class _Narrowing:
    """Goes through the operations of one function, first to last.

    Attributes:
        ranges: smallest and largest number of every i64 value with an i32 twin.
        twins: those.
    """

    ranges: dict[Value, Range] = field(default_factory=dict)
    twins: dict[Value, Value] = field(default_factory=dict)

    def run(self, block: Block) -> None:
        for op in ir.operations(block):
            if len(op.results) == 1 and ir.is_tensor(op.results[0]):
                with ir.insert_before(op), ir.located(op):
                    self._visit(op)

    def _visit(self, op: Operation) -> None:
        kind = op.name.removeprefix("stablehlo.")
        result = op.results[0]
        if kind == "convert":
            self._convert(op)
        elif _is_wide(result):
            found = self._range_of(op, kind)
            if found is not None and _fits(found):
                twin = self._emit(op, kind)
                if twin is not None:
                    self._replace(result, twin, found)
        elif kind == "compare" and _is_wide(op.operands[0]) and self._known(op.operands):
            left, right = (self.twins[operand] for operand in op.operands)
            ir.replace_uses(result, ir.emit(op.name, [left, right], [result.type], ir.attributes_of(op)).results[0])

    def _convert(self, op: Operation) -> None:
        source, result = op.operands[0], op.results[0]
        if source in self.twins:
            ir.replace_uses(result, ops.convert(self.twins[source], ir.element_of(result)))
        elif _is_wide(result):
            found = _range_of_type(source)
            if found is not None and _fits(found):
                self._replace(result, ops.convert(source, ir.i32()), found)

    def _replace(self, wide: Value, narrow: Value, found: Range) -> None:
        """Let users that stay in 64 bits have the twin, converted; the others will find the twin itself."""
        back = ops.convert(narrow, ir.element_of(wide))
        ir.replace_uses(wide, back)
        self.ranges[back], self.twins[back] = found, narrow

    def _known(self, values: Sequence[Value]) -> bool:
        return all(value in self.twins for value in values)

    def _range_of(self, op: Operation, kind: str) -> Range | None:
        """Return the range of an operation's i64 result; None if it is unknown, or the operation has none here."""
        if kind == "constant":
            number = ir.constant_number(op)
            if number is not None:
                return int(number), int(number)
            array = ir.constant_value(op)
            return None if array is None or not array.size else (int(array.min()), int(array.max()))
        if kind == "iota":
            return 0, max(max(ir.shape_of(op.results[0]), default=1) - 1, 0)
        wide = [operand for operand in op.operands if _is_wide(operand)]
        if kind in _MOVES:
            wide = list(op.operands)[: _MOVES[kind]]
        if not wide or not self._known(wide):
            return None
        known = [self.ranges[operand] for operand in wide]
        if kind in _MOVES or kind in {"concatenate", "select"}:
            return min(low for low, _ in known), max(high for _, high in known)
        if kind == "reduce":
            return self._range_of_sum(op)
        rule = _ARITHMETIC.get(kind)
        return None if rule is None else rule(*known)

    def _range_of_sum(self, op: Operation) -> Range | None:
        """Return the range that contains every partial sum, in whatever order they are added."""
        body = [inner.name for inner in ir.operations(ir.region_block(op, 0))]
        if len(op.operands) != 2 or body != ["stablehlo.add", "stablehlo.return"]:
            return None
        terms = 1
        for dimension in ir.ints(op, "dimensions"):
            terms *= ir.shape_of(op.operands[0])[dimension]
        (low, high), (first, last) = (self.ranges[operand] for operand in op.operands)
        if first != 0 or last != 0:
            return None
        return min(low * terms, 0), max(high * terms, 0)

    def _emit(self, op: Operation, kind: str) -> Value | None:
        shape = ir.shape_of(op.results[0])
        if kind == "constant":
            number = ir.constant_number(op)
            if number is not None:
                return ops.full(shape, ir.i32(), number)
            array = ir.constant_value(op)
            return None if array is None else ops.constant(array.astype("int32"))
        if kind == "reduce":
            return ops.reduce_sum(self.twins[op.operands[0]], ir.ints(op, "dimensions"))
        operands = [self.twins.get(operand, operand) for operand in op.operands]
        return ir.emit(op.name, operands, [ir.tensor(shape, ir.i32())], ir.attributes_of(op)).results[0]


def _is_wide(value: Value) -> bool:
    return ir.is_tensor(value) and str(ir.element_of(value)) == "i64"


def _range_of_type(value: Value) -> Range | None:
    """Return the range of the narrowest integers a value was converted from; None for other values."""
    found = None
    while ir.is_integer_element(element := ir.element_of(value)):
        width = ir.width_of(element)
        unsigned = ir.is_unsigned(element) or ir.is_boolean_element(element)
        low, high = (0, (1 << width) - 1) if unsigned else (-(1 << width - 1), (1 << width - 1) - 1)
        if found is not None and (low < found[0] or found[1] < high):
            return found  # a wider source: the conversion may have changed the number
        found = low, high
        op = ir.defining_op(value)
        if op is None or op.name != "stablehlo.convert":
            return found
        value = op.operands[0]
    return found


def _fits(found: Range) -> bool:
    return found[0] >= _LOWEST and found[1] <= _HIGHEST


def _product(left: Range, right: Range) -> Range:
    corners = [a * b for a in left for b in right]
    return min(corners), max(corners)


_ARITHMETIC: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "subtract": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "multiply": _product,
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "negate": lambda a: (-a[1], -a[0]),
    "clamp": lambda low, x, high: (min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])),
}
