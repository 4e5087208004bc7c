"""Pieces that several models share. B = batch, T = sequence, C = width, H = heads, D = width of a head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from planetary.compiler.frontend.attention import WHOLE
from planetary.compiler.frontend.attention import attention as tiled_attention
from planetary.compiler.frontend.markers import stop_gradient
from planetary.models.initial import Params

HIDDEN_SCORE = -1e30  # score of a key a query must not see; its exponential is exactly 0


def layer_norm(params: Params, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Mean 0 and variance 1 along the last axis, then `weight` and `bias` (Ba et al. 2016, arXiv:1607.06450)."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * params["weight"] + params["bias"]


def rms_norm(params: Params, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Root mean square 1 along the last axis, then `weight` (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * params["weight"]


def linear(params: Params, x: jax.Array) -> jax.Array:
    """`x @ weight.T + bias` with `weight` [out, in], the layout of PyTorch's checkpoints; `bias` is optional."""
    product = jnp.einsum("...i,oi->...o", x, params["weight"])
    return product + params["bias"] if "bias" in params else product


def softmax(scores: jax.Array) -> jax.Array:
    """Along the last axis. The maximum is marked as a constant: the result does not depend on it."""
    exponential = jnp.exp(scores - stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return exponential / jnp.sum(exponential, axis=-1, keepdims=True)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    cap: float | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention with the arguments of `planetary.attention`, which does the work above `WHOLE` positions.

    Below, the scores are one tensor. The division by the sum of the weights comes after the product with the values, so
    of all that is T x T the weights alone are kept for the gradient.

    Returns:
        [B, T, H · D].
    """
    batch, length, heads, width = query.shape
    if length > WHOLE:
        mixed = tiled_attention(query, key, value, causal=causal, window=window, cap=cap, segments=segments)
        return mixed.reshape(batch, length, -1)
    groups = key.shape[2]
    query = (query * width**-0.5).reshape(batch, length, groups, heads // groups, width)
    scores = capped(jnp.einsum("btghd,bsgd->bghts", query, key), cap)
    if causal:
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if segments is not None:
            visible = visible & (segments[:, None, None, :, None] == segments[:, None, None, None, :])
        scores = jnp.where(visible, scores, HIDDEN_SCORE)
    weights = jnp.exp(scores - stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.einsum("bghts,bsgd->btghd", weights, value)
    mixed = mixed / jnp.sum(weights, axis=-1).transpose(0, 3, 1, 2)[..., None]
    return mixed.reshape(batch, length, -1)


causal_attention = functools.partial(attention, causal=True)


def capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Return `cap * tanh(scores / cap)`, which lies between ± `cap` (Gemma team 2024, arXiv:2408.00118); None: as is.

    XLA's and IREE's tanh differ in the last bits only.
    """
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over the targets that count, in nats, of `-log softmax(logits)[target]`; 0 where none counts.

    Args:
        logits: [..., V].
        targets: i32 [...], each below V; negative ones do not count. Picked by comparison, not by a gather: the
            gradient is no scatter.
    """
    return mean_of_counted(token_losses(logits, targets), targets)


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return `-log softmax(logits)[target]` in nats, [...], for `logits` [..., V]; arbitrary where a target is < 0."""
    top = stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    chosen = jnp.where(targets[..., None] == jnp.arange(logits.shape[-1]), shifted, 0.0)
    return log_total - jnp.sum(chosen, axis=-1)


def text_log_probabilities(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the log-probability in nats of each text's targets, [...], for `logits` [..., T, V]; those < 0 are out."""
    return -jnp.sum(jnp.where(targets >= 0, token_losses(logits, targets), 0.0), axis=-1)


def preference_loss(now: jax.Array, reference: jax.Array, beta: float) -> jax.Array:
    """Mean over pairs of `-log sigmoid(beta * margin)`: DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Args:
        now: log-probabilities of the preferred answers and of the others, [B, 2].
        reference: the same by the model that training began with.
        beta: strength of the pull towards that model.
    """
    moved = now - reference
    margin = beta * (moved[:, 0] - moved[:, 1])
    top = stop_gradient(jnp.maximum(-margin, 0.0))  # no kink at 0, where every pair begins
    return jnp.mean(top + jnp.log(jnp.exp(-top) + jnp.exp(-margin - top)))


def mean_of_counted(losses: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean of `losses` [...] over `targets` [...] that are not negative; 0 where all are."""
    is_counted = targets >= 0
    count = jnp.sum(is_counted, dtype=jnp.float32)
    return jnp.sum(jnp.where(is_counted, losses, 0.0)) / jnp.maximum(count, 1.0)
