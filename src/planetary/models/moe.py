"""A Mixture-of-Experts transformer: Llama's attention, and in place of the MLP a router with SwiGLU experts.

It is `models.latent_moe` with experts in the model's own width. Every token goes to the `n_active` best experts; there
is no capacity, so no token is ever dropped.
"""

from __future__ import annotations

from typing import Any

import jax

from planetary.models import latent_moe
from planetary.models.context import CacheSizes, Context
from planetary.models.initial import Params
from planetary.models.latent_moe_config import MoeModelConfig
from planetary.models.text_model import TextModel

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_layer": 1,
        "n_head": 2,
        "n_kv_head": 1,
        "n_embd": 16,
        "n_expert": 4,
        "n_active": 2,
        "n_hidden": 12,
        "vocab_size": 32,
        "sequence_length": 8,
        "batch_size": 2,
    },
    "default": {},
    "8x7b": {  # Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088)
        "n_layer": 32,
        "n_head": 32,
        "n_kv_head": 8,
        "n_embd": 4096,
        "n_expert": 8,
        "n_active": 2,
        "n_hidden": 14_336,
        "rope_base": 1e6,
        "vocab_size": 32_000,
        "sequence_length": 4096,
    },
}


def parameters(config: MoeModelConfig) -> Params:
    """Return the initial distributions: deviation 0.02, less for matrices that write to the residual stream."""
    return latent_moe.parameters(config.mixture)


def loss_fn(params: Params, tokens: jax.Array, targets: jax.Array, *, config: MoeModelConfig) -> jax.Array:
    """Return the mean cross-entropy in nats of `targets` given `tokens`, both i32 [B, T], plus `balance` × the
    load-balancing loss.
    """
    return latent_moe.loss_fn(params, tokens, targets, config=config.mixture)


def _logits(params: Params, tokens: jax.Array, config: MoeModelConfig, context: Context) -> jax.Array:
    return latent_moe.decode_real(params, tokens, context, config=config.mixture)


def _cache_sizes(config: MoeModelConfig) -> CacheSizes:
    return latent_moe.sizes_of_cache(config.mixture)


_MODEL = TextModel("moe", MoeModelConfig, parameters, _logits, _cache_sizes, loss=loss_fn)
apply, logits, build = _MODEL.apply, _MODEL.logits, _MODEL.build
decode, cache_sizes, all_options = _MODEL.decode, _MODEL.served_sizes, _MODEL.all_options
