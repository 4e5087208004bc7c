"""One program of all functions of a policy, so parameters are on the device once, and the training's loss.

The loss of a policy's tokens: one formula, of which an objective is a choice of coefficients.

With ρ = π(y) / μ(y), where μ is the token's sampling probability, A the advantage, and ref a reference policy, the loss
of a token is

    - surrogate · keep · min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)    (Schulman et al. 2017, arXiv:1707.06347)
    - likelihood · A · log π
    + drift · (log ρ)²
    + reference · (exp(d) - d - 1),  d = log ref - log π                     (an estimator of KL(π, ref) above 0)

`keep` is 0 for a token whose probability has already moved by more than `mask_gap` in the advantage's direction, and 1
otherwise. The loss is the sum over tokens, weighted as the objective says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import finish_module, load_for_differentiation
from planetary.compiler.check.meaning import with_checked_meaning
from planetary.compiler.frontend import chlo
from planetary.compiler.frontend.export import Model, export_loss
from planetary.compiler.rewrites import normalise
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import CompileError
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.models.context import WholeText
from planetary.models.layers import stop_gradient
from planetary.runs.rl.objectives.terms import LossTerms
from planetary.runs.rl.program.shape import SCORE, TRAIN, PolicyShape
from planetary.runs.serve.program.program import Decode, serving_program
from planetary.runtime.device_program import Program


def policy_program(  # noqa: PLR0917 - the parts of a program
    decode: Decode,
    params: Any,
    specs: tuple[TensorSpec, ...],
    shape: PolicyShape,
    options: StepOptions,
    adapt: Callable[[Model], Model] = lambda loss: loss,
) -> tuple[Program, tuple[TensorSpec, ...], Model]:
    """Build the functions of a policy.

    Returns the program, the optimizer's state, which starts as zeros, and the loss that is trained.

    Args:
        decode: of the model.
        params: a pytree of arrays, or of their shapes.
        specs: leaves in order, as they are named in signatures.
        shape: the sizes to build for.
        options: of the training step.
        adapt: gives the loss adapters, if any.

    Raises:
        CompileError: the model cannot be lowered, or the parameters are named otherwise by the training step.
    """
    served = serving_program(decode, params, specs, shape.serving)
    example = [_example(one, one.shape[0] // shape.micro_batches) for one in shape.batch]
    loss = adapt(export_loss(loss_of(decode), params, example, name="policy"))
    step = build_train_step(loss, options)
    held = step.spec.buffers if loss.adapters else step.spec.params
    if held != specs:
        raise CompileError(
            f"the training step has other parameters than the served model: {held[:2]} and {specs[:2]}, …"
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
        functions = shape.functions(specs, step.spec.opt_state, loss.adapters)
        program = Program(ir.to_portable_artifact(module), functions)
    return program, step.spec.opt_state, loss


def compared_policy(loss: Model, shape: PolicyShape) -> Model:
    """Return the loss of `policy_program` with the result of the comparison with JAX's own in the manifest.

    Loss and gradients are those of drawn texts, whose tokens were about equally likely, with every term of the loss.

    Raises:
        CompileError: they differ; the text names the parameter and the first use.
    """
    rows, random = shape.rows // shape.micro_batches, np.random.default_rng(0)
    of_tokens = (rows, shape.length)
    vocabulary = shape.serving.vocabulary
    tokens = random.integers(0, vocabulary, (rows, shape.length + 1), dtype=np.int32)
    logprobs = [random.normal(-np.log(vocabulary), 0.2, of_tokens).astype(np.float32) for _ in range(2)]
    weights = np.where(random.random(of_tokens) < 0.8, 1 / (rows * shape.length), 0).astype(np.float32)
    advantages = random.standard_normal(of_tokens).astype(np.float32)
    terms = LossTerms(1.0, 0.5, clip_low=0.2, clip_high=0.2, mask_gap=0.5, drift=0.1, reference=0.1).row()
    return with_checked_meaning(loss, [tokens, weights, advantages, *logprobs, np.tile(terms, (rows, 1))])


def _example(spec: TensorSpec, rows: int) -> Any:
    return np.zeros((rows, *spec.shape[1:]), host_dtype(spec.dtype))


def policy_loss(  # noqa: PLR0917 - the order of the step's data
    logprobs: jax.Array,
    weights: jax.Array,
    advantages: jax.Array,
    sampled: jax.Array,
    reference: jax.Array,
    terms: jax.Array,
) -> jax.Array:
    """Return the weighted sum of the tokens' losses, a scalar.

    Args:
        logprobs: f32 [B, T], log π of each token.
        weights: f32 [B, T]; 0 for tokens that are no policy's.
        advantages: f32 [B, T].
        sampled: f32 [B, T], log μ.
        reference: f32 [B, T], log ref.
        terms: f32 [B, TERMS], the coefficients in the order of `LossTerms`.
    """
    surrogate, likelihood, low, high, gap, drift, divergence = (terms[:, i : i + 1] for i in range(terms.shape[1]))
    log_ratio = jnp.where(weights != 0, logprobs - sampled, 0.0)
    ratio = jnp.exp(log_ratio)
    plain = ratio * advantages
    bounded = jnp.where(ratio < 1 - low, 1 - low, jnp.where(ratio > 1 + high, 1 + high, ratio)) * advantages
    moved = jnp.sign(advantages) * (jnp.exp(logprobs) - jnp.exp(sampled))
    kept = jnp.where(moved > gap, 0.0, jnp.where(plain <= bounded, plain, bounded))
    away = jnp.where(weights != 0, reference - logprobs, 0.0)
    loss = (
        -surrogate * kept
        - likelihood * advantages * logprobs
        + drift * log_ratio * log_ratio
        + divergence * (jnp.exp(away) - away - 1)
    )
    return jnp.sum(weights * loss)


def token_logprobs(decode: Decode, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities f32 [B, T] of the tokens after the first, and each distribution's entropy, in nats.

    Args:
        decode: of the model.
        params: parameters of the policy.
        tokens: i32 [B, T + 1]. Picked by comparison, not by a gather: the gradient is no scatter.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = decode(params, inputs, WholeText(inputs)).astype(jnp.float32)
    shifted = logits - stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    exponents = jnp.exp(shifted)
    total = jnp.sum(exponents, axis=-1)
    chosen = jnp.where(targets[..., None] == jnp.arange(logits.shape[-1]), shifted, 0.0)
    log_total = jnp.log(total)
    entropy = log_total - jnp.sum(exponents * shifted, axis=-1) / total
    return jnp.sum(chosen, axis=-1) - log_total, entropy


def loss_of(decode: Decode) -> Callable[..., jax.Array]:
    """Return `loss(params, tokens, weights, advantages, sampled, reference, terms)` of a model."""

    def loss(  # noqa: PLR0917 - the order of a compiled function's arguments
        params: Any,
        tokens: jax.Array,
        weights: jax.Array,
        advantages: jax.Array,
        sampled: jax.Array,
        reference: jax.Array,
        terms: jax.Array,
    ) -> jax.Array:
        logprobs, _ = token_logprobs(decode, params, tokens)
        return policy_loss(logprobs, weights, advantages, sampled, reference, terms)

    return loss
