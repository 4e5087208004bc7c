"""A Mixture-of-Experts transformer: Llama's attention, and in place of the MLP a router with SwiGLU experts.

Every token goes to the `n_active` best experts; there is no capacity, so no token is ever dropped. All experts are
computed for all tokens and the unchosen ones are multiplied by zero: `n_expert / n_active` times the arithmetic of a
sparse layer, but plain matrix products only, which every target compiles and which are exact. Sparse and distributed
executions of the same layer must equal it.

Shapes are written with B = batch, T = sequence, N = B · T tokens, C = width, E = experts, F = width of an
expert, V = vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from planetary.core.errors import UserError
from planetary.models.context import CacheSizes, Context, WholeText
from planetary.models.initial import Params, normal, ones
from planetary.models.layers import HIDDEN_SCORE, cross_entropy, linear, rms_norm, softmax
from planetary.models.llama import DecoderConfig, attention, attention_parameters
from planetary.models.model_options import require_counts, require_multiple
from planetary.models.rope import longest_text, require_heads
from planetary.models.text_model import TextModel


class MoeModelConfig(DecoderConfig, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch.

    Attributes:
        n_active: experts per token.
        n_hidden: width of one expert.
        balance: weight of the load-balancing loss; 0: none.
        share_gates: a token's gates have the sum 1, as in Mixtral; false: they are the softmax over all experts.
    """

    n_expert: int = 8
    n_active: int = 2
    n_hidden: int = 128
    balance: float = 0.01
    share_gates: bool = True

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("moe", self)
        require_multiple("moe", self, "n_head", "n_kv_head")
        require_heads("moe", self)
        if self.n_active > self.n_expert:
            raise UserError(f"moe: n_active={self.n_active} experts per token, but n_expert={self.n_expert} in all")


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
    width, experts, hidden = config.n_embd, config.n_expert, config.n_hidden
    writes = 0.02 * (2 * config.n_layer) ** -0.5
    block = {
        "attention_norm": {"weight": ones(width)},
        "attention": attention_parameters(config, writes),
        "expert_norm": {"weight": ones(width)},
        "router": {"weight": normal(experts, width, deviation=0.02)},
        "experts": {
            "gate": normal(experts, hidden, width, deviation=0.02),
            "up": normal(experts, hidden, width, deviation=0.02),
            "down": normal(experts, hidden, width, deviation=writes),
        },
    }
    return {
        "embedding": {"weight": normal(config.vocab_size, width, deviation=0.02)},
        "layers": [block] * config.n_layer,
        "norm": {"weight": ones(width)},
        **({} if config.tie_embeddings else {"head": {"weight": normal(config.vocab_size, width, deviation=0.02)}}),
    }


def chosen_experts(scores: jax.Array, n_active: int) -> jax.Array:
    """Return bool [N, E]: the `n_active` largest of `scores` [N, E] in each row, the lower index at a tie.

    An expert is chosen if fewer than `n_active` others beat it. Comparing with the k-th largest value instead
    would need two computations of the same number to agree in every bit, which compilers do not promise: XLA
    was seen to route most tokens wrongly that way. Here a number is never compared with itself.
    """
    expert = jnp.arange(scores.shape[1])
    mine, other = scores[:, :, None], scores[:, None, :]
    earlier = expert[None, :] < expert[:, None]
    beats = (other > mine) | ((other == mine) & earlier)
    beaten_by = jnp.sum((beats & (expert[None, :] != expert[:, None])).astype(jnp.int32), axis=2)
    return beaten_by < n_active


def route(params: Params, x: jax.Array, n_active: int, *, share: bool = True) -> tuple[jax.Array, jax.Array]:
    """Return the gates [N, E] of tokens `x` [N, C] and the load-balancing loss.

    A gate is a softmax over the chosen experts' scores, or over all where not `share`, and 0 for the others. The loss
    is 1 where all experts get equal shares and grows with the imbalance (Fedus et al. 2021, arXiv:2101.03961, eq. 4–6).
    """
    scores = linear(params, x)
    chosen = chosen_experts(scores, n_active)
    gates = softmax(jnp.where(chosen, scores, HIDDEN_SCORE)) if share else jnp.where(chosen, softmax(scores), 0.0)
    load = jnp.mean(chosen.astype(jnp.float32), axis=0) / n_active
    balance = scores.shape[1] * jnp.sum(load * jnp.mean(softmax(scores), axis=0))
    return gates, balance


def expert_layer(params: Params, x: jax.Array, gates: jax.Array) -> jax.Array:
    """Return `Σ_e gates[:, e] · expert_e(x)` for tokens `x` [N, C]: one wide SwiGLU whose hidden blocks are
    scaled by their gates.
    """
    hidden = jax.nn.silu(jnp.einsum("nc,efc->nef", x, params["gate"])) * jnp.einsum("nc,efc->nef", x, params["up"])
    return jnp.einsum("nef,efc->nc", hidden * gates[:, :, None], params["down"])


def forward(params: Params, tokens: jax.Array, config: MoeModelConfig, context: Context) -> tuple[jax.Array, jax.Array]:
    """Return logits where `context` wants them and the mean load-balancing loss of the layers, for `tokens` i32
    [B, S].
    """
    x = params["embedding"]["weight"][tokens]
    norm = functools.partial(rms_norm, epsilon=config.norm_epsilon)
    form: dict[str, Any] = {} if config.window is None else {"window": config.window}
    balances = []
    for index, layer in enumerate(params["layers"]):
        x = x + attention(
            layer["attention"],
            norm(layer["attention_norm"], x),
            layer=index,
            context=context,
            norm=norm,
            **config.heads,
            **form,
        )
        flat = norm(layer["expert_norm"], x).reshape(-1, config.n_embd)
        gates, balance = route(layer["router"], flat, config.n_active, share=config.share_gates)
        x = x + expert_layer(layer["experts"], flat, gates).reshape(x.shape)
        balances.append(balance)
    head = params["embedding"] if config.tie_embeddings else params["head"]
    return linear(head, context.wanted(norm(params["norm"], x))), jnp.mean(jnp.stack(balances))


def loss_fn(params: Params, tokens: jax.Array, targets: jax.Array, *, config: MoeModelConfig) -> jax.Array:
    """Return the mean cross-entropy in nats of `targets` given `tokens`, both i32 [B, T], plus `balance` × the
    load-balancing loss.
    """
    found, balance = forward(params, tokens, config, WholeText(tokens))
    loss = cross_entropy(found, targets)
    return loss + config.balance * balance if config.balance else loss


def _logits(params: Params, tokens: jax.Array, config: MoeModelConfig, context: Context) -> jax.Array:
    return forward(params, tokens, config, context)[0]


def _cache_sizes(config: MoeModelConfig) -> CacheSizes:
    return CacheSizes(config.n_layer, config.n_kv_head, config.head_width, longest_text(config))


_MODEL = TextModel("moe", MoeModelConfig, parameters, _logits, _cache_sizes, loss=loss_fn)
apply, logits, build = _MODEL.apply, _MODEL.logits, _MODEL.build
decode, cache_sizes, all_options = _MODEL.decode, _MODEL.served_sizes, _MODEL.all_options
