"""How far the rounding of 16-bit arithmetic may take two right executions of one step apart.

A model with bf16 activations rounds after every operation, and compilers differ in where: some keep float32 within a
fused loop. What that is worth depends on the model and its depth, so it is measured: the same step with all
arithmetic in float32 is run beside the reference, and the distance of the two is the noise of rounding.
"""

from __future__ import annotations

from planetary.compiler import ir, ops
from planetary.compiler.ir import Operation, Type, Value
from planetary.compiler.precision import CONTRACTIONS

_EXACT = frozenset({
    "func.func",
    "func.return",
    "stablehlo.broadcast_in_dim",
    "stablehlo.concatenate",
    "stablehlo.constant",
    "stablehlo.convert",
    "stablehlo.reshape",
    "stablehlo.return",
    "stablehlo.select",
    "stablehlo.slice",
    "stablehlo.transpose",
}) | CONTRACTIONS  # fmt: skip


def rounds_between_operations(stablehlo: str | bytes) -> bool:
    """Whether a module does other arithmetic than contractions in bf16 or f16."""
    found: list[str] = []

    def visit(op: Operation) -> None:
        if op.name not in _EXACT and any(_is_narrow(value) for value in (*op.operands, *op.results)):
            found.append(op.name)

    with ir.new_context():
        ir.walk(ir.parse_module(stablehlo).operation, visit)
    return bool(found)


def widened(stablehlo: str | bytes) -> str:
    """Return a module that computes in f32 what another computes in bf16 and f16, with the same arguments and results.

    Constants and arguments keep their values, and results are rounded once.
    """
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        for function in ir.functions(module).values():
            _widen(function)
        ir.verify(module)
        return ir.to_text(module)


def _widen(function: Operation) -> None:
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
            if op.name == "stablehlo.constant" and _is_narrow(result):
                _convert_behind(result, _following(op))
            else:
                _retype(result)
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
