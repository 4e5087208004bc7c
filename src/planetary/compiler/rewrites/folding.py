"""Folding of uniform constants: a result of constants that repeat one number becomes such a constant itself.

torch-mlir writes a number of the program as a separate `i64` or `f64` constant, converted, reshaped and broadcast to
where it is used, and the shape that `arange` takes as 64-bit arithmetic. A rewrite for the value of an exponent, and
the demotion of f64, must see through that; so the numbers are folded once, before anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.ir import Module, Operation, Type, Value

_SHAPES = frozenset({
    "stablehlo.broadcast_in_dim",
    "stablehlo.reshape",
    "stablehlo.slice",
    "stablehlo.transpose",
})  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "stablehlo.abs": np.abs,
    "stablehlo.ceil": np.ceil,
    "stablehlo.floor": np.floor,
    "stablehlo.negate": np.negative,
    "stablehlo.sqrt": np.sqrt,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "stablehlo.add": np.add,
    "stablehlo.subtract": np.subtract,
    "stablehlo.multiply": np.multiply,
    "stablehlo.divide": np.divide,
}
_DTYPES: dict[str, Any] = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "i32": np.int32,
    "i64": np.int64,
}


def fold_uniform_constants(module: Module) -> None:
    """Fold, in place, every operation whose operands are uniform constants and whose result is exactly known.

    Shapes are changed, element types converted, and the four operations of arithmetic carried out in the element
    type. A `dynamic_iota` of a known type becomes an `iota`. Operations without uses are erased afterwards.
    """
    found: list[Operation] = []
    ir.walk(module.operation, found.append)
    for op in found:
        if op.name == "stablehlo.dynamic_iota":
            _replace_iota(op)
            continue
        number = _folded(op)
        if number is not None:
            with ir.insert_before(op), ir.located(op):
                kind = op.results[0].type
                folded = ops.full(ir.shape_of_type(kind), ir.element_of_type(kind), number)
            ir.replace_uses(op.results[0], folded)
            op.erase()
    for function in ir.functions(module).values():
        ir.erase_dead(ir.entry_block(function))


def uniform_number(value: Value) -> int | float | None:
    """Return the number an integer or float constant repeats, however it is spread over a shape; None for any other
    value.
    """
    op = ir.defining_op(value)
    while op is not None and op.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        op = ir.defining_op(op.operands[0])
    return None if op is None or op.name != "stablehlo.constant" else ir.constant_number(op)


def _folded(op: Operation) -> int | float | None:
    known = op.name in _SHAPES or op.name in _UNARY or op.name in _BINARY or op.name == "stablehlo.convert"
    if not known or len(op.results) != 1:
        return None
    sources = [ir.defining_op(operand) for operand in op.operands]
    numbers = [ir.constant_number(source) if source is not None else None for source in sources]
    given = [number for number in numbers if number is not None]
    if len(given) != len(numbers):
        return None
    if op.name in _SHAPES:
        return given[0]
    element = ir.element_of(op.results[0])
    wide = _DTYPES.get(str(element)), _DTYPES.get(str(ir.element_of(op.operands[0])))
    if wide[0] is None or wide[1] is None:
        return None
    if op.name == "stablehlo.convert":
        return _converted(given[0], element, wide[0])
    if ir.is_integer_element(element) and (op.name == "stablehlo.divide" or op.name not in (*_BINARY, *_UNARY)):
        return None  # towards zero or not, and by zero: left to the compiler
    with np.errstate(all="ignore"):
        held = [wide[0](number) for number in given]
        result = _UNARY[op.name](held[0]) if op.name in _UNARY else _BINARY[op.name](*held)
    return result.item() if not isinstance(result, ml_dtypes.bfloat16) else float(result)


def _converted(number: int | float, element: Type, dtype: Any) -> int | float | None:
    if not ir.is_integer_element(element):
        with np.errstate(over="ignore"):
            return float(dtype(number))
    whole = int(number) if np.isfinite(number) else None
    limits = np.iinfo(dtype)
    return whole if whole is not None and limits.min <= whole <= limits.max else None


def _replace_iota(op: Operation) -> None:
    """A `dynamic_iota` takes the shape as an operand, which must match the result's type."""
    kind = op.results[0].type
    with ir.insert_before(op), ir.located(op):
        made = ops.iota(list(ir.shape_of_type(kind)), ir.element_of_type(kind), ir.integer(op, "iota_dimension"))
    ir.replace_uses(op.results[0], made)
    op.erase()
