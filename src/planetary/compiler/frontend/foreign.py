"""What exporters other than JAX leave in a module, turned into plain StableHLO.

torch-mlir writes constants with the `arith` dialect, single numbers through `tensor.from_elements`, large
tensors as resources beside the code, and a global seed that nothing reads.
"""

from __future__ import annotations

import re

from planetary.compiler import ir
from planetary.compiler.ir import Module, Operation
from planetary.core.errors import CompileError

_KNOWN_DIALECTS = ("builtin", "func", "stablehlo", "chlo", "sdy", "mhlo")
_GLOBAL = re.compile(rb"^[ \t]*ml_program\.global\b.*$", re.MULTILINE)
_BYTECODE = b"ML\xefR"


def without_globals(source: bytes) -> bytes:
    """Return MLIR text without its `ml_program.global` lines, which no parser here knows. A global that the
    code reads is still found: by the parser, at its use.
    """
    return source if source.startswith(_BYTECODE) else _GLOBAL.sub(b"", source)


def to_stablehlo(module: Module) -> None:
    """Rewrite a module, in place, so that it has StableHLO operations only.

    Raises:
        CompileError: an operation of another dialect is more than a constant; the text names it.
    """
    resources: dict[str, bytes] | None = None
    for op in _operations(module, "arith.constant", "stablehlo.constant"):
        result = op.results[0]
        if not ir.is_tensor(result):
            continue  # a single number: its user is asked below
        if ir.is_complex(result):
            continue  # the bindings have no attribute for complex numbers, and nobody stores them as resources
        value = op.attributes["value"]
        resource = ir.resource_name(value)
        if resource is not None:
            if resources is None:
                resources = ir.resources(module)
            value = ir.raw_attribute(resources[resource], result.type)
        if resource is not None or op.name == "arith.constant":
            _replace(op, value)
    for op in _operations(module, "tensor.from_elements"):
        numbers = [ir.defining_op(operand) for operand in op.operands]
        if all(number is not None and number.name == "arith.constant" for number in numbers):
            _replace(op, ir.elements_attribute([n.attributes["value"] for n in numbers if n], op.results[0].type))
    for op in reversed(_operations(module, "arith.constant", "tensor.from_elements")):
        if not any(ir.has_uses(result) for result in op.results):
            op.erase()
    for op in _operations(module):
        dialect = op.name.partition(".")[0]
        if dialect not in _KNOWN_DIALECTS:
            raise CompileError(
                f"cannot use {op.name} at {ir.location_text(op)}: of the dialects beside StableHLO only constants "
                "are understood; export the model with every operation as StableHLO"
            )


def _operations(module: Module, *names: str) -> list[Operation]:
    """All operations with one of these names, or without names all there are, in order."""
    found: list[Operation] = []

    def visit(op: Operation) -> None:
        if not names or op.name in names:
            found.append(op)

    ir.walk(module, visit)
    return found


def _replace(op: Operation, value: ir.Attribute) -> None:
    with ir.insert_before(op), ir.located(op):
        made = ir.emit("stablehlo.constant", [], [op.results[0].type], {"value": value})
    ir.replace_uses(op.results[0], made.results[0])
    op.erase()
