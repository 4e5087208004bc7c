"""Mamba-2, a state-space model (Dao and Gu 2024, arXiv:2405.21060), with the checkpoints' parameter names.

The recurrence `state ← exp(Δ·A)·state + Δ·x·Bᵀ`, `y = state·C + D·x` is computed in chunks: inside a chunk as
masked attention, between chunks through their final states (section 6). Both are matrix products, the second
over the few chunks of a sequence, so there is no loop.

Shapes are written with B = batch, T = sequence, C = width, I = inner width, H = heads, P = I / H, N = size of
the state per channel, K = chunks, L = positions of a chunk, V = vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.models.context import RecurrentContext, StateSizes
from planetary.models.initial import Params, normal, ones, uniform, zeros
from planetary.models.layers import linear, rms_norm
from planetary.models.model_options import require_counts
from planetary.models.text_model import TextModel

STEP_RANGE = (1e-3, 1e-1)  # range of Δ at the start, spread evenly on a logarithmic scale
DECAY_RANGE = (1.0, 16.0)  # range of -A at the start


class Mamba2Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch."""

    n_layer: int = 4
    n_embd: int = 256
    n_state: int = 64
    head_size: int = 64
    expand: int = 2  # inner width over n_embd
    n_tap: int = 4  # positions the short convolution sees
    chunk: int = 64  # positions of a chunk; any value gives the same result up to rounding
    vocab_size: int = 256
    sequence_length: int = 128
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("mamba2", self)
        if self.n_inner % self.head_size:
            raise UserError(
                f"mamba2: expand * n_embd must be a multiple of head_size, found {self.n_inner} and {self.head_size}"
            )

    @property
    def n_inner(self) -> int:
        """Inner width."""
        return self.expand * self.n_embd

    @property
    def n_head(self) -> int:
        """Heads, each with one decay rate."""
        return self.n_inner // self.head_size


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_layer": 1,
        "n_embd": 16,
        "n_state": 8,
        "head_size": 8,
        "chunk": 4,
        "vocab_size": 32,
        "sequence_length": 8,
        "batch_size": 2,
    },
    "default": {},
    "130m": {"n_layer": 24, "n_embd": 768, "n_state": 128, "vocab_size": 50_288, "sequence_length": 2048},
}


def parameters(config: Mamba2Config) -> Params:
    """Return the initial distributions. `dt_bias` is uniform over the inverse softplus of `STEP_RANGE`."""
    width, inner, heads = config.n_embd, config.n_inner, config.n_head
    mixed = inner + 2 * config.n_state
    low, high = (math.log(math.expm1(step)) for step in STEP_RANGE)
    tap = config.n_tap**-0.5
    block = {
        "norm": {"weight": ones(width)},
        "mixer": {
            "in_proj": {"weight": normal(inner + mixed + heads, width, deviation=width**-0.5)},
            "conv1d": {"weight": uniform(mixed, 1, config.n_tap, low=-tap, high=tap), "bias": zeros(mixed)},
            "dt_bias": uniform(heads, low=low, high=high),
            "A_log": uniform(heads, low=math.log(DECAY_RANGE[0]), high=math.log(DECAY_RANGE[1])),
            "D": ones(heads),
            "norm": {"weight": ones(inner)},
            "out_proj": {"weight": normal(width, inner, deviation=(inner * config.n_layer) ** -0.5)},
        },
    }
    return {
        "backbone": {
            "embedding": {"weight": normal(config.vocab_size, width, deviation=0.02)},
            "layers": [block] * config.n_layer,
            "norm_f": {"weight": ones(width)},
        }
    }


def short_convolution(params: Params, x: jax.Array, before: jax.Array | None = None) -> jax.Array:
    """Causal convolution of each channel of `x` [B, T, channels] by itself, as a sum of shifted products.

    `before` [B, taps - 1, channels] stands before it; None: zeros.
    """
    taps = params["weight"].shape[2]
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0))) if before is None else jnp.concatenate([before, x], axis=1)
    shifted = (padded[:, tap : tap + length] * params["weight"][:, 0, tap] for tap in range(taps))
    return functools.reduce(jnp.add, shifted) + params["bias"]


def decay_between(log_decay: jax.Array, strict: bool) -> jax.Array:
    """Return `exp(Σ log_decay[j+1 … i])` [..., i, j] for `log_decay` [..., L] and 0 where j > i.

    With `strict` the sum stops before i and j = i gives 0 too: the weight of a chunk's final state when a
    later chunk begins.
    """
    length = log_decay.shape[-1]
    before = jnp.tril(jnp.ones((length, length), jnp.float32), -1 if strict else 0)
    # Prefix sums as a matrix product: the gradient of a running sum would be another one.
    start = jnp.einsum("...j,ij->...i", log_decay, before)
    end = start + log_decay if strict else start
    # Masked before the exponential as well: it would overflow above the diagonal, and the gradient be 0 · ∞.
    seen = before > 0
    exponent = jnp.where(seen, start[..., :, None] - end[..., None, :], 0.0)
    return jnp.where(seen, jnp.exp(exponent), 0.0)


