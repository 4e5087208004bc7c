"""Llama (Touvron et al. 2023, arXiv:2307.09288), with the parameter names and layouts of the checkpoints.

Pre-norm blocks with RMSNorm, rotary positions, grouped queries, a SwiGLU MLP, no biases, an untied head.

Shapes are written with B = batch, T = sequence, C = width, H = heads, D = C / H, V = vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.models.context import CacheSizes, Context, WholeText
from planetary.models.initial import Params, draw, normal, ones, zeros
from planetary.models.layers import cross_entropy, linear, rms_norm
from planetary.models.model_options import configure, require_counts, require_multiple


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type"):
    """One way to stretch them."""

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        """Return the frequencies in use, float32, of the original ones, `base` ** (-i / count), in radians a token."""
        raise NotImplementedError

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and keys."""
        return 1.0

    def positions(self, published: int) -> int:
        """Return how long a text may be, in tokens, if `published` is said to be the longest; as vLLM takes it."""
        return published


class Llama3Scaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """As in Llama 3.1: slow frequencies are divided, fast ones are kept.

    Attributes:
        factor: by which the slow frequencies are divided.
        low_freq_factor: a wave longer than `original_max_position_embeddings` / this is slow.
        high_freq_factor: one shorter than `original_max_position_embeddings` / this keeps the frequency.
        original_max_position_embeddings: length of the texts at first, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        waves = self.original_max_position_embeddings * frequency / (2 * math.pi)  # waves in an original text
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


class LinearScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """All frequencies are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        return frequency / self.factor

    def positions(self, published: int) -> int:
        return int(published * self.factor)


class YarnScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="yarn"):
    """Frequencies between a fast and a slow one are divided in part, and scores grow (Peng et al. 2023,
    arXiv:2309.00071, sections 3.2 to 3.4).

    Attributes:
        factor: by which slow frequencies are divided.
        original_max_position_embeddings: length of the texts at first, in tokens.
        attention_factor: the amplitude; None: 0.1 ln(factor) + 1.
        beta_fast: a frequency with so many waves in an original text, or more, is kept.
        beta_slow: one with so many, or fewer, is divided.
        truncate: whether the places of these two are rounded to whole channels.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        count = frequency.shape[0]

        def place(waves: float) -> float:
            return count * math.log(self.original_max_position_embeddings / (waves * 2 * math.pi)) / math.log(base)

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        high = high + 0.001 if low == high else high
        divided = jnp.clip((jnp.arange(count, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)
        return divided * frequency / self.factor + (1 - divided) * frequency

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def positions(self, published: int) -> int:
        """A folder may say the length with or without the stretching."""
        return max(published, int(self.original_max_position_embeddings * self.factor))


AnyScaling = Llama3Scaling | LinearScaling | YarnScaling


class LlamaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch.

    With `tie_embeddings` the head is the embedding. With `qkv_bias` queries, keys and values have biases, as in Qwen2
    (Yang et al. 2024, arXiv:2407.10671); with `output_bias` and `mlp_bias` so have attention's output and the MLP. With
    `qk_norm` the queries and keys of each head are normalised, as in Qwen3 (Yang et al. 2025, arXiv:2505.09388). A head
    has `head_size` channels, or n_embd / n_head. `n_position` is the longest text the model is meant for, as it is
    published with it; None: any length.
    """

    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2  # keys and values; each serves n_head / n_kv_head queries
    n_embd: int = 256
    n_hidden: int = 688  # width of the MLP; about 8/3 of n_embd makes it as large as a plain one of 4 * n_embd
    rope_base: float = 10_000.0
    vocab_size: int = 256
    sequence_length: int = 128
    batch_size: int = 8
    seed: int = 0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_size: int | None = None
    rope_scaling: AnyScaling | None = None
    n_position: int | None = None

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("llama", self)
        require_multiple("llama", self, "n_head", "n_kv_head")
        if self.head_size is None:
            require_multiple("llama", self, "n_embd", "n_head", times=2)  # rotary positions turn pairs of channels
        elif self.head_size % 2:
            raise UserError(f"llama: head_size must be even, found {self.head_size}")
        if self.positions is not None and self.sequence_length > self.positions:
            raise UserError(
                f"llama: it has n_position={self.positions} positions (max_position_embeddings in a config.json, with "
                f"its rope_scaling), fewer than sequence_length={self.sequence_length}: lower train.sequence_length"
            )

    @property
    def positions(self) -> int | None:
        """The longest text the model is meant for, with its stretched positions."""
        if self.n_position is None:
            return None
        return self.n_position if self.rope_scaling is None else self.rope_scaling.positions(self.n_position)

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.head_size or self.n_embd // self.n_head


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_layer": 1,
        "n_head": 4,
        "n_kv_head": 2,
        "n_embd": 16,
        "n_hidden": 24,
        "vocab_size": 32,
        "sequence_length": 8,
        "batch_size": 2,
    },
    "default": {},
    "1b": {  # TinyLlama 1.1B (Zhang et al. 2024, arXiv:2401.02385)
        "n_layer": 22,
        "n_head": 32,
        "n_kv_head": 4,
        "n_embd": 2048,
        "n_hidden": 5632,
        "vocab_size": 32_000,
        "sequence_length": 2048,
    },
}


