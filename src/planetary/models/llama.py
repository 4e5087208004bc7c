"""Llama (Touvron et al. 2023, arXiv:2307.09288), with the parameter names and layouts of the checkpoints.

Pre-norm blocks with RMSNorm, rotary positions, grouped queries, a SwiGLU MLP, no biases, an untied head. Other
published decoders differ from it by options (`LlamaConfig`).

Shapes are written with B = batch, T = sequence, C = width, H = heads, D = C / H, V = vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from planetary.core.errors import UserError
from planetary.models.context import CacheSizes, Context
from planetary.models.decoder_config import DecoderConfig, RopeScaling, longest_text, require_heads
from planetary.models.initial import Params, normal, ones, zeros
from planetary.models.layers import capped, layer_norm, linear, rms_norm
from planetary.models.model_options import require_counts, require_multiple
from planetary.models.rope import rotate
from planetary.models.text_model import TextModel


class LlamaConfig(DecoderConfig, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch, and the form of the decoder: Llama's by default.

    Attributes:
        n_hidden: width of the MLP; about 8/3 of n_embd makes it as large as a plain MLP of 4 * n_embd.
        mlp_bias: the MLP has biases.
        rope_fraction: part of a head's channels that rotary positions turn, as in GPT-NeoX.
        learned_positions: a table of `n_position` + 2 rows in place of rotary positions, whose first two rows belong to
            no position, as in OPT (Zhang et al. 2022, arXiv:2205.01068).
        activation: of the MLP: `silu`, `gelu`, its form with tanh, or `relu`.
        gated: the MLP has a gate, as in SwiGLU; false: two matrices only.
        norm: `rms`, or `layer` (with biases).
        norm_plus_one: a norm multiplies by 1 + weight, as in Gemma (Gemma team 2024, arXiv:2408.00118).
        norm_place: of a block's norms: before attention and MLP, after them (OLMo 2), or both (Gemma 2).
        parallel: attention and MLP read the same stream, as in GPT-NeoX (Black et al. 2022, arXiv:2204.06745).
        fused: one matrix for queries, keys and values: their rows one after the other, and the same for gate and up
            (`rows`, Phi-3), or head by head (`heads`, GPT-NeoX).
        full_layers: layers that see all tokens in spite of `window`.
        window_rope_base: base of the plain rotary positions of layers with a window, as in Gemma 3; None: as others.
        score_scale: factor of products of queries and keys; None: D ** -0.5.
        score_cap: bound of the scores' magnitude (`layers.capped`), as in Gemma 2; None: none.
        logit_cap: the same of the logits.
        scale_embedding: embeddings are multiplied by C ** 0.5, as in Gemma.
        segments: a batch is packed texts.
    """

    n_hidden: int = 688
    mlp_bias: bool = False
    rope_fraction: float = 1.0
    learned_positions: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_plus_one: bool = False
    norm_place: Literal["before", "after", "both"] = "before"
    parallel: bool = False
    fused: Literal["no", "rows", "heads"] = "no"
    full_layers: tuple[int, ...] = ()
    window_rope_base: float | None = None
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    scale_embedding: bool = False
    segments: bool = False

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("llama", self)
        require_multiple("llama", self, "n_head", "n_kv_head")
        require_heads("llama", self)
        if not 0 < self.rope_fraction <= 1 or int(self.head_width * self.rope_fraction) % 2:
            raise UserError(
                f"llama: rope_fraction={self.rope_fraction} of {self.head_width} channels: expected an even number of "
                "them, above 0"
            )
        if self.parallel and self.norm_place != "before":
            raise UserError(f"llama: parallel blocks have norms before them, found norm_place={self.norm_place}")
        if self.learned_positions and self.n_position is None:
            raise UserError("llama: learned_positions need their number: n_position")


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


def attention_parameters(config: DecoderConfig, writes: float, *, is_fused: bool = False) -> Params:
    """Return the initial distributions of one attention layer; `writes` is the output matrix's deviation."""
    width, size, qk_norm = config.n_embd, config.head_width, config.qk_norm
    kept = config.n_kv_head * size
    outputs = {"q_proj": config.n_head * size, "k_proj": kept, "v_proj": kept}
    projections = {"qkv_proj": sum(outputs.values())} if is_fused else outputs
    normed = (outputs["q_proj"], outputs["k_proj"]) if qk_norm == "all" else (size, size)
    norms = {name: {"weight": ones(count)} for name, count in zip(("q_norm", "k_norm"), normed, strict=True)}
    return {
        **{name: _projection(count, width, 0.02, bias=config.qkv_bias) for name, count in projections.items()},
        "o_proj": _projection(width, outputs["q_proj"], writes, bias=config.output_bias),
        **(norms if qk_norm else {}),
    }


