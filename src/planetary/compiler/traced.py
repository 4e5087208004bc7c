"""Emit what a JAX function computes, at the insertion point: for rules that need a whole library routine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planetary.compiler import inline, ir
from planetary.compiler.ir import Type, Value

_DTYPES = {
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "ui8": "uint8",
    "ui16": "uint16",
    "ui32": "uint32",
    "ui64": "uint64",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def dtype_name(element: Type) -> str:
    """The JAX name of an element type, e.g. `"float32"`."""
    return _DTYPES[str(element)]


def emit_traced(function: Callable[..., Any], *values: Value) -> list[Value]:
    """Trace `function` for the shapes and dtypes of `values` and emit its operations.

    Args:
        function: takes JAX arrays and returns one or several.
        values: its arguments in the graph that is being built.

    Returns:
        Its results, flattened.
    """
    import jax

    with jax.enable_x64(True):
        specs = [jax.ShapeDtypeStruct(ir.shape_of(v), jax.numpy.dtype(dtype_name(ir.element_of(v)))) for v in values]
        text = jax.jit(function, keep_unused=True).lower(*specs).as_text()
    module = ir.parse_module(text)
    inline.inline_calls(module)
    return inline.copy_block(ir.entry_block(ir.main_function(module)), values)
