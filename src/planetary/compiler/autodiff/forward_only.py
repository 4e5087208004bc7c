"""A module that is computed and not differentiated: every call inlined, no rule of the derivative asked."""

from __future__ import annotations

from planetary.compiler import ir
from planetary.compiler.autodiff import inline
from planetary.compiler.frontend import chlo
from planetary.compiler.ir import Module
from planetary.compiler.rewrites.folding import fold_uniform_constants
from planetary.compiler.rewrites.powers import expand_constant_powers


def load_forward(source: str | bytes) -> Module:
    """Parse a model into the current context: calls and composites are inlined, uniform constants folded, and powers
    with constant exponents are products.

    Args:
        source: StableHLO text, MLIR bytecode or a portable artifact with a function `main`.

    Raises:
        CompileError: it does not parse, has dynamic shapes, no `main`, or recursive functions.
    """
    module = ir.parse_module(source)
    ir.require_static_shapes(module)
    chlo.from_composites(module)
    inline.inline_calls(module)
    fold_uniform_constants(module)
    expand_constant_powers(module)
    return module


def finish_forward(module: Module) -> None:
    """Erase unused operations, and merge equal ones."""
    for function in ir.functions(module).values():
        ir.erase_dead(ir.entry_block(function))
    ir.run_passes(module, "cse", "symbol-dce")
