"""The functions of a module: found, made, renamed, erased; their arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxlib.mlir import ir as mlir
from jaxlib.mlir.dialects import func

from planetary.compiler.ir.graph import erase_dead, terminator
from planetary.compiler.ir.handles import Block, Module, Operation, Type, Value
from planetary.core.errors import CompileError


def functions(module: Module) -> dict[str, Any]:
    """Every `func.func` of the module by name."""
    found: dict[str, Any] = {}
    for op in module.body.operations:
        if op.operation.name == "func.func":
            found[mlir.StringAttr(op.operation.attributes["sym_name"]).value] = op
    return found


def module_of(op: Operation) -> Module:
    """Return the module that an operation lies in."""
    while op.name != "builtin.module":
        op = op.parent.operation
    return op.opview


def main_function(module: Module) -> Any:
    """The function `main`, or the only public function.

    Raises:
        CompileError: there is neither.
    """
    named = functions(module)
    if "main" in named:
        return named["main"]
    public = [f for f in named.values() if "sym_visibility" not in f.operation.attributes]
    if len(public) == 1:
        return public[0]
    raise CompileError(f"the module has no function `main`; it has: {', '.join(named) or 'none'}")


def rename_function(function: Any, name: str) -> None:
    function.operation.attributes["sym_name"] = mlir.StringAttr.get(name)


def set_private(function: Any) -> None:
    function.operation.attributes["sym_visibility"] = mlir.StringAttr.get("private")


def erase_function(function: Any) -> None:
    function.operation.erase()


def copy_function(function: Any, module: Module, name: str) -> None:
    """Put a copy of a function at the end of another module of the same context, under a name."""
    copy = function.operation.clone(mlir.InsertionPoint(module.body))
    copy.attributes["sym_name"] = mlir.StringAttr.get(name)


def keep_results(function: Any, kept: Sequence[int]) -> None:
    """Let a function return only some results, and erase the operations the others alone need."""
    results = terminator(entry_block(function)).operands
    return_values(function, [results[position] for position in kept])


def return_values(function: Any, values: Sequence[Value]) -> None:
    """Let a function return other values of its block, and erase the operations that these do not need."""
    block = entry_block(function)
    end = terminator(block)
    with mlir.InsertionPoint(end), end.location:
        func.ReturnOp(list(values))
    end.operation.erase()
    if "res_attrs" in function.operation.attributes:
        del function.operation.attributes["res_attrs"]
    refresh_function_type(function)
    erase_dead(block)


def drop_arguments(function: Any, dropped: Sequence[int]) -> None:
    """Let a function take some arguments no longer; nothing uses them."""
    block = entry_block(function)
    for position in sorted(dropped, reverse=True):
        block.erase_argument(position)
    if "arg_attrs" in function.operation.attributes:
        del function.operation.attributes["arg_attrs"]
    refresh_function_type(function)


def add_argument(function: Any, kind: Type) -> Value:
    """Let a function take one more argument, the last; return it. `refresh_function_type` follows."""
    if "arg_attrs" in function.operation.attributes:
        del function.operation.attributes["arg_attrs"]
    return entry_block(function).add_argument(kind, mlir.Location.unknown())


def entry_block(function: Any) -> Block:
    """The block that holds a function's operations."""
    return function.operation.regions[0].blocks[0]


def argument_types(function: Any) -> list[Type]:
    return [argument.type for argument in entry_block(function).arguments]


def result_types(function: Any) -> list[Type]:
    return [value.type for value in terminator(entry_block(function)).operands]


def refresh_function_type(function: Any) -> None:
    """Let a function's declared type match the block's arguments and results."""
    kind = mlir.FunctionType.get(argument_types(function), result_types(function))
    function.operation.attributes["function_type"] = mlir.TypeAttr.get(kind)


@contextmanager
def new_function(
    module: Module, name: str, inputs: Sequence[Type], public: bool = True
) -> Iterator[tuple[list[Value], Callable[[Sequence[Value]], None]]]:
    """Open a new function at the end of the module; yields `(arguments, finish)`.

    Inside the `with` the insertion point is the function's body; call `finish(results)` once.
    """
    with mlir.InsertionPoint(module.body):
        function = func.FuncOp(name, (list(inputs), []), visibility=None if public else "private")
    block = function.add_entry_block()

    def finish(results: Sequence[Value]) -> None:
        func.ReturnOp(list(results))
        kind = mlir.FunctionType.get(list(inputs), [value.type for value in results])
        function.attributes["function_type"] = mlir.TypeAttr.get(kind)

    with mlir.InsertionPoint(block):
        yield list(block.arguments), finish
