"""How far the rounding of 16-bit arithmetic may take two right executions of one step apart.

A model with bf16 activations rounds after every operation, and compilers differ in where: some keep float32 across
operations. What that is worth depends on the model and its depth, so it is measured: the step is run with all
arithmetic in float32, once without any rounding and once with a rounding after every operation. The distance of the two
is the noise.
"""

from __future__ import annotations

from planetary.compiler import ir, ops
from planetary.compiler.ir import Operation, Type, Value
from planetary.compiler.rewrites.precision import CONTRACTIONS

_MOVES = frozenset({
    "func.func",
    "func.return",
    "stablehlo.broadcast_in_dim",
    "stablehlo.concatenate",
    "stablehlo.constant",
    "stablehlo.reshape",
    "stablehlo.return",
    "stablehlo.select",
    "stablehlo.slice",
    "stablehlo.transpose",
})  # fmt: skip
_EXACT = _MOVES | CONTRACTIONS | {"stablehlo.convert"}
_BODIES = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if")  # others' bodies are inside one operation
_BITS = {"bf16": (8, 7), "f16": (5, 10)}  # of exponent and mantissa


def rounds_between_operations(stablehlo: str | bytes) -> bool:
    """Whether a module does other arithmetic than contractions in bf16 or f16."""
    found: list[str] = []

    def visit(op: Operation) -> None:
        if op.name not in _EXACT and any(_is_narrow(value) for value in (*op.operands, *op.results)):
            found.append(op.name)

    with ir.new_context():
        ir.walk(ir.parse_module(stablehlo).operation, visit)
    return bool(found)


def widened(stablehlo: str | bytes, *, rounding: bool) -> str:
    """Return a module that computes in f32 what another computes in bf16 and f16, with the same arguments and results.

    Constants and arguments keep their values, and results of functions are rounded. With `rounding`, so is the result
    of every operation (sums in the body of a reduction are not).
    """
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        for function in ir.functions(module).values():
            _widen(function, rounding)
        ir.verify(module)
        return ir.to_text(module)


def _widen(function: Operation, rounding: bool) -> None:
    block = ir.entry_block(function)
    end = ir.terminator(block)
    returned = [value.type for value in end.operands]
    first = ir.operations(block)[0]
    found: list[Operation] = []
    ir.walk(function, found.append)
    for argument in block.arguments:
        if _is_narrow(argument):
            _convert_behind(argument, first)
    for op in found:
        if op.name == "func.func":
            continue
        for region in op.regions:
            for inner in region.blocks:
                for argument in inner.arguments:
                    _retype(argument)
        for result in op.results:
            if not _is_narrow(result):
                continue
            if op.name == "stablehlo.constant":
                _convert_behind(result, _following(op))
                continue
            bits = _BITS[str(ir.element_of(result))]
            _retype(result)
            if rounding and op.name not in _MOVES and _is_in_a_body(op):
                _round_behind(result, _following(op), bits)
    with ir.insert_before(end), ir.located(end):
        for position, kind in enumerate(returned):
            if end.operands[position].type != kind:
                end.operands[position] = ops.convert(end.operands[position], ir.element_of_type(kind))


def _convert_behind(value: Value, before: Operation) -> None:
    """Let all users of a value have it in f32, converted before an operation."""
    with ir.insert_before(before), ir.located(before):
        wide = ops.convert(value, ir.f32())
    ir.replace_uses(value, wide)
    converted = ir.defining_op(wide)
    assert converted is not None
    converted.operands[0] = value


def _round_behind(value: Value, before: Operation, bits: tuple[int, int]) -> None:
    exponent, mantissa = (ir.integer_attribute(number, 32) for number in bits)
    attributes = {"exponent_bits": exponent, "mantissa_bits": mantissa}
    with ir.insert_before(before), ir.located(before):
        rounded = ir.emit("stablehlo.reduce_precision", [value], [value.type], attributes)
    ir.replace_uses(value, rounded.results[0])
    rounded.operands[0] = value


def _is_in_a_body(op: Operation) -> bool:
    owner = ir.owner_of_block(op.block)
    return owner is not None and owner.name in _BODIES


def _following(op: Operation) -> Operation:
    block = op.block
    found = ir.operations(block)
    return found[found.index(op) + 1]


def _retype(value: Value) -> None:
    if _is_narrow(value):
        value.set_type(ir.tensor(ir.shape_of(value), ir.f32()))


def _is_narrow(value: Value) -> bool:
    return ir.is_tensor(value) and _is_narrow_type(ir.element_of(value))


def _is_narrow_type(element: Type) -> bool:
    return str(element) in {"bf16", "f16"}
