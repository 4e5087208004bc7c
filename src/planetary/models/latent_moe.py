"""A LatentMoE transformer: attention blocks and, in turn, mixtures whose experts work in a narrow latent space.

`u = x W_down`, the experts' weighted sum `y` in the latent space, `x + y W_up` (PARALLAX, 4.2; Elango et al. 2026).
Without projections u is x and y is added to it: `models.moe`.
`build` makes the ordinary model with all experts. `composer_forward` is the same model as one composer of PARALLAX
executes it: owned experts in slots, surrogates for the others, and a probe at y.

B = batch, T = sequence, N = B · T tokens, C = width, E = experts, S = slots, L = latent width, V = vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.compiler.frontend.markers import stop_gradient
from planetary.models.context import CacheSizes, Context, WholeText
from planetary.models.decoder_config import longest_text
from planetary.models.expert_blocks import blocks_of, capacity_of
from planetary.models.initial import Params, draw, normal, ones
from planetary.models.latent_experts import (
    mixture,
    mixture_in_blocks,
    narrow_experts,
    router_gates,
    router_probabilities,
    sparse_mixture,
    used_weights,
)
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.models.layers import cross_entropy, linear, rms_norm
from planetary.models.llama import attention, attention_parameters
from planetary.models.model_options import configure

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_layer": 1,
        "n_head": 2,
        "n_kv_head": 1,
        "n_embd": 16,
        "n_expert": 4,
        "n_active": 2,
        "n_latent": 8,
        "n_hidden": 12,
        "vocab_size": 32,
        "sequence_length": 8,
        "batch_size": 2,
    },
    "default": {},
    "moe-tiny": {"n_embd": 64, "n_layer": 2, "n_latent": 32, "n_hidden": 128},
    "moe-small": {
        "n_layer": 8,
        "n_head": 8,
        "n_kv_head": 8,
        "n_embd": 512,
        "n_expert": 64,
        "n_active": 8,
        "n_latent": 192,
        "n_hidden": 768,
        "sequence_length": 512,
        "batch_size": 8,
    },
    # The report's table 5. The report omits how many keys and values attention has and whether the head is tied to the
    # embedding; 8 of 32 and untied come closest to the 1.95 billion active parameters (1.960 billion).
    "20b": {
        "n_layer": 16,
        "n_head": 32,
        "n_kv_head": 8,
        "n_embd": 2048,
        "n_expert": 256,
        "n_active": 16,
        "n_latent": 768,
        "n_hidden": 3072,
        "ternary": True,
        "vocab_size": 128_256,
        "sequence_length": 1024,
    },
    # Table 14's experts. The report's backbone is Mamba-3 with hyper-connections, of unknown sizes; this one is
    # attention of width 4096, so the active parameters are not the report's.
    "176b": {
        "n_layer": 32,
        "n_head": 32,
        "n_kv_head": 8,
        "n_embd": 4096,
        "n_expert": 640,
        "n_active": 16,
        "n_latent": 1024,
        "n_hidden": 4096,
        "ternary": True,
        "vocab_size": 128_256,
        "sequence_length": 1024,
    },
}


def expert_parameters(config: LatentMoeConfig, count: int) -> Params:
    """Return the initial distributions of `count` experts of one layer: activations near 1, whatever the widths.

    Without projections deviations are those of other matrices: experts then write to the residual stream.
    """
    into, out = config.n_latent**-0.5, config.n_hidden**-0.5
    if not config.projected:
        into, out = 0.02, 0.02 * (2 * config.n_layer) ** -0.5
    made = {
        "up": normal(count, config.n_latent, config.n_hidden, deviation=into),
        "down": normal(count, config.n_hidden, config.n_latent, deviation=out),
    }
    if config.activation == "swiglu":
        made["gate"] = normal(count, config.n_latent, config.n_hidden, deviation=into)
    return made


def dense_parameters(config: LatentMoeConfig) -> Params:
    """Return the initial distributions of everything but the routed experts."""
    width, latent = config.n_embd, config.n_latent
    writes = (2 * config.n_layer) ** -0.5
    projections = {
        "down": normal(width, latent, deviation=width**-0.5),
        "up": normal(latent, width, deviation=0.5 * writes * latent**-0.5),
    }
    block = {
        "attention_norm": {"weight": ones(width)},
        "attention": attention_parameters(config, 0.02 * writes),
        "mixture_norm": {"weight": ones(width)},
        "router": {"weight": normal(config.n_expert, width, deviation=0.02)},
        **({"latent": projections} if config.projected else {}),
    }
    head = {"weight": normal(config.vocab_size, width, deviation=0.02)}
    return {
        "embedding": {"weight": normal(config.vocab_size, width, deviation=0.02)},
        "layers": [block] * config.n_layer,
        "norm": {"weight": ones(width)},
        **({} if config.tie_embeddings else {"head": head}),
    }


def parameters(config: LatentMoeConfig) -> Params:
    """Return the initial distributions of the whole model; each layer has experts under `experts`."""
    tree = dense_parameters(config)
    experts = expert_parameters(config, config.n_expert)
    return {**tree, "layers": [{**layer, "experts": experts} for layer in tree["layers"]]}


Mixture = Callable[[int, jax.Array, jax.Array], jax.Array]
Compute = Callable[[Params, jax.Array, jax.Array, LatentMoeConfig], jax.Array]


def forward(
    params: Params, tokens: jax.Array, config: LatentMoeConfig, mix: Mixture, context: Context | None = None
) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array, jax.Array]]]:
    """Return logits [B, W, V], the mean load-balancing loss, and each layer's u [N, L], gates and probabilities [N, E].

    Args:
        params: of everything but the routed experts (others are ignored).
        tokens: i32 [B, T].
        config: of the model.
        mix: `mix(layer, u, gates)` returns y [N, L].
        context: the positions the tokens attend to; None: they are whole texts, and all logits are wanted.
    """
    context = WholeText(tokens) if context is None else context
    norm = functools.partial(rms_norm, epsilon=config.norm_epsilon)
    form: dict[str, Any] = {} if config.window is None else {"window": config.window}
    x = params["embedding"]["weight"][tokens]
    balances, seen = [], []
    for index, layer in enumerate(params["layers"]):
        read = norm(layer["attention_norm"], x)
        heads = {**config.heads, **form}
        x = x + attention(layer["attention"], read, layer=index, context=context, norm=norm, **heads)
        flat = norm(layer["mixture_norm"], x).reshape(-1, config.n_embd)
        weight = layer["router"]["weight"]
        gates, balance = router_gates(weight, flat, config.n_active, config.select, share=config.share_gates)
        u = flat @ layer["latent"]["down"] if config.projected else flat
        y = mix(index, u, gates)
        x = x + (y @ layer["latent"]["up"] if config.projected else y).reshape(x.shape)
        balances.append(balance)
        seen.append((u, gates, router_probabilities(weight, flat)))
    head = params["embedding"] if config.tie_embeddings else params["head"]
    return linear(head, context.wanted(norm(params["norm"], x))), jnp.mean(jnp.stack(balances)), seen


def real_mixture(experts: Params, u: jax.Array, gates: jax.Array, config: LatentMoeConfig) -> jax.Array:
    """Return the weighted sum of the real experts that are here."""
    return _sparse(used_weights(experts, config.ternary), u, gates, config)


def _sparse(weights: Params, u: jax.Array, gates: jax.Array, config: LatentMoeConfig) -> jax.Array:
    capacity = capacity_of(u.shape[0], config.n_active, config.n_expert, config.capacity)
    return sparse_mixture(weights, u, gates, config.n_active, capacity)


_SPARSE = 8
"""Experts for each chosen one, from which on served functions copy the chosen ones' weights.

