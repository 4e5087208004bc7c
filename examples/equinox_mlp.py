"""A bag-of-the-last-tokens language model in Equinox: each token is guessed from the few before it.

    pip install equinox
    planetary train examples/stdlib.toml --set model.source=examples/equinox_mlp.py:build --set 'model.options={}'

`equinox.partition` takes a module apart into its arrays, the pytree that planetary trains, and the rest.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class LastTokens(eqx.Module):
    """Token ids [T] to logits [T, vocabulary], each from the `context` newest tokens."""

    embedding: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    context: int = eqx.field(static=True)

    def __init__(self, vocabulary: int, width: int, context: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=first)
        self.mlp = eqx.nn.MLP(context * width, vocabulary, 4 * width, depth=2, activation=jax.nn.silu, key=second)
        self.context = context

    def __call__(self, tokens: jax.Array) -> jax.Array:
        vectors = jax.vmap(self.embedding)(tokens)
        padded = jnp.pad(vectors, ((self.context - 1, 0), (0, 0)))
        seen = [padded[i : i + len(tokens)] for i in range(self.context)]
        return jax.vmap(self.mlp)(jnp.concatenate(seen, axis=-1))


def make(width: int = 64, context: int = 8, vocab_size: int = 256, seed: int = 0) -> LastTokens:
    return LastTokens(vocab_size, width, context, jax.random.key(seed))


def build(batch_size: int = 8, sequence_length: int = 128, **options: Any) -> tuple[Any, Any, Any]:
    """The model that planetary trains: `(loss_fn, params, example_batch)`."""
    params, static = eqx.partition(make(**options), eqx.is_inexact_array)

    def loss_fn(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        found = jax.vmap(eqx.combine(params, static))(tokens)
        log_probs = jax.nn.log_softmax(found)
        return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))

    tokens = np.zeros((batch_size, sequence_length), np.int32)
    return loss_fn, params, (tokens, tokens)


def logits(params: Any, tokens: jax.Array, **options: Any) -> jax.Array:
    """What `planetary generate` samples from."""
    options = {name: value for name, value in options.items() if name not in ("batch_size", "sequence_length")}
    static = eqx.partition(make(**options), eqx.is_inexact_array)[1]
    return jax.vmap(eqx.combine(params, static))(tokens)
