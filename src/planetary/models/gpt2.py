"""GPT-2 (Radford et al. 2019), with the parameter names and layouts of the published checkpoints.

Learned positions, pre-norm blocks, biases everywhere, the tanh form of GELU, a head tied to the embedding.

Shapes are written with B = batch, T = sequence, C = width, V = vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.models.context import CacheSizes, Context, PackedText, WholeText
from planetary.models.initial import Params, draw, normal, ones, zeros
from planetary.models.layers import cross_entropy, layer_norm
from planetary.models.model_options import configure, require_counts, require_multiple


class Gpt2Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch.

    `n_position`: learned positions; absent: as many as `sequence_length`. `segments`: a batch is packed texts.
    """

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    vocab_size: int = 256
    sequence_length: int = 128
    batch_size: int = 8
    seed: int = 0
    n_position: int | None = None
    segments: bool = False

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("gpt2", self)
        require_multiple("gpt2", self, "n_embd", "n_head")
        if self.positions < self.sequence_length:
            raise UserError(
                f"gpt2: it has n_position={self.positions} positions, fewer than sequence_length={self.sequence_length}"
            )

    @property
    def positions(self) -> int:
        """How many positions the model has learned, or will."""
        return self.sequence_length if self.n_position is None else self.n_position


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2},
    "default": {},
    "124m": {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50_257, "sequence_length": 1024},
}


def parameters(config: Gpt2Config) -> Params:
    """Return the initial distributions: deviation 0.02, less for matrices on the residual stream (section 2.3)."""
    width = config.n_embd

    def project(inputs: int, outputs: int, deviation: float = 0.02) -> Params:
        return {"weight": normal(inputs, outputs, deviation=deviation), "bias": zeros(outputs)}

    def norm() -> Params:
        return {"weight": ones(width), "bias": zeros(width)}

    writes = 0.02 * (2 * config.n_layer) ** -0.5
    block = {
        "ln_1": norm(),
        "attn": {"c_attn": project(width, 3 * width), "c_proj": project(width, width, writes)},
        "ln_2": norm(),
        "mlp": {"c_fc": project(width, 4 * width), "c_proj": project(4 * width, width, writes)},
    }
    return {
        "wte": {"weight": normal(config.vocab_size, width, deviation=0.02)},
        "wpe": {"weight": normal(config.positions, width, deviation=0.01)},
        "h": [block] * config.n_layer,
        "ln_f": norm(),
    }


def project(params: Params, x: jax.Array) -> jax.Array:
    """`x @ weight + bias` with `weight` [in, out], as GPT-2's checkpoints keep it."""
    return x @ params["weight"] + params["bias"]


def attention(params: Params, x: jax.Array, n_head: int, layer: int, context: Context) -> jax.Array:
    """Causal self-attention over `x` [B, T, C]."""
    batch, length, width = x.shape
    parts = jnp.split(project(params["c_attn"], x), 3, axis=-1)
    query, key, value = (part.reshape(batch, length, n_head, width // n_head) for part in parts)
    return project(params["c_proj"], context.attend(layer, query, key, value))


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Two layers with GELU over `x` [B, T, C]."""
    return project(params["c_proj"], jax.nn.gelu(project(params["c_fc"], x), approximate=True))


def forward(params: Params, tokens: jax.Array, config: Gpt2Config, context: Context) -> jax.Array:
    """Return next-token logits of `tokens` i32 [B, S] where `context` wants them."""
    x = params["wte"]["weight"][tokens] + context.rows(params["wpe"]["weight"])
    for layer, block in enumerate(params["h"]):
        x = x + attention(block["attn"], layer_norm(block["ln_1"], x), config.n_head, layer, context)
        x = x + mlp(block["mlp"], layer_norm(block["ln_2"], x))
    return jnp.einsum("btc,vc->btv", context.wanted(layer_norm(params["ln_f"], x)), params["wte"]["weight"])


def apply(params: Params, tokens: jax.Array, config: Gpt2Config) -> jax.Array:
    """Return next-token logits [B, T, V] for `tokens` i32 [B, T], T ≤ `config.positions`."""
    return forward(params, tokens, config, WholeText(tokens))


def loss_fn(params: Params, tokens: jax.Array, targets: jax.Array, *, config: Gpt2Config) -> jax.Array:
    """Return the mean cross-entropy in nats of `targets` i32 [B, T] given `tokens` i32 [B, T]."""
    return cross_entropy(apply(params, tokens, config), targets)


def packed_loss_fn(
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    targets: jax.Array,
    *,
    config: Gpt2Config,
) -> jax.Array:
    """Return the mean cross-entropy in nats of packed texts, all i32 [B, T], each read without the others."""
    return cross_entropy(forward(params, tokens, config, PackedText(segment_ids, positions)), targets)


def logits(params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """Return `apply(params, tokens)` for the model that `build(**options)` makes."""
    return apply(params, tokens, configure("gpt2", Gpt2Config, options))


def cache_sizes(**options: Any) -> CacheSizes:
    config = configure("gpt2", Gpt2Config, options)
    return CacheSizes(config.n_layer, config.n_head, config.n_embd // config.n_head, config.positions)


def decode(params: Params, tokens: jax.Array, context: Context, **options: Any) -> jax.Array:
    return forward(params, tokens, configure("gpt2", Gpt2Config, options), context)


def all_options(**options: Any) -> dict[str, Any]:
    """Return the options with those that are not given, as `build(**options)` takes them."""
    return msgspec.to_builtins(configure("gpt2", Gpt2Config, options))


def build(**options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, ...]]:
    """Return `(loss_fn(params, tokens, targets), params, (tokens, targets))` for the options of `Gpt2Config`.

    With `segments` the loss is `packed_loss_fn`.
    """
    config = configure("gpt2", Gpt2Config, options)
    example = np.zeros((config.batch_size, config.sequence_length), np.int32)
    loss, arrays = (packed_loss_fn, 4) if config.segments else (loss_fn, 2)
    return functools.partial(loss, config=config), draw(parameters(config), config.seed), (example,) * arrays
