"""GPT-2 (Radford et al. 2019), with the parameter names and layouts of the published checkpoints.

Learned positions, pre-norm blocks, biases everywhere, the tanh form of GELU, a head tied to the embedding.

Shapes are written with B = batch, T = sequence, C = width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from planetary.core.errors import UserError
from planetary.models.context import CacheSizes, Context
from planetary.models.initial import Params, normal, ones, zeros
from planetary.models.layers import layer_norm
from planetary.models.model_options import require_counts, require_multiple
from planetary.models.text_model import TextModel


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


def _cache_sizes(config: Gpt2Config) -> CacheSizes:
    return CacheSizes(config.n_layer, config.n_head, config.n_embd // config.n_head, config.positions)


_MODEL = TextModel("gpt2", Gpt2Config, parameters, forward, _cache_sizes)
apply, loss_fn, logits, build = _MODEL.apply, _MODEL.loss_fn, _MODEL.logits, _MODEL.build
decode, cache_sizes, all_options = _MODEL.decode, _MODEL.served_sizes, _MODEL.all_options