def attention_parameters(
    width: int,
    n_head: int,
    n_kv_head: int,
    writes: float,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    head_size: int | None = None,
) -> Params:
    """Return the initial distributions of one attention layer; `writes` is the output matrix's deviation."""
    size = head_size or width // n_head

    def projection(outputs: int) -> Params:
        bias = {"bias": zeros(outputs)} if qkv_bias else {}
        return {"weight": normal(outputs, width, deviation=0.02), **bias}

    norms = {"q_norm": {"weight": ones(size)}, "k_norm": {"weight": ones(size)}} if qk_norm else {}
    return {
        "q_proj": projection(n_head * size),
        "k_proj": projection(n_kv_head * size),
        "v_proj": projection(n_kv_head * size),
        "o_proj": {
            "weight": normal(width, n_head * size, deviation=writes),
            **({"bias": zeros(width)} if output_bias else {}),
        },
        **norms,
    }


def parameters(config: LlamaConfig) -> Params:
    """Return the initial distributions: deviation 0.02, less for matrices that write to the residual stream."""
    width, hidden = config.n_embd, config.n_hidden
    writes = 0.02 * (2 * config.n_layer) ** -0.5

    def projection(outputs: int, inputs: int, deviation: float) -> Params:
        bias = {"bias": zeros(outputs)} if config.mlp_bias else {}
        return {"weight": normal(outputs, inputs, deviation=deviation), **bias}

    block = {
        "input_layernorm": {"weight": ones(width)},
        "self_attn": attention_parameters(
            width,
            config.n_head,
            config.n_kv_head,
            writes,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
            head_size=config.head_size,
        ),
        "post_attention_layernorm": {"weight": ones(width)},
        "mlp": {
            "gate_proj": projection(hidden, width, 0.02),
            "up_proj": projection(hidden, width, 0.02),
            "down_proj": projection(width, hidden, writes),
        },
    }
    head = {"weight": normal(config.vocab_size, width, deviation=0.02)}
    return {
        "model": {
            "embed_tokens": {"weight": normal(config.vocab_size, width, deviation=0.02)},
            "layers": [block] * config.n_layer,
            "norm": {"weight": ones(width)},
        },
        **({} if config.tie_embeddings else {"lm_head": head}),
    }


