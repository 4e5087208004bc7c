"""One program of all functions of a policy, so that its parameters are on the device once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import finish_module, load_for_differentiation
from planetary.compiler.frontend import chlo
from planetary.compiler.frontend.export import export_loss
from planetary.compiler.rewrites import normalise
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import CompileError
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.rl.program.policy_loss import loss_of, token_logprobs
from planetary.rl.program.policy_shape import SCORE, TRAIN, PolicyShape
from planetary.runtime.program_runner import Program
from planetary.serve.program.serving_program import Decode, serving_program


def policy_program(
    decode: Decode, params: Any, specs: tuple[TensorSpec, ...], shape: PolicyShape, options: StepOptions
) -> tuple[Program, tuple[TensorSpec, ...]]:
    """Build the functions of a policy; return the program and the optimizer's state, which starts as zeros.

    Args:
        decode: of the model.
        params: a pytree of arrays, or of their shapes.
        specs: its leaves in order, as they are named in signatures.
        shape: the sizes to build for.
        options: of the training step.

    Raises:
        CompileError: the model cannot be lowered, or its parameters are named otherwise by the training step.
    """
    served = serving_program(decode, params, specs, shape.serving)
    parts = shape.micro_batches
    example = [_example(one, one.shape[0] // parts) for one in shape.batch]
    step = build_train_step(export_loss(loss_of(decode), params, example, name="policy"), options)
    if step.spec.params != specs:
        raise CompileError(
            f"the training step has other parameters than the served model: {step.spec.params[:2]} and {specs[:2]}, …"
        )
    templates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), params)
    tokens = jax.ShapeDtypeStruct((shape.rows, shape.length + 1), jnp.int32)
    scored = jax.jit(lambda params, tokens: token_logprobs(decode, params, tokens), keep_unused=True)
    with ir.new_context():
        module, other = ir.parse_module(served.portable), ir.parse_module(step.portable)
        ir.copy_function(ir.functions(other)[TRAIN], module, TRAIN)
        one = load_for_differentiation(scored.lower(templates, tokens).as_text())
        normalise.picks_to_selects(one)
        finish_module(one)
        chlo.expand(one)
        ir.copy_function(ir.main_function(one), module, SCORE)
        ir.verify(module)
        program = Program(ir.to_portable_artifact(module), shape.functions(specs, step.spec.opt_state))
    return program, step.spec.opt_state


def _example(spec: TensorSpec, rows: int) -> Any:
    import numpy as np

    return np.zeros((rows, *spec.shape[1:]), host_dtype(spec.dtype))
