"""Bring a module into the form that differentiation works on: one function `main` without calls.

Every call is replaced by the callee's operations, and so is every composite (by its decomposition) except those with a
rule of their own. The size of the result is that of the executed program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from planetary.compiler import ir
from planetary.compiler.ir import Block, Operation, Value
from planetary.core.errors import CompileError

Recogniser: TypeAlias = Callable[[str, Block], "str | None"]


def _nothing_known(symbol: str, block: Block) -> None:
    return None


def inline_calls(
    module: ir.Module, keep_composites: Collection[str] = (), recognise: Recogniser = _nothing_known
) -> None:
    """Inline every call and every composite whose name is not in `keep_composites`, and drop unused
    functions.

    Args:
        module: changed in place.
        keep_composites: names of composites that stay.
        recognise: given a function's name and flattened body, returns the name of the composite a call of it becomes,
            or None.

    Raises:
        CompileError: a function calls itself, or calls one the module does not have.
    """
    main = ir.main_function(module)
    for function in ir.functions(module).values():
        if function != main:
            ir.set_private(function)
    inline_everywhere(module, keep_composites, recognise)


def inline_everywhere(
    module: ir.Module, keep_composites: Collection[str] = (), recognise: Recogniser = _nothing_known
) -> None:
    """Like `inline_calls`, in a module with several public functions, all of which stay."""
    named = ir.functions(module)
    done: dict[str, str | None] = {}
    with ir.not_recording():
        for name in named:
            _flatten(name, named, keep_composites, recognise, done, [])
    ir.run_passes(module, "symbol-dce")


def _flatten(  # noqa: PLR0917 - a recursion's state
    name: str,
    named: Mapping[str, Any],
    keep: Collection[str],
    recognise: Recogniser,
    done: dict[str, str | None],
    open_calls: list[str],
) -> None:
    """Flatten a function and those it calls; `done` gets the recognised routine of each, or None."""
    if name in done:
        return
    if name in open_calls:
        raise CompileError(
            f"cannot inline @{name}: it calls itself ({' -> '.join([*open_calls, name])}); a recursive"
            " function has no fixed size and cannot be differentiated"
        )
    function = named[name]
    for call, callee in _calls(function, keep):
        if callee not in named:
            raise CompileError(
                f"cannot inline the call of @{callee} at {ir.location_text(call)}: there is no such"
                " function in the module"
            )
        _flatten(callee, named, keep, recognise, done, [*open_calls, name])
        known = done[callee] if call.name == "func.call" else None
        with ir.insert_before(call), ir.located(call):
            if known is None:
                site = call if ir.has_source_line(call) else None
                results = copy_block(ir.entry_block(named[callee]), list(call.operands), site)
            else:
                results = composite(known, callee, list(call.operands), [r.type for r in call.results])
        for old, new in zip(call.results, results, strict=True):
            ir.replace_uses(old, new)
        call.erase()
    done[name] = recognise(name, ir.entry_block(function))


def composite(
    name: str,
    decomposition: str,
    operands: Sequence[Value],
    results: Sequence[ir.Type],
    fields: Mapping[str, ir.Attribute] | None = None,
) -> list[Value]:
    """Emit a composite, perhaps with attributes, whose decomposition is a function of the module."""
    attributes = {"name": ir.string_attribute(name), "decomposition": ir.symbol_attribute(decomposition)}
    if fields is not None:
        attributes["composite_attributes"] = ir.dictionary_attribute(fields)
    return list(ir.emit("stablehlo.composite", operands, results, attributes).results)


def copy_block(block: Block, arguments: Sequence[Value], call: Operation | None = None) -> list[Value]:
    """Copy the operations of a function body to the insertion point; return the body's results.

    Operations without a line of source get that of `call`, if given.
    """
    mapping: dict[Value, Value] = dict(zip(block.arguments, arguments, strict=True))
    body = ir.operations(block)
    for op in body[:-1]:
        copy = ir.clone(op, [mapping[value] for value in op.operands])
        if call is not None and not ir.has_source_line(copy):
            ir.add_call_site(copy, call)
        if len(op.regions):
            ir.replace_captured(copy, mapping)
        mapping.update(zip(op.results, copy.results, strict=True))
    return [mapping[value] for value in body[-1].operands]


def _calls(function: Any, keep: Collection[str]) -> list[tuple[Operation, str]]:
    """The calls and expandable composites in a function, with the names of their callees."""
    found: list[tuple[Operation, str]] = []

    def visit(op: Operation) -> None:
        if op.name == "func.call":
            found.append((op, ir.text(op, "callee")))
        elif op.name == "stablehlo.composite" and ir.text(op, "name") not in keep:
            found.append((op, ir.text(op, "decomposition")))

    ir.walk(function, visit)
    return found
