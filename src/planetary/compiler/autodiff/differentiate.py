"""`differentiate`: the vector-Jacobian product of a StableHLO module, as a StableHLO module.

`emit_forward` and `emit_backward` are the same thing for code that builds a larger function around it, so the forward
pass is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import inline, library_calls, reverse, routines, rules
from planetary.compiler.autodiff.loop_pruning import prune_loops
from planetary.compiler.autodiff.reverse import Forward
from planetary.compiler.frontend import chlo
from planetary.compiler.ir import Module, Value
from planetary.compiler.rewrites.folding import fold_uniform_constants
from planetary.compiler.rewrites.powers import expand_constant_powers
from planetary.core.errors import CompileError, UserError


def load_for_differentiation(source: str | bytes) -> Module:
    """Parse a model into the current context, ready for `emit_forward`: calls are inlined, uniform constants folded,
    and powers with constant exponents are products.

    Args:
        source: StableHLO text, MLIR bytecode or a portable artifact with a function `main`.

    Raises:
        CompileError: it does not parse, has dynamic shapes, no `main`, or recursive functions.
    """
    module = ir.parse_module(source)
    ir.require_static_shapes(module)
    chlo.from_composites(module)
    inline.inline_calls(module, rules.composite_names(), library_calls.composite_name)
    routines.recognise(module)
    fold_uniform_constants(module)
    expand_constant_powers(module)
    return module


def finish_module(module: Module) -> None:
    """Clean up after the last `emit_backward`: expand the composites kept for their rules, erase unused operations, and
    merge equal ones.
    """
    inline.inline_everywhere(module)
    fold_uniform_constants(module)  # the derivative of a power has an exponent that is one less
    expand_constant_powers(module)
    for function in ir.functions(module).values():
        ir.erase_dead(ir.entry_block(function))
        prune_loops(ir.entry_block(function))
        ir.erase_dead(ir.entry_block(function))
    ir.run_passes(module, "cse", "symbol-dce")


def emit_forward(function: ir.Operation, arguments: Sequence[Value]) -> Forward:
    """Emit the operations of a call-free function at the insertion point.

    Returns:
        A `Forward` whose `results` are the function's results.
    """
    return reverse.replay(ir.entry_block(function), arguments)


def emit_backward(forward: Forward, cotangents: Sequence[Value | None], wrt: Sequence[int] = (0,)) -> list[Value]:
    """Emit the gradient computation of an emitted forward pass at the insertion point.

    Args:
        forward: the result of `emit_forward`. Read its `results` after this call: a loop may have been
        replaced
            by one that also saves values for the backward pass.
        cotangents: one per result (same type); None for zero. Ignored for integer results.
        wrt: positions of the arguments to differentiate by.

    Returns:
        One gradient per `wrt` argument, of the argument's type; exact zeros where the results do not
        depend on it.

    Raises:
        UnsupportedOpError: an operation without a rule lies between a `wrt` argument and a result.
        CompileError: a `wrt` position is out of range or names an argument that is no float or complex
        tensor.
    """
    for position in wrt:
        _check_position(forward, position)
    wanted = [forward.arguments[position] for position in wrt]
    found = reverse.pull_back(forward, cotangents, wanted)
    return [
        ops.zeros(value.type) if gradient is None else gradient for value, gradient in zip(wanted, found, strict=True)
    ]


def _check_position(forward: Forward, position: int) -> None:
    count = len(forward.arguments)
    if not 0 <= position < count:
        raise UserError(
            f"cannot differentiate with respect to argument {position}: the function has {count} arguments;"
            f" give positions from 0 to {count - 1}"
        )
    kind = forward.arguments[position].type
    if not ir.is_differentiable_type(kind):
        raise UserError(
            f"cannot differentiate with respect to argument {position}: it has type {kind}, and"
            " only floating-point and complex tensors have gradients; leave it out of `wrt`"
        )


def value_and_gradients(source: str | bytes, wrt: Sequence[int], result: int = 0) -> str:
    """Return StableHLO text whose `@main` takes a model's arguments and returns a result and gradients.

    Args:
        source: as of `differentiate`.
        wrt: positions of the arguments to differentiate by.
        result: position of the scalar result.

    Raises:
        UnsupportedOpError, CompileError, UserError: as `differentiate`.
    """
    with ir.new_context():
        module = load_for_differentiation(source)
        main = ir.main_function(module)
        ir.rename_function(main, "forward_before_differentiation")
        with ir.new_function(module, "main", ir.argument_types(main)) as (arguments, finish):
            forward = emit_forward(main, arguments)
            seeds: list[Value | None] = [None] * len(forward.results)
            seeds[result] = ops.full_like(forward.results[result], 1)
            gradients = emit_backward(forward, seeds, wrt) if wrt else []
            finish([forward.results[result], *gradients])
        ir.erase_function(main)
        finish_module(module)
        ir.verify(module)
        return ir.to_text(module)


def differentiate(stablehlo_text: str | bytes, wrt: Sequence[int] = (0,)) -> str:
    """The vector-Jacobian product of a module's `main`.

    Args:
        stablehlo_text: StableHLO text (or MLIR bytecode, or a portable artifact) with a function `main`.
        wrt: positions of the arguments to differentiate by; each must be a float or complex tensor.

    Returns:
        StableHLO text whose `@main` takes the original arguments, then one cotangent per result (same
        shape and dtype as the result; ignored for integer results), and returns one gradient per `wrt`
        argument (same shape and dtype as the argument). Complex conventions are those of `jax.vjp`.

    Raises:
        UnsupportedOpError: an operation without a rule lies between a `wrt` argument and a result.
        CompileError: the module does not parse or has no `main`.
        UserError: a `wrt` position is out of range or not differentiable.
    """
    with ir.new_context():
        module = load_for_differentiation(stablehlo_text)
        main = ir.main_function(module)
        inputs, results = ir.argument_types(main), ir.result_types(main)
        if not wrt:
            raise UserError("cannot differentiate: `wrt` is empty; name at least one argument position")
        ir.rename_function(main, "forward_before_differentiation")
        with ir.new_function(module, "main", [*inputs, *results]) as (arguments, finish):
            forward = emit_forward(main, arguments[: len(inputs)])
            cotangents = arguments[len(inputs) :]
            finish(emit_backward(forward, cotangents, wrt))
        ir.erase_function(main)
        finish_module(module)
        try:
            ir.verify(module)
        except CompileError as error:
            raise CompileError(f"differentiation produced an invalid module, please report it: {error}") from error
        return ir.to_text(module)