All functions of a program do, or none: a weight lies in blocks for its products only where no function takes parts of
it (`compiler.rewrites.weight_blocks`).
"""


def served_mixture(weights: Params, u: jax.Array, gates: jax.Array, config: LatentMoeConfig) -> jax.Array:
    """Return what `_sparse` does without a capacity, in a form that does not depend on the number of tokens."""
    tokens, experts = gates.shape
    if experts < _SPARSE * config.n_active:
        return mixture(weights, u, gates)
    blocks = blocks_of(tokens, config.n_active, experts, tokens)
    return mixture_in_blocks(weights, u, gates, blocks, active=config.n_active, capacity=tokens)


def apply(params: Params, tokens: jax.Array, config: LatentMoeConfig) -> jax.Array:
    """Return next-token logits [B, T, V] of the ordinary model for `tokens` i32 [B, T]; T may be any length."""
    layers = params["layers"]
    return forward(params, tokens, config, lambda i, u, g: real_mixture(layers[i]["experts"], u, g, config))[0]


def loss_fn(params: Params, tokens: jax.Array, targets: jax.Array, *, config: LatentMoeConfig) -> jax.Array:
    """Return the mean cross-entropy in nats of `targets` given `tokens`, both i32 [B, T], plus `balance` × the
    load-balancing loss.
    """
    layers = params["layers"]
    found, balance, _ = forward(
        params, tokens, config, lambda i, u, g: real_mixture(layers[i]["experts"], u, g, config)
    )
    loss = cross_entropy(found, targets)
    return loss + config.balance * balance if config.balance else loss


def routed(params: Params, tokens: jax.Array, config: LatentMoeConfig) -> list[tuple[jax.Array, jax.Array]]:
    """Return of each layer the experts' inputs u [N, L] and the gates [N, E] for tokens i32 [B, T]."""
    layers = params["layers"]
    _, _, seen = forward(params, tokens, config, lambda i, u, g: real_mixture(layers[i]["experts"], u, g, config))
    return [(u, gates) for u, gates, _ in seen]


def expert_loads(params: Params, tokens: jax.Array, config: LatentMoeConfig) -> jax.Array:
    """Return for how many of the tokens i32 [B, T] each expert is chosen in each layer, i32 [layers, experts]."""
    return jnp.stack([jnp.sum(gates > 0, axis=0) for _, gates in routed(params, tokens, config)])