def _projection(outputs: int, inputs: int, deviation: float, *, bias: bool) -> Params:
    return {"weight": normal(outputs, inputs, deviation=deviation), **({"bias": zeros(outputs)} if bias else {})}


_NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


def parameters(config: LlamaConfig) -> Params:
    """Return the initial distributions: deviation 0.02, less for matrices that write to the residual stream."""
    width, hidden = config.n_embd, config.n_hidden
    writes = 0.02 * (2 * config.n_layer) ** -0.5

    def norm() -> Params:
        weight = zeros(width) if config.norm_plus_one else ones(width)
        return {"weight": weight, **({"bias": zeros(width)} if config.norm == "layer" else {})}

    read = {"up_proj": hidden}
    if config.gated:
        read = {"gate_up_proj": 2 * hidden} if config.fused == "rows" else {"gate_proj": hidden, **read}
    block = {
        **{name: norm() for name in _NORMS[config.norm_place]},
        "self_attn": attention_parameters(config, writes, is_fused=config.fused != "no"),
        "mlp": {
            **{name: _projection(count, width, 0.02, bias=config.mlp_bias) for name, count in read.items()},
            "down_proj": _projection(width, hidden, writes, bias=config.mlp_bias),
        },
    }
    model = {
        "embed_tokens": {"weight": normal(config.vocab_size, width, deviation=0.02)},
        "layers": [block] * config.n_layer,
        "norm": norm(),
    }
    if config.learned_positions:
        rows = (config.n_position or 0) + _UNUSED_ROWS
        model["embed_positions"] = {"weight": normal(rows, width, deviation=0.02)}
    head = {"weight": normal(config.vocab_size, width, deviation=0.02)}
    return {"model": model, **({} if config.tie_embeddings else {"lm_head": head})}


_UNUSED_ROWS = 2  # first rows of OPT's table of positions


def attention(
    params: Params,
    x: jax.Array,
    n_head: int,
    n_kv_head: int,
    rope_base: float | None,
    *,
    layer: int,
    context: Context,
    rope_scaling: RopeScaling | None = None,
    rope_fraction: float = 1.0,
    head_size: int | None = None,
    norm: Norm = rms_norm,
    by_heads: bool = False,
    score_scale: float | None = None,
    **form: Any,
) -> jax.Array:
    """Causal self-attention over `x` [B, S, C] with `n_kv_head` keys and values.

    Args:
        rope_base: None: no rotary positions.
        norm: of queries and keys, where `params` has weights for it.
        by_heads: the fused matrix has queries, keys and values head by head.
        form: keywords of `Context.attend`.
    """
    batch, length, width = x.shape
    size = head_size or width // n_head
    if "qkv_proj" in params:
        query, key, value = _split(linear(params["qkv_proj"], x), n_head, n_kv_head, size, by_heads=by_heads)
    else:
        query, key, value = (linear(params[name], x) for name in ("q_proj", "k_proj", "v_proj"))

    def normed(name: str, x: jax.Array, heads: int) -> jax.Array:
        """Return [B, S, heads, D]; the shape of the weights says whether a norm is of one head or of all."""
        x = x.reshape(batch, length, heads, size)
        if name not in params:
            return x
        weights = params[name]["weight"].shape[0]
        return norm(params[name], x.reshape(batch, length, -1, weights)).reshape(batch, length, heads, size)

    query, key = normed("q_norm", query, n_head), normed("k_norm", key, n_kv_head)
    if rope_base is not None:
        query, key = (rotate(one, context.positions, rope_base, rope_scaling, rope_fraction) for one in (query, key))
    if score_scale is not None:
        query = query * (score_scale * size**0.5)  # `attend` multiplies by size ** -0.5
    value = value.reshape(batch, length, n_kv_head, size)
    return linear(params["o_proj"], context.attend(layer, query, key, value, **form))


def _split(x: jax.Array, n_head: int, n_kv_head: int, size: int, *, by_heads: bool) -> Sequence[jax.Array]:
    """Return queries, keys and values of a fused product [B, S, (H + 2 G) · D]."""
    if not by_heads:
        return jnp.split(x, (n_head * size, (n_head + n_kv_head) * size), axis=-1)
    parts = x.reshape(*x.shape[:2], n_head, 3, size)
    return [parts[..., part, :] for part in range(3)]