def state_space(  # noqa: PLR0917 - the recurrence's own arguments
    x: jax.Array, log_decay: jax.Array, b: jax.Array, c: jax.Array, chunk: int, before: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Run the recurrence `state ← exp(log_decay)·state + x·bᵀ`, `y = state·c`.

    Args:
        x: [B, T, H, P], already multiplied by Δ.
        log_decay: [B, T, H], Δ·A, negative.
        b: [B, T, N], the direction each position writes to; shared by the heads.
        c: [B, T, N], the direction each position reads.
        chunk: positions of a chunk.
        before: the state [B, H, P, N] before the first position; None: zero, and the last one is not wanted.

    Returns:
        y [B, T, H, P], and the state after the last position.
    """
    batch, length, heads, size = x.shape
    chunk = min(chunk, length)
    missing = -length % chunk
    # Zeros at the end change nothing before them.
    x, log_decay, b, c = (jnp.pad(v, ((0, 0), (0, missing)) + ((0, 0),) * (v.ndim - 2)) for v in (x, log_decay, b, c))
    chunks = (length + missing) // chunk
    x = x.reshape(batch, chunks, chunk, heads, size)
    b, c = (v.reshape(batch, chunks, chunk, -1) for v in (b, c))
    log_decay = log_decay.reshape(batch, chunks, chunk, heads).transpose(0, 3, 1, 2)  # [B, H, K, L]

    within = decay_between(log_decay, strict=False)  # [B, H, K, i, j]
    scores = jnp.einsum("bkin,bkjn->bkij", c, b)
    y = jnp.einsum("bhkij,bkjhp->bkihp", within * scores[:, None], x)

    to_end = within[..., -1, :].transpose(0, 2, 3, 1)  # [B, K, L, H]
    written = jnp.einsum("bkjn,bkjhp->bkhpn", b, x * to_end[..., None])
    total = jnp.sum(log_decay, axis=-1)  # [B, H, K]
    after = None
    if before is None:
        state = jnp.einsum("bhkm,bmhpn->bkhpn", decay_between(total, strict=True), written)  # [B, K, H, P, N]
    else:  # padding of one chunk at each end, without decay
        between = decay_between(jnp.pad(total, ((0, 0), (0, 0), (1, 1))), strict=True)[:, :, 1:, :-1]
        state = jnp.einsum("bhkm,bmhpn->bkhpn", between, jnp.concatenate([before[:, None], written], axis=1))
        state, after = state[:, :-1], state[:, -1]
    since_start = jnp.exp(jnp.einsum("bhkj,ij->bkih", log_decay, jnp.tril(jnp.ones((chunk, chunk), jnp.float32))))
    y = y + jnp.einsum("bkin,bkhpn->bkihp", c, state) * since_start[..., None]
    return y.reshape(batch, length + missing, heads, size)[:, :length], after


def mixer(params: Params, x: jax.Array, config: Mamba2Config, layer: int, context: RecurrentContext) -> jax.Array:
    """One state-space layer over `x` [B, S, C]."""
    batch, length, _ = x.shape
    inner, heads, states = config.n_inner, config.n_head, config.n_state
    ends = np.cumsum([inner, inner + 2 * states])
    gate, mixed, step = jnp.split(linear(params["in_proj"], x), ends, axis=-1)
    read, held = (context.recall(2 * layer + i, shape) for i, shape in enumerate(_state_shapes(config)))
    if read is not None and config.n_tap > 1:
        context.keep(2 * layer, context.latest(jnp.concatenate([read, mixed], axis=1), config.n_tap - 1))
    elif read is not None:
        context.keep(2 * layer, read)
    mixed = jax.nn.silu(short_convolution(params["conv1d"], mixed, read))
    values, b, c = jnp.split(mixed, np.cumsum([inner, states]), axis=-1)
    values = values.reshape(batch, length, heads, config.head_size)
    step = jax.nn.softplus(step + params["dt_bias"])
    if context.counted is not None:  # a step of 0 neither decays the state nor adds to it
        step = jnp.where(context.counted[..., None], step, 0.0)
    log_decay = -step * jnp.exp(params["A_log"])
    y, after = state_space(values * step[..., None], log_decay, b, c, config.chunk, held)
    if after is not None:
        context.keep(2 * layer + 1, after)
    y = y + values * params["D"][:, None]
    y = y.reshape(batch, length, inner) * jax.nn.silu(gate)
    return linear(params["out_proj"], rms_norm(params["norm"], y))


def _state_shapes(config: Mamba2Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a layer's states of a text: the convolution's newest inputs, and the recurrent state."""
    mixed = config.n_inner + 2 * config.n_state
    return (config.n_tap - 1, mixed), (config.n_head, config.head_size, config.n_state)


def forward(params: Params, tokens: jax.Array, config: Mamba2Config, context: RecurrentContext) -> jax.Array:
    """Return next-token logits of `tokens` i32 [B, S] where `context` wants them."""
    model = params["backbone"]
    x = model["embedding"]["weight"][tokens]
    for index, layer in enumerate(model["layers"]):
        x = x + mixer(layer["mixer"], rms_norm(layer["norm"], x), config, index, context)
    return jnp.einsum("btc,vc->btv", context.wanted(rms_norm(model["norm_f"], x)), model["embedding"]["weight"])


def _state_sizes(config: Mamba2Config) -> StateSizes:
    return StateSizes(_state_shapes(config) * config.n_layer)


_MODEL = TextModel("mamba2", Mamba2Config, parameters, forward, _state_sizes)
apply, loss_fn, logits, build = _MODEL.apply, _MODEL.loss_fn, _MODEL.logits, _MODEL.build
decode, state_sizes = _MODEL.decode, _MODEL.served_sizes