def rotate(x: jax.Array, positions: jax.Array, base: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Apply rotary `positions` to `x` [B, S, H, D] (Su et al. 2021, arXiv:2104.09864, eq. 34); channel i pairs
    with channel i + D / 2, as in the published checkpoints.
    """
    half = x.shape[3] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling.stretched(frequency, base)
    angle = positions[..., None] * frequency
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    if scaling is not None and scaling.amplitude != 1.0:
        cos, sin = scaling.amplitude * cos, scaling.amplitude * sin
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    params: Params,
    x: jax.Array,
    n_head: int,
    n_kv_head: int,
    rope_base: float,
    *,
    layer: int,
    context: Context,
    rope_scaling: RopeScaling | None = None,
    head_size: int | None = None,
    norm_epsilon: float = 1e-6,
) -> jax.Array:
    """Causal self-attention over `x` [B, S, C] with `n_kv_head` keys and values; `norm_epsilon` is of `q_norm`."""
    batch, length, width = x.shape
    size = head_size or width // n_head
    query = linear(params["q_proj"], x).reshape(batch, length, n_head, size)
    key = linear(params["k_proj"], x).reshape(batch, length, n_kv_head, size)
    if "q_norm" in params:
        query, key = rms_norm(params["q_norm"], query, norm_epsilon), rms_norm(params["k_norm"], key, norm_epsilon)
    query = rotate(query, context.positions, rope_base, rope_scaling)
    key = rotate(key, context.positions, rope_base, rope_scaling)
    value = linear(params["v_proj"], x).reshape(batch, length, n_kv_head, size)
    return linear(params["o_proj"], context.attend(layer, query, key, value))


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """SwiGLU over `x` [B, T, C] (Shazeer 2020, arXiv:2002.05202)."""
    return linear(params["down_proj"], jax.nn.silu(linear(params["gate_proj"], x)) * linear(params["up_proj"], x))


def forward(params: Params, tokens: jax.Array, config: LlamaConfig, context: Context) -> jax.Array:
    """Return next-token logits of `tokens` i32 [B, S] where `context` wants them."""
    model, epsilon = params["model"], config.norm_epsilon
    x = model["embed_tokens"]["weight"][tokens]
    for index, layer in enumerate(model["layers"]):
        x = x + attention(
            layer["self_attn"],
            rms_norm(layer["input_layernorm"], x, epsilon),
            config.n_head,
            config.n_kv_head,
            config.rope_base,
            layer=index,
            context=context,
            rope_scaling=config.rope_scaling,
            head_size=config.head_size,
            norm_epsilon=epsilon,
        )
        x = x + mlp(layer["mlp"], rms_norm(layer["post_attention_layernorm"], x, epsilon))
    head = model["embed_tokens"] if config.tie_embeddings else params["lm_head"]
    return linear(head, context.wanted(rms_norm(model["norm"], x, epsilon)))


def _configure(options: Mapping[str, Any]) -> LlamaConfig:
    scaling = options.get("rope_scaling")
    if isinstance(scaling, Mapping) and "rope_type" not in scaling:  # runs from before there were others
        options = {**options, "rope_scaling": {"rope_type": "llama3", **scaling}}
    return configure("llama", LlamaConfig, options)


def apply(params: Params, tokens: jax.Array, config: LlamaConfig) -> jax.Array:
    """Return next-token logits [B, T, V] for `tokens` i32 [B, T]; T may be any length."""
    return forward(params, tokens, config, WholeText(tokens))


def loss_fn(params: Params, tokens: jax.Array, targets: jax.Array, *, config: LlamaConfig) -> jax.Array:
    """Return the mean cross-entropy in nats of `targets` i32 [B, T] given `tokens` i32 [B, T]."""
    return cross_entropy(apply(params, tokens, config), targets)


def logits(params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """Return `apply(params, tokens)` for the model that `build(**options)` makes."""
    return apply(params, tokens, _configure(options))


def cache_sizes(**options: Any) -> CacheSizes:
    config = _configure(options)
    return CacheSizes(config.n_layer, config.n_kv_head, config.head_width, config.positions)


def decode(params: Params, tokens: jax.Array, context: Context, **options: Any) -> jax.Array:
    return forward(params, tokens, _configure(options), context)


def all_options(**options: Any) -> dict[str, Any]:
    """Return the options with those that are not given, as `build(**options)` takes them."""
    return msgspec.to_builtins(_configure(options))


def build(**options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, np.ndarray]]:
    """Return `(loss_fn(params, tokens, targets), params, (tokens, targets))` for the options of `LlamaConfig`."""
    config = _configure(options)
    example = np.zeros((config.batch_size, config.sequence_length), np.int32)
    return functools.partial(loss_fn, config=config), draw(parameters(config), config.seed), (example, example)
