"""A GPT in the manner of NanoChat, as one small pure-JAX file.

Pre-norm blocks with an RMSNorm without parameters, rotary positions, normalised queries and keys, a squared-ReLU MLP
without biases, a soft cap on the logits and an untied head. Every parameter is a matrix:
`2 · vocab_size · n_embd + n_layer · 12 · n_embd²` of them in all.

Shapes are written with B = batch, T = sequence, C = width, H = heads, D = C / H, V = vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.compiler.frontend.attention import WHOLE
from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.models.context import CacheSizes, Context, WholeText
from planetary.models.layers import HIDDEN_SCORE, causal_attention, mean_of_counted

Params = dict[str, Any]

LOGIT_CAP = 15.0
ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6


class NanoChatConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch. The defaults make 3,276,800 parameters over a byte vocabulary."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    vocab_size: int = 256
    sequence_length: int = 128
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "sequence_length", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"nanochat: {name} must be at least 1, found {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):
            raise UserError(
                "nanochat: n_embd must be a multiple of 2 * n_head (rotary positions turn pairs of each "
                "head's "
                f"channels), found n_embd={self.n_embd}, n_head={self.n_head}"
            )

    @property
    def param_count(self) -> int:
        """Number of trained scalars."""
        return 2 * self.vocab_size * self.n_embd + self.n_layer * 12 * self.n_embd**2


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2},
    "default": {},
    "92m": {"n_layer": 8, "n_head": 8, "n_embd": 512, "vocab_size": 65_536, "sequence_length": 2048},
}


def init_params(config: NanoChatConfig) -> Params:
    """Return fresh float32 parameters, a function of `config.seed` alone.

    Matrices reading the residual stream are uniform with standard deviation `C ** -0.5`; matrices writing to it are
    zero, so every block starts as the identity; the head starts near zero, so the first loss is `log V`. numpy draws
    them, so the values do not depend on JAX's version or device.
    """
    rng = np.random.default_rng(config.seed)
    width = config.n_embd

    def uniform(*shape: int) -> np.ndarray:
        bound = (3.0 / width) ** 0.5
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def block() -> Params:
        return {
            "attention": {
                "query": uniform(width, width),
                "key": uniform(width, width),
                "value": uniform(width, width),
                "output": zeros(width, width),
            },
            "mlp": {"up": uniform(width, 4 * width), "down": zeros(4 * width, width)},
        }

    return {
        "embedding": rng.standard_normal((config.vocab_size, width), np.float32),
        "blocks": [block() for _ in range(config.n_layer)],
        "head": 0.001 * rng.standard_normal((width, config.vocab_size), np.float32),
    }


def rms_norm(x: jax.Array) -> jax.Array:
    """Scale the last axis of `x` to a root mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Apply rotary `positions` to `x` [B, S, H, D] (Su et al. 2021, arXiv:2104.09864, eq. 34, half-split
    pairs).
    """
    half = x.shape[3] // 2
    frequency = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None] * frequency
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def attention(params: Params, x: jax.Array, n_head: int, layer: int, context: Context) -> jax.Array:
    """Causal self-attention over `x` [B, S, C]."""
    batch, length, width = x.shape
    heads = (batch, length, n_head, width // n_head)
    query = rms_norm(rotate((x @ params["query"]).reshape(heads), context.positions))
    key = rms_norm(rotate((x @ params["key"]).reshape(heads), context.positions))
    value = (x @ params["value"]).reshape(heads)
    return context.attend(layer, query, key, value) @ params["output"]


def bounded_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention [B, T, H · D] among `query`, `key`, `value` [B, T, H, D] of bounded length."""
    batch, length, heads, width = query.shape
    if length > WHOLE:
        return causal_attention(query, key, value)
    scores = jnp.einsum("bthd,bshd->bhts", query * width**-0.5, key)
    # Queries and keys have unit root mean square, so |score| <= sqrt(D) and exp needs no running maximum.
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    weights = jnp.exp(jnp.where(causal, scores, HIDDEN_SCORE))
    # Divided by their sum after the product with the values: of all that is T x T the weights alone are kept.
    mixed = jnp.einsum("bhts,bshd->bthd", weights, value)
    mixed = mixed / jnp.sum(weights, axis=-1).transpose(0, 2, 1)[..., None]
    return mixed.reshape(batch, length, heads * width)


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Squared-ReLU MLP over `x` [B, T, C] (So et al. 2021, arXiv:2109.08668)."""
    hidden = jnp.maximum(x @ params["up"], 0.0)
    return (hidden * hidden) @ params["down"]


def forward(params: Params, tokens: jax.Array, context: Context, *, n_head: int) -> jax.Array:
    """Return float32 next-token logits, each within ±15, of `tokens` i32 [B, S] where `context` wants them."""
    x = rms_norm(params["embedding"][tokens])
    for layer, block in enumerate(params["blocks"]):
        x = x + attention(block["attention"], rms_norm(x), n_head, layer, context)
        x = x + mlp(block["mlp"], rms_norm(x))
    logits = context.wanted(rms_norm(x)) @ params["head"]
    return LOGIT_CAP * jnp.tanh(logits / LOGIT_CAP)


def apply(params: Params, tokens: jax.Array, *, n_head: int) -> jax.Array:
    """Return float32 next-token logits [B, T, V] for `tokens` i32 [B, T], each within ±15.

    T may be any length; positions are relative, so longer sequences than the trained ones run but
    extrapolate.
    """
    return forward(params, tokens, WholeText(tokens, bounded_attention), n_head=n_head)


def loss_fn(params: Params, tokens: jax.Array, targets: jax.Array, *, n_head: int) -> jax.Array:
    """Return the mean cross-entropy in nats of `targets` i32 [B, T] given `tokens` i32 [B, T]."""
    logits = apply(params, tokens, n_head=n_head)
    # The soft cap bounds exp(logit) by e^15, so the log-sum-exp needs no maximum subtracted.
    log_total = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    chosen = jnp.where(targets[..., None] == jnp.arange(logits.shape[-1]), logits, 0.0)
    return mean_of_counted(log_total - jnp.sum(chosen, axis=-1), targets)


def logits(params: Params, tokens: jax.Array, **options: int) -> jax.Array:
    """Return `apply(params, tokens)` for the model that `build(**options)` makes; `generate` samples
    from them.
    """
    return apply(params, tokens, n_head=configure(options).n_head)


def cache_sizes(**options: int) -> CacheSizes:
    config = configure(options)
    return CacheSizes(config.n_layer, config.n_head, config.n_embd // config.n_head)


def decode(params: Params, tokens: jax.Array, context: Context, **options: int) -> jax.Array:
    return forward(params, tokens, context, n_head=configure(options).n_head)


def configure(options: dict[str, Any]) -> NanoChatConfig:
    """Return the config that `options` describe, or raise `UserError` naming the wrong option."""
    try:
        return decoding.convert(options, NanoChatConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(NanoChatConfig.__struct_fields__)
        raise UserError(f"nanochat: {error}; options are: {known}") from None


def build(**options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, np.ndarray]]:
    """Return `(loss_fn(params, tokens, targets), params, (tokens, targets))` for the options of
    `NanoChatConfig`.
    """
    config = configure(options)
    example = np.zeros((config.batch_size, config.sequence_length), np.int32)
    return functools.partial(loss_fn, n_head=config.n_head), init_params(config), (example, example)
