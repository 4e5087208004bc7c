"""Demotion of f64: what a model computes in 64 bits between its arguments and its loss is computed in f32.

Exporters leave 64-bit islands in models of 16 and 32 bits: Python numbers, and statistics of a norm that were asked
for in double precision. IREE computes them in f32 without a word (`--iree-input-demote-f64-to-f32` is its default,
and most of its targets have no f64), so a reference that computes in f64 is another function. Here the demotion is
part of the training step's StableHLO: reference and artifact compute the same, and tolerances are those of f32.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from planetary.compiler import ir
from planetary.compiler.ir import Module, Operation, Value
from planetary.core.errors import CompileError

_FREE = frozenset({"func.func", "func.return", "stablehlo.return", "stablehlo.constant", "stablehlo.convert"})
_MOST_NAMES = 6  # kinds of operations in a note


def f64_operations(module: Module) -> Counter[str]:
    """Count the operations that compute in f64, by name; constants, conversions and returns do not compute."""
    found: Counter[str] = Counter()

    def visit(op: Operation) -> None:
        if op.name not in _FREE and any(_is_f64(value) for value in (*op.operands, *op.results)):
            found[op.name] += 1

    ir.walk(module.operation, visit)
    return found


def demote_f64(module: Module, model: str) -> str:
    """Compute, in place, in f32 what a module computes in f64, and return a note about it; "" if there is none.

    Finite constants stay finite and others than 0 stay so: beyond f32's range they become its largest or smallest
    normal number. A loss of f64 becomes one of f32.

    Raises:
        CompileError: an argument is f64, or the bits of an f64 are taken apart.
    """
    main = ir.main_function(module)
    for position, kind in enumerate(ir.argument_types(main)):
        if "f64" in str(ir.element_of_type(kind)):
            raise CompileError(
                f"model {model}: argument {position} of main has the type {kind}; arguments are kept and sent as they "
                "are, and training computes in f32 at most: export the model in float32 (in PyTorch `model.float()`, "
                "and `.float()` for inputs)"
            )
    counts = f64_operations(module)
    if counts["stablehlo.bitcast_convert"]:
        raise CompileError(
            f"model {model} takes the bits of f64 numbers (stablehlo.bitcast_convert), which f32 does not have; "
            "export it without that operation"
        )
    found: list[Operation] = []
    ir.walk(module.operation, found.append)
    for op in found:
        for region in op.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    _demote_value(argument)
        if op.name == "stablehlo.constant" and _is_f64(op.results[0]):
            _demote_constant(op)
        for result in op.results:
            _demote_value(result)
    for function in ir.functions(module).values():
        ir.refresh_function_type(function)
    for op in found:
        if op.name == "stablehlo.convert" and op.operands[0].type == op.results[0].type:
            ir.replace_uses(op.results[0], op.operands[0])
            op.erase()
    return note_about(counts)


def refuse_f64(module: Module, model: str) -> None:
    """Raise `CompileError` if a module computes anything in f64."""
    counts = f64_operations(module)
    if counts:
        raise CompileError(
            f'model {model} computes in float64 and train.f64 is "refuse": {_listed(counts)}; export it without '
            'double precision, or set train.f64 = "demote" to compute these operations in float32'
        )


def note_about(counts: Counter[str]) -> str:
    """Return the sentence for reports about operations that were demoted; "" for none."""
    total = sum(counts.values())
    if not total:
        return ""
    return (
        f"{total} float64 operations of the model ({_listed(counts)}) are computed in float32, as IREE has no float64 "
        "on most targets; the reference computes the same"
    )


def _listed(counts: Counter[str]) -> str:
    kinds = ", ".join(f"{n} × {name.removeprefix('stablehlo.')}" for name, n in counts.most_common(_MOST_NAMES))
    return kinds + (", …" if len(counts) > _MOST_NAMES else "")


def _is_f64(value: Value) -> bool:
    return ir.is_tensor(value) and ir.element_of(value) == ir.f64()


def _demote_value(value: Value) -> None:
    if _is_f64(value):
        value.set_type(ir.tensor(ir.shape_of(value), ir.f32()))


def _demote_constant(op: Operation) -> None:
    number = ir.constant_number(op)
    kind = ir.tensor(ir.shape_of(op.results[0]), ir.f32())
    if number is not None:
        op.attributes["value"] = ir.splat_attribute(kind, float(_narrowed(np.float64(number))))
        return
    array = ir.constant_value(op)
    assert array is not None
    op.attributes["value"] = ir.array_attribute(_narrowed(array))


def _narrowed(numbers: np.ndarray | np.float64) -> np.ndarray:
    """Round to f32, with finite numbers kept finite and others than 0 kept so."""
    wide = np.asarray(numbers, np.float64)
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype(np.float32)
    narrow = np.where(np.isfinite(wide) & ~np.isfinite(narrow), np.copysign(limits.max, wide), narrow)
    narrow = np.where((wide != 0) & (np.abs(narrow) < limits.tiny), np.copysign(limits.tiny, wide), narrow)
    return narrow.astype(np.float32)
