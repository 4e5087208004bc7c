"""What the whole forward pass of a served model makes of a text, which its compiled functions are compared with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.core.errors import CompileError
from planetary.core.trial_numbers import random_words
from planetary.models.context import WholeText
from planetary.models.layers import causal_attention
from planetary.serve.program.served_model import ServedModel
from planetary.serve.program.serving_shape import ServingShape
from planetary.serve.program.serving_trial import TOLERANCE, ServingTrial, trial_length

NOISE_FACTOR = 4.0
"""Accepted errors are at least so many times what rounding keys and values to 16 bits changes: they are rounded before
they are attended to in one execution, and after that in another."""
MOST_ACCEPTED = 0.5
"""In nats. Beyond it a wrong key would pass for a rounded one."""


def trial_of(model: ServedModel, shape: ServingShape) -> ServingTrial:
    """Compute the whole forward pass with XLA, in float32.

    Raises:
        CompileError: it computes numbers that are not finite, or 16 bits are not enough for the model's cache.
    """
    count = trial_length(shape)
    words = random_words(f"trial of a served model, {count} of {shape.vocabulary}", count)
    tokens = (words % np.uint64(min(shape.vocabulary, model.tokenizer.vocab_size))).astype(np.int32)
    exact = _log_probabilities(model, tokens)
    if not np.isfinite(exact).all():
        raise CompileError(
            f"the model {model.name} computes log-probabilities that are not finite: it cannot be served"
        )
    noise = 0.0
    if shape.element != "f32" and shape.memory.is_shared:
        noise = float(np.max(np.abs(_log_probabilities(model, tokens, rounded=True) - exact)))
    accepted = max(TOLERANCE, NOISE_FACTOR * noise)
    if accepted > MOST_ACCEPTED:
        raise CompileError(
            f"keys and values of {shape.element} change log-probabilities of {model.name} by {noise:.2g} nats: "
            "serve it with serve.cache_precision = 'f32'"
        )
    ids = np.argsort(-exact, axis=1, kind="stable")[:, : shape.candidates].astype("<i4")
    values = np.take_along_axis(exact, ids, axis=1).astype("<f4")
    following = np.append(exact[np.arange(count - 1), tokens[1:]], 0.0).astype("<f4")
    return ServingTrial(tuple(tokens.tolist()), ids.tobytes(), values.tobytes(), following.tobytes(), accepted)


def _log_probabilities(model: ServedModel, tokens: np.ndarray, *, rounded: bool = False) -> np.ndarray:
    """Return them f32 [places, V]; `rounded`: with keys and values of bfloat16."""

    def whole(params: Any, text: jax.Array) -> jax.Array:
        context = WholeText(text, _rounded_attention) if rounded else WholeText(text)
        return jax.nn.log_softmax(model.decode(params, text, context)[0].astype(jnp.float32))

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(whole)(model.params, tokens[None]))


def _rounded_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    def round_(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    return causal_attention(query, round_(key), round_(value))