def composer_mixture(
    experts: Sequence[Params],
    held: Sequence[Params],
    config: LatentMoeConfig,
    *,
    detach: bool = True,
    compute: Compute = _sparse,
) -> Mixture:
    """Return the mixture of a composer's own experts and of surrogates for the others; see `composer_forward`.

    Layers whose `held` has no `ownership` have surrogates in place of all experts; `experts` is not read then.
    """

    def stand_ins(layer: int, u: jax.Array, gates: jax.Array) -> jax.Array:
        a, b = stop_gradient(held[layer]["a"]), stop_gradient(held[layer]["b"])
        # Narrow ones are cheap: they drop no token, whatever the capacity of experts is.
        limits = config if b.shape[1] >= config.n_hidden else msgspec.structs.replace(config, capacity=0.0)
        return compute(narrow_experts(a, b), stop_gradient(u) if detach else u, gates, limits)

    def mix(layer: int, u: jax.Array, gates: jax.Array) -> jax.Array:
        ownership = held[layer].get("ownership")
        if ownership is None:
            return stand_ins(layer, u, gates)
        y = compute(used_weights(experts[layer], config.ternary), u, gates @ ownership, config)
        if "a" not in held[layer]:
            return y
        return y + stand_ins(layer, u, gates * (1.0 - jnp.sum(ownership, axis=1)))

    return mix


def composer_logits(
    params: Params, experts: Sequence[Params], held: Sequence[Params], tokens: jax.Array, config: LatentMoeConfig
) -> jax.Array:
    """Return next-token logits [B, T, V] for `tokens` i32 [B, T] of the model as `composer_mixture` has it."""
    return forward(params, tokens, config, composer_mixture(experts, held, config))[0]


def composer_forward(
    params: Params,
    experts: Sequence[Params],
    held: Sequence[Params],
    probes: Sequence[jax.Array],
    batch: tuple[jax.Array, jax.Array],
    *,
    config: LatentMoeConfig,
    detach: bool = True,
) -> tuple[jax.Array, ...]:
    """Return the model as one composer executes it: loss, cross-entropy, u and gates of every layer in turn, and the
    router's probabilities of every layer.

    The gates get their gradient through real experts and surrogates alike. Gradients never reach A and B; with
    `detach` they do not pass through the surrogates to u either (4.1).

    Args:
        params: of everything but the routed experts.
        experts: per layer, the owned experts' weights [S, ...].
        held: per layer, `ownership` f32 [E, S] (`runs.mixture.methods.ownership.slot_matrix`) and the surrogates
            `a` and `b` (`narrow_experts`). Without `a` and `b`, experts that are not owned contribute nothing.
        probes: per layer, f32 [N, L], added to y. With zeros nothing changes, and the gradient with respect to a
            probe is g_y.
        batch: tokens and targets, both i32 [B, T].
        config: of the model.
        detach: stop the gradient at the surrogates' input.
    """
    mix = composer_mixture(experts, held, config, detach=detach)
    tokens, targets = batch
    found, balance, seen = forward(params, tokens, config, lambda i, u, g: mix(i, u, g) + probes[i])
    entropy = cross_entropy(found, targets)
    observed = [array for u, gates, _ in seen for array in (u, gates)]
    return entropy + config.balance * balance, entropy, *observed, *(probabilities for _, _, probabilities in seen)


def logits(params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """Return `apply(params, tokens)` for the model that `build(**options)` makes."""
    return apply(params, tokens, configure("latent_moe", LatentMoeConfig, options))


def sizes_of_cache(config: LatentMoeConfig) -> CacheSizes:
    """Return the sizes of a served text's cache."""
    return CacheSizes(config.n_layer, config.n_kv_head, config.head_width, longest_text(config))


def cache_sizes(**options: Any) -> CacheSizes:
    return sizes_of_cache(configure("latent_moe", LatentMoeConfig, options))


def decode_real(params: Params, tokens: jax.Array, context: Context, *, config: LatentMoeConfig) -> jax.Array:
    """Return logits where `context` wants them, with real experts, none of which has a limit: no text depends on those
    beside it.
    """

    def mix(layer: int, u: jax.Array, gates: jax.Array) -> jax.Array:
        return served_mixture(used_weights(params["layers"][layer]["experts"], config.ternary), u, gates, config)

    return forward(params, tokens, config, mix, context)[0]


def decode(params: Params, tokens: jax.Array, context: Context, **options: Any) -> jax.Array:
    return decode_real(params, tokens, context, config=configure("latent_moe", LatentMoeConfig, options))


def build(**options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, np.ndarray]]:
    """Return `(loss_fn(params, tokens, targets), params, (tokens, targets))` for the options of `LatentMoeConfig`."""
    config = configure("latent_moe", LatentMoeConfig, options)
    example = np.zeros((config.batch_size, config.sequence_length), np.int32)
    return functools.partial(loss_fn, config=config), draw(parameters(config), config.seed), (example, example)
