"""Emit the operations of a JAX function at the insertion point: for rules that need a whole library routine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from planetary.compiler import ir
from planetary.compiler.autodiff import inline
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
    """Trace `function` for the shapes and dtypes of `values` and emit the operations.

    Args:
        function: takes JAX arrays and returns one or several.
        values: arguments in the graph under construction.

    Returns:
        The results, flattened.
    """
    return _emit(_export(function, _specs(values)), values)


def emit_pull_back(
    function: Callable[..., Any], cts: Sequence[Value | None], arguments: Sequence[Value], wanted: Sequence[bool]
) -> list[Value | None]:
    """Emit JAX's gradient of `function`.

    Args:
        function: takes JAX arrays and returns one or several.
        cts: cotangents of the results, flattened; None for a result that counts for nothing.
        arguments: arguments in the graph under construction.
        wanted: for every argument, whether a gradient is needed.

    Returns:
        One gradient per argument, None where none is wanted.
    """
    present = tuple(i for i, ct in enumerate(cts) if ct is not None)
    values = [*(ct for ct in cts if ct is not None), *arguments]
    found = _emit(_export_pull_back(function, present, tuple(wanted), _specs(values)), values)
    return [found.pop(0) if is_wanted else None for is_wanted in wanted]


_Spec = tuple[tuple[int, ...], str]


def _specs(values: Sequence[Value]) -> tuple[_Spec, ...]:
    return tuple((ir.shape_of(v), dtype_name(ir.element_of(v))) for v in values)


@lru_cache(maxsize=256)
def _export(function: Callable[..., Any], specs: tuple[_Spec, ...]) -> str:
    import jax

    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in specs]
        return jax.jit(function, keep_unused=True).lower(*arguments).as_text()


@lru_cache(maxsize=256)
def _export_pull_back(
    function: Callable[..., Any], present: tuple[int, ...], wanted: tuple[bool, ...], specs: tuple[_Spec, ...]
) -> str:
    import jax

    positions = [i for i, is_wanted in enumerate(wanted) if is_wanted]

    def backward(*given: Any) -> Any:
        cts, arguments = given[: len(present)], given[len(present) :]

        def of_wanted(*inner: Any) -> Any:
            full = list(arguments)
            for position, value in zip(positions, inner, strict=True):
                full[position] = value
            results = jax.tree.leaves(function(*full))
            return tuple(results[i] for i in present)

        return jax.vjp(of_wanted, *(arguments[i] for i in positions))[1](cts)

    return _export(backward, specs)


def _emit(text: str, values: Sequence[Value]) -> list[Value]:
    module = ir.parse_module(text)
    inline.inline_calls(module)
    return inline.copy_block(ir.entry_block(ir.main_function(module)), values)
