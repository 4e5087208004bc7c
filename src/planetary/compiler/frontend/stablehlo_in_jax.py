"""A StableHLO function as part of a JAX function, which can be traced and compiled with the code around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir as lowering

from planetary.compiler import ir, ops
from planetary.core.errors import CompileError

_TYPES = {"f32": "float32", "f64": "float32", "bf16": "bfloat16", "f16": "float16", "i64": "int32", "i32": "int32"}
"""Element type -> that of JAX, which keeps numbers in 32 bits; a function's own are converted where they differ."""

_ELEMENTS = {"float32": ir.f32, "bfloat16": ir.bf16, "float16": ir.f16, "int32": ir.i32}


def jax_function(portable: bytes, name: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function that takes and returns arrays of the StableHLO function's shapes, under `jax.jit`.

    Args:
        portable: a module whose function calls no other.
        name: of the function.

    Raises:
        CompileError: there is no such function, or a result has a type that JAX has not.
    """
    with ir.new_context():
        module = ir.parse_module(portable)  # named: the functions live as long as `named`
        found = ir.functions(module).get(name)
        if found is None:
            raise CompileError(f"the module has no function {name!r}")
        kinds = [(ir.shape_of_type(kind), str(ir.element_of_type(kind))) for kind in ir.result_types(found)]
    if strange := sorted({element for _, element in kinds} - set(_TYPES)):
        raise CompileError(f"{name} returns {strange[0]}, which is no type of numbers in JAX")
    results = tuple((shape, _TYPES[element]) for shape, element in kinds)

    def call(*arguments: Any) -> tuple[jax.Array, ...]:
        return tuple(_inlined.bind(*arguments, portable=portable, name=name, results=results))

    return call


_inlined = Primitive("stablehlo_function")
_inlined.multiple_results = True


@_inlined.def_abstract_eval
def _abstract(*arguments: Any, results: tuple[tuple[tuple[int, ...], str], ...], **_: Any) -> list[Any]:
    return [ShapedArray(shape, jax.numpy.dtype(dtype)) for shape, dtype in results]


def _lower(context: Any, *arguments: Any, portable: bytes, name: str, results: Any) -> Sequence[Any]:
    """Put copies of the function's operations where JAX emits operations."""
    module = ir.parse_module(portable)
    function = ir.functions(module)[name]
    block = ir.entry_block(function)
    here = {
        inner: ops.convert(given, ir.element_of(inner)) for inner, given in zip(block.arguments, arguments, strict=True)
    }
    *body, end = ir.operations(block)
    for op in body:
        copy = ir.clone(op, [here[value] for value in op.operands])
        ir.replace_captured(copy, here)
        here.update(zip(op.results, copy.results, strict=True))
    wanted = (_ELEMENTS[dtype]() for _, dtype in results)
    return [ops.convert(here[value], kind) for value, kind in zip(end.operands, wanted, strict=True)]


lowering.register_lowering(_inlined, _lower)
