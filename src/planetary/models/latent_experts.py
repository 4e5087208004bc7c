"""Routing and experts of a LatentMoE layer: gates, real experts, and surrogates for those that live elsewhere.

N = tokens, C = width, E = routed experts of the model, S = experts that are here (all of them, or a composer's
slots), K = experts per token, L = latent width, F = width inside an expert, R = rank of a surrogate, M = blocks.

An expert maps the latent width to itself: `relu(u up)² down`, or SwiGLU `silu(u gate) · (u up)` then `down` (PARALLAX,
4.2; Elango et al. 2026). A surrogate is a narrow expert of the same form.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from planetary.compiler.frontend.markers import custom_vjp, stop_gradient
from planetary.models.expert_blocks import Blocks, blocks_to_save
from planetary.models.initial import Params
from planetary.models.latent_moe_config import Selection
from planetary.models.layers import softmax

_TERNARY_FLOOR = 1e-8


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


def router_probabilities(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return softmax over all experts in float32 [N, E] of tokens `x` [N, C], for `weight` [E, C]."""
    return softmax(jnp.einsum("nc,ec->ne", x.astype(jnp.float32), weight.astype(jnp.float32)))


def router_gates(
    weight: jax.Array, x: jax.Array, active: int, select: Selection, *, share: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return the gates [N, E] of tokens `x` [N, C] and the load-balancing loss.

    Softmax over all experts in float32, the `active` largest, with `share` renormalised to sum to 1; 0 for the others.
    The loss is 1 when all loads are equal (Fedus et al. 2021, arXiv:2101.03961, eq. 4–6).

    Args:
        weight: [E, C].
        x: tokens.
        active: K.
        select: "rank" compares all pairs of experts, [N, E, E] at once; "topk" sorts (`lax.top_k`). Neither compares a
            score with a threshold: see `chosen_experts`.
    """
    probabilities = router_probabilities(weight, x)
    if select == "rank":
        chosen = chosen_experts(stop_gradient(probabilities), active)
    else:
        ids = jax.lax.top_k(stop_gradient(probabilities), active)[1]
        chosen = jnp.any(ids[:, :, None] == jnp.arange(weight.shape[0])[None, None, :], axis=1)
    kept = jnp.where(chosen, probabilities, 0.0)
    gates = kept / jnp.sum(kept, axis=1, keepdims=True) if share else kept
    load = jnp.mean(jnp.where(chosen, 1.0, 0.0), axis=0) / active
    balance = weight.shape[0] * jnp.sum(load * jnp.mean(probabilities, axis=0))
    return gates, balance


def straight_through_ternary(weight: jax.Array) -> jax.Array:
    """BitNet b1.58 per matrix [..., m, n]: γ · clip(round(W / γ), −1, 1), γ = mean |W|; the gradient is W's own.

    The value is exactly that: W + (rounded − W) would be rounded once more, and not ternary any longer.
    """
    scale = jnp.maximum(jnp.mean(jnp.abs(weight), axis=(-2, -1), keepdims=True), _TERNARY_FLOOR)
    rounded = jnp.clip(jnp.round(weight / scale), -1.0, 1.0) * scale
    return stop_gradient(rounded) + (weight - stop_gradient(weight))


def used_weights(experts: Params, ternary: bool) -> Params:
    """Return the weights the layer computes with."""
    return {name: straight_through_ternary(value) for name, value in experts.items()} if ternary else experts


def hidden_units(experts: Params, u: jax.Array, pattern: str) -> jax.Array:
    """Return the experts' inner activations; `pattern` is the einsum of `u` with `up` [S, L, F]."""
    up = jnp.einsum(pattern, u, experts["up"])
    if "gate" in experts:
        return jax.nn.silu(jnp.einsum(pattern, u, experts["gate"])) * up
    positive = jax.nn.relu(up)
    return positive * positive


def mixture(experts: Params, u: jax.Array, gates: jax.Array) -> jax.Array:
    """Return Σ_s gates[:, s] · E_s(u) [N, L] for `u` [N, L] and gates [N, S]: every expert for every token.

    The gate scales the inner activations, so the sum over experts is one matrix product.
    """
    hidden = hidden_units(experts, u, "nl,slf->nsf") * gates[:, :, None]
    return jnp.einsum("nsf,sfl->nl", hidden, experts["down"])


def narrow_experts(a: jax.Array, b: jax.Array) -> Params:
    """Return surrogates as the weights of experts.

    Args:
        a: up, [E, L, R]; of SwiGLU gate and up side by side, [E, L, 2R].
        b: down, [E, R, L].
    """
    rank = b.shape[1]
    return {"up": a, "down": b} if a.shape[2] == rank else {"gate": a[..., :rank], "up": a[..., rank:], "down": b}


def sparse_mixture(experts: Params, u: jax.Array, gates: jax.Array, active: int, capacity: int) -> jax.Array:
    """Return the result of `mixture`, in blocks of the chosen experts where those take less time.

    Args:
        experts: weights [S, ...].
        u: [N, L].
        gates: [N, S], at most `active` of a row above 0.
        active: K.
        capacity: an expert's most tokens; later ones lose it. N: no token does.
    """
    tokens, width = u.shape
    weights = sum(math.prod(value.shape[1:]) for value in experts.values())
    blocks = blocks_to_save(tokens, active, gates.shape[1], capacity, weights=weights, width=width)
    if blocks is None:
        return mixture(experts, u, gates)
    return mixture_in_blocks(experts, u, gates, blocks, active=active, capacity=capacity)


def mixture_in_blocks(
    experts: Params, u: jax.Array, gates: jax.Array, blocks: Blocks, *, active: int, capacity: int
) -> jax.Array:
    """Return Σ_s gates[:, s] · E_s(u) [N, L], computed in blocks of rows of one expert each; rows left over are zeros.

    No token is dropped below `capacity` (Gale et al. 2022, MegaBlocks, arXiv:2211.15841, section 4). Rows travel by
    gathers alone, forward and backward: the gradient of a gather would be a scatter, but each direction has the other's
    map.

    Args:
        experts: weights [S, ...].
        u: [N, L].
        gates: [N, S], of which the `active` largest of a row count, if above 0 or NaN.
        blocks: from `blocks_of`.
        active: K.
        capacity: as for `sparse_mixture`.
    """
    count, fixed = gates.shape[1], stop_gradient(gates)
    slots = jax.lax.top_k(fixed, min(active, count))[1]  # [N, K']
    one_hot = slots[:, :, None] == jnp.arange(count)  # [N, K', S]
    chosen = ~(fixed <= 0) & jnp.any(one_hot, axis=1)
    places = jnp.cumsum(jnp.where(chosen, 1, 0), axis=0) - 1  # place of a token among its expert's [N, S]
    taken = jnp.minimum(jnp.sum(jnp.where(chosen, 1, 0), axis=0), capacity)  # [S]
    ends = jnp.cumsum((taken + blocks.size - 1) // blocks.size)  # block behind an expert's last one [S]
    starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]]) * blocks.size
    block = jnp.arange(blocks.count, dtype=ends.dtype)
    expert_of = jnp.minimum(jnp.sum((ends[None, :] <= block[:, None]).astype(jnp.int32), axis=1), count - 1)  # [M]
    place = jnp.take_along_axis(places, slots, axis=1)
    valid = jnp.take_along_axis(chosen, slots, axis=1) & (place < capacity)
    row_of = jnp.where(valid, starts[slots] + place, blocks.rows).astype(jnp.int32)  # [N, K']
    choices = jnp.arange(row_of.size, dtype=jnp.int32).reshape(row_of.shape)
    choice_of = jnp.full((blocks.rows,), row_of.size, jnp.int32).at[row_of].set(choices, mode="drop")
    token_of = choice_of // row_of.shape[1]

    def spread_back(arguments: tuple[jax.Array, ...], results: jax.Array, gradient: jax.Array) -> tuple[object, ...]:
        return jnp.sum(_rows(gradient, arguments[2]), axis=1), None, None

    spread = custom_vjp(lambda values, tokens_, rows_: _rows(values, tokens_), spread_back)

    def collect_back(arguments: tuple[jax.Array, ...], results: jax.Array, gradient: jax.Array) -> tuple[object, ...]:
        return _rows(gradient, arguments[1]), None, None

    collect = custom_vjp(lambda values, tokens_, rows_: jnp.sum(_rows(values, rows_), axis=1), collect_back)

    def give_back(arguments: tuple[jax.Array, ...], results: jax.Array, gradient: jax.Array) -> tuple[object, ...]:
        return _rows(gradient[:, None], arguments[2])[..., 0], None, None

    give = custom_vjp(lambda values, choices_, rows_: _rows(values.reshape(-1, 1), choices_)[:, 0], give_back)
    own = jnp.sum(jnp.where(one_hot, gates[:, None, :], 0.0), axis=2)  # [N, K']
    shape = (blocks.count, blocks.size)
    routed = give(own, choice_of, row_of).reshape(shape)
    here = {name: value[expert_of] for name, value in experts.items()}
    read = spread(u, token_of, row_of).reshape(*shape, u.shape[1])
    hidden = hidden_units(here, read, "mbl,mlf->mbf") * routed[:, :, None]
    outputs = jnp.einsum("mbf,mfl->mbl", hidden, here["down"])
    return collect(outputs.reshape(blocks.rows, -1), token_of, row_of)


def _rows(values: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `values` [M, ...] by number; M stands for a row of zeros."""
    padded = jnp.concatenate([values, jnp.zeros((1, *values.shape[1:]), values.dtype)])
    # Of three dimensions, so that these gathers of few rows do not become products (`normalise.lookups_to_matmuls`).
    return padded[:, None].at[index].get(mode="promise_in_bounds")[..., 0, :]