def mlp(params: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu) -> jax.Array:
    """SwiGLU over `x` [B, T, C] (Shazeer 2020, arXiv:2002.05202), or without a gate where `params` has none."""
    if "gate_up_proj" in params:
        gate, up = jnp.split(linear(params["gate_up_proj"], x), 2, axis=-1)
        return linear(params["down_proj"], activation(gate) * up)
    up = linear(params["up_proj"], x)
    hidden = activation(linear(params["gate_proj"], x)) * up if "gate_proj" in params else activation(up)
    return linear(params["down_proj"], hidden)


Norm = Callable[[Params, jax.Array], jax.Array]

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": lambda x: jnp.maximum(x, 0.0),
}


def _norm_of(config: LlamaConfig) -> Norm:
    if config.norm == "layer":
        return functools.partial(layer_norm, epsilon=config.norm_epsilon)
    plain = functools.partial(rms_norm, epsilon=config.norm_epsilon)
    return (lambda params, x: plain({"weight": 1.0 + params["weight"]}, x)) if config.norm_plus_one else plain


def _block(
    params: Params,
    x: jax.Array,
    config: LlamaConfig,
    attend: Callable[[jax.Array], jax.Array],
    feed: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return the residual stream after attention and MLP."""
    norms = [functools.partial(_norm_of(config), params[name]) for name in _NORMS[config.norm_place]]
    if config.norm_place == "before":
        mixed = x + attend(norms[0](x))
        return mixed + feed(norms[1](x if config.parallel else mixed))
    if config.norm_place == "after":
        x = x + norms[0](attend(x))
        return x + norms[1](feed(x))
    x = x + norms[1](attend(norms[0](x)))
    return x + norms[3](feed(norms[2](x)))


def forward(params: Params, tokens: jax.Array, config: LlamaConfig, context: Context) -> jax.Array:
    """Return next-token logits of `tokens` i32 [B, S] where `context` wants them."""
    model, norm, activation = params["model"], _norm_of(config), _ACTIVATIONS[config.activation]
    x = model["embed_tokens"]["weight"][tokens]
    if config.scale_embedding:
        x = x * config.n_embd**0.5
    if config.learned_positions:
        x = x + context.rows(model["embed_positions"]["weight"][_UNUSED_ROWS:])
    for index, layer in enumerate(model["layers"]):
        attend = functools.partial(
            attention,
            layer["self_attn"],
            layer=index,
            context=context,
            norm=norm,
            by_heads=config.fused == "heads",
            score_scale=config.score_scale,
            **config.heads | _form_of(config, index),
        )
        x = _block(layer, x, config, attend, functools.partial(mlp, layer["mlp"], activation=activation))
    head = model["embed_tokens"] if config.tie_embeddings else params["lm_head"]
    return capped(linear(head, context.wanted(norm(model["norm"], x))), config.logit_cap)


def _form_of(config: LlamaConfig, layer: int) -> dict[str, Any]:
    """Return the keywords of `attention` that differ from layer to layer or are not Llama's."""
    form: dict[str, Any] = {}
    if config.learned_positions:
        form["rope_base"] = None
    elif config.rope_fraction != 1.0:
        form["rope_fraction"] = config.rope_fraction
    if config.score_cap is not None:
        form["cap"] = config.score_cap
    if config.window is not None and layer not in config.full_layers:
        form["window"] = config.window
        if config.window_rope_base is not None:
            form |= {"rope_base": config.window_rope_base, "rope_scaling": None}
    return form


def _cache_sizes(config: LlamaConfig) -> CacheSizes:
    return CacheSizes(config.n_layer, config.n_kv_head, config.head_width, longest_text(config))


def _with_rope_type(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs from before there were others have rotary positions scaled as in Llama 3."""
    scaling = options.get("rope_scaling")
    if isinstance(scaling, Mapping) and "rope_type" not in scaling:
        return {**options, "rope_scaling": {"rope_type": "llama3", **scaling}}
    return options


_MODEL = TextModel("llama", LlamaConfig, parameters, forward, _cache_sizes, read=_with_rope_type)
apply, loss_fn, logits, build = _MODEL.apply, _MODEL.loss_fn, _MODEL.logits, _MODEL.build
decode, cache_sizes, all_options = _MODEL.decode, _MODEL.served_sizes, _MODEL.all_options
