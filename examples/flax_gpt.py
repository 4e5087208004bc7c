"""A small GPT in Flax NNX.

    pip install flax
    planetary train examples/stdlib.toml --set model.source=examples/flax_gpt.py:build --set 'model.options={}'

`nnx.split` takes a module apart into its graph and its parameters; the parameters are the pytree that
planetary trains, and the loss puts the two together again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class FlaxGpt(nnx.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int, rngs: nnx.Rngs) -> None:
        self.embedding, self.position = nnx.Embed(vocabulary, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens) + self.position(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def make(
    *,
    n_layer: int = 2,
    n_embd: int = 128,
    n_head: int = 4,
    vocab_size: int = 256,
    sequence_length: int = 128,
    batch_size: int = 8,
    seed: int = 0,
) -> FlaxGpt:
    rngs = nnx.Rngs(seed)
    return FlaxGpt(layers=n_layer, width=n_embd, heads=n_head, vocabulary=vocab_size, length=sequence_length, rngs=rngs)


def build(batch_size: int = 8, sequence_length: int = 128, **options: Any) -> tuple[Any, Any, Any]:
    """The model that planetary trains: `(loss_fn, params, example_batch)`."""
    graph, params, rest = nnx.split(make(sequence_length=sequence_length, **options), nnx.Param, ...)

    def loss_fn(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        found = nnx.merge(graph, params, rest)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(found, targets).mean()

    tokens = np.zeros((batch_size, sequence_length), np.int32)
    return loss_fn, params, (tokens, tokens)


def logits(params: Any, tokens: jax.Array, **options: Any) -> jax.Array:
    """What `planetary generate` samples from."""
    graph, _, rest = nnx.split(make(**options), nnx.Param, ...)
    return nnx.merge(graph, params, rest)(tokens)
