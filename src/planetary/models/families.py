"""The families of published models that are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from planetary.core.configuration.family import Family
from planetary.core.configuration.published_values import (
    read_rope,
    read_size,
    read_table,
    require_only,
    written_rope,
)
from planetary.core.errors import UserError

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class Gpt2(Family):
    """GPT-2. The head is the embedding; the folder's weights may or may not stand below `transformer.`"""

    name, architecture, source = "gpt2", "GPT2LMHeadModel", "planetary.models.gpt2:build"
    sizes = {
        **{name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
        "n_position": "n_positions",
    }
    keys, free = {}, frozenset()
    only = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }
    names = [(name, f"transformer.{name}") for name in ("wte", "wpe", "h", "ln_f")]
    spare = ("h.*.attn.bias", "h.*.attn.masked_bias", "lm_head.weight")  # causal masks, and the head a second time

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        if published.get("n_inner") not in (None, 4 * options["n_embd"]):
            inner = 4 * options["n_embd"]
            raise UserError(f"n_inner is {published['n_inner']}: the model here has 4 * n_embd = {inner}")
        return {}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}


class _Decoder(Family):
    """Families of the decoder here."""

    source = "planetary.models.llama:build"
    plain = {
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "learned_positions"), False),
        **dict.fromkeys(("norm_plus_one", "parallel", "scale_embedding"), False),
        **dict.fromkeys(("head_size", "window", "window_rope_base", "score_scale", "score_cap", "logit_cap")),
        **{"rope_fraction": 1.0, "activation": "silu", "gated": True, "norm": "rms", "norm_place": "before"},
        **{"fused": "no", "full_layers": [], "rope_scaling": None},
    }


class _Biased(_Decoder):
    """Families in which one key gives biases to all of attention."""

    free = Family.free | {"qkv_bias", "output_bias"}

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        biases = bool(published.get("attention_bias"))
        return {**super().read(published, options), "qkv_bias": biases, "output_bias": biases}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().published_only(options), "attention_bias": bool(options.get("output_bias"))}

    def describes(self, options: Mapping[str, Any]) -> bool:
        return super().describes(options) and bool(options.get("qkv_bias")) == bool(options.get("output_bias"))


class Llama(_Biased):
    """Llama, with stretched rotary positions, biases and a tied head where a folder has them."""

    name, architecture = "llama", "LlamaForCausalLM"
    keys = {**Family.keys, "mlp_bias": ("mlp_bias", False)}


class Mistral(_Decoder):
    """Mistral: Llama in which a token sees a window."""

    name, architecture = "mistral", "MistralForCausalLM"
    keys = {**Family.keys, "window": ("sliding_window", None)}


class Qwen2(_Decoder):
    """Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. Without sliding windows."""

    name, architecture = "qwen2", "Qwen2ForCausalLM"
    form = {"qkv_bias": True}
    only = {"hidden_act": ("silu",), "use_sliding_window": (False,), "sliding_window": (None, ...)}


class Qwen3(_Biased):
    """Qwen3: Llama with normalised queries and keys, and heads of their own size. Without sliding windows."""

    name, architecture = "qwen3", "Qwen3ForCausalLM"
    form = {"qk_norm": True}
    only = Qwen2.only

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        return super().read({"head_dim": 128, **published}, options)


_FULL, _NEAR = "full_attention", "sliding_attention"


class Gemma2(_Biased):
    """Gemma 2: norms around attention and MLP, bounded scores, a window in every other layer."""

    name, architecture = "gemma2", "Gemma2ForCausalLM"
    keys = {
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "tie_embeddings": ("tie_word_embeddings", True),
        "score_cap": ("attn_logit_softcapping", 50.0),
        "logit_cap": ("final_logit_softcapping", 30.0),
    }
    form = {
        **{"activation": "gelu_tanh", "norm_plus_one": True, "norm_place": "both", "scale_embedding": True},
    }
    free = _Biased.free | {"window", "full_layers", "score_scale"}
    only = {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)}
    every: ClassVar[int] = 2  # a layer of so many sees all tokens

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        every = read_size({"sliding_window_pattern": self.every, **published}, "sliding_window_pattern")
        every = self.every if self.name == "gemma2" else every
        kinds = published.get("layer_types") or [_FULL if i % every == 0 else _NEAR for i in self._layers(options)]
        if (
            not isinstance(kinds, list)
            or len(kinds) != options["n_layer"]
            or not {_FULL, _NEAR}.issuperset(map(str, kinds))
        ):
            raise UserError(f"layer_types is {kinds!r:.80}: expected {_FULL!r} or {_NEAR!r} for each layer")
        full = [i for i, kind in enumerate(kinds) if kind == _FULL]
        window = {"window": read_size({"sliding_window": 4096, **published}, "sliding_window"), "full_layers": full}
        return {
            **super().read({"head_dim": 256, **published}, options),
            **(window if len(full) < len(kinds) else {}),
            "score_scale": read_size({"query_pre_attn_scalar": 256, **published}, "query_pre_attn_scalar") ** -0.5,
        }

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        full = options.get("full_layers", ()) if options.get("window") else [i - 1 for i in self._layers(options)]
        kinds = [_FULL if i - 1 in full else _NEAR for i in self._layers(options)]
        return {
            **super().published_only(options),
            "sliding_window": options.get("window") or 4096,
            "layer_types": kinds,
            "query_pre_attn_scalar": round(options["score_scale"] ** -2),
        }

    def _layers(self, options: Mapping[str, Any]) -> range:
        """Return the layers' numbers, from 1."""
        return range(1, options["n_layer"] + 1)


class Gemma3(Gemma2):
    """Gemma 3 (text): Gemma 2 with normalised queries and keys, and rotary positions by kind of layer."""

    name, architecture = "gemma3_text", "Gemma3ForCausalLM"
    keys = {
        **Gemma2.keys,
        **{"score_cap": ("attn_logit_softcapping", None), "logit_cap": ("final_logit_softcapping", None)},
    }
    form = {**Gemma2.form, "qk_norm": True}
    free = Gemma2.free | {"window_rope_base"}
    every, theta = 6, 1_000_000.0

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        both = read_table(published, "rope_parameters")
        local = {"rope_theta": published.get("rope_local_base_freq", 10_000.0), **read_table(both, _NEAR)}
        near = read_rope({"rope_parameters": local}, options["n_position"], 10_000.0)
        if near.get("rope_scaling"):
            raise UserError(
                f"rotary positions of layers with a window are {local!r:.80}: the model here has plain ones"
            )
        far = {**published, "rope_parameters": read_table(both, _FULL)}
        found = super().read(far, options)
        return {**found, **({"window_rope_base": near["rope_base"]} if "window" in found else {})}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        found, near = super().published_only(options), options.get("window_rope_base") or 10_000.0
        local = {"rope_type": "default", "rope_theta": near}
        both = {_FULL: found["rope_parameters"], _NEAR: local}
        return {**found, "rope_parameters": both, "rope_local_base_freq": near}


_ORIGINAL = "original_max_position_embeddings"


class Phi3(_Decoder):
    """Phi-3 and Phi-4: Llama with one matrix for queries, keys and values, and one for gate and up."""

    name, architecture = "phi3", "Phi3ForCausalLM"
    keys = {**Mistral.keys, "norm_epsilon": ("rms_norm_eps", 1e-5)}
    form = {"fused": "rows"}
    free = Family.free | {"rope_fraction"}

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        published = {_ORIGINAL: 4096, **published}
        rope = read_rope(published, options["n_position"], self.theta, part=published.get("partial_rotary_factor", 1.0))
        return {**super().read({**published, "rope_parameters": None, "rope_scaling": None}, options), **rope}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        part = {"partial_rotary_factor": options.get("rope_fraction", 1.0)}
        found = super().published_only(options)
        original = (options.get("rope_scaling") or {}).get(_ORIGINAL)
        part |= {_ORIGINAL: original} if original else {}
        return {**found, **part, "rope_parameters": {**found["rope_parameters"], **part}}


class GptNeox(_Decoder):
    """GPT-NeoX and Pythia: layer norms, biases, a plain MLP, attention and MLP side by side."""

    name, architecture = "gpt_neox", "GPTNeoXForCausalLM"
    keys = {
        "norm_epsilon": ("layer_norm_eps", 1e-5),
        "tie_embeddings": ("tie_word_embeddings", False),
        "parallel": ("use_parallel_residual", True),
    }
    form = {
        **{"norm": "layer", "gated": False, "fused": "heads", "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    }
    free = frozenset({"rope_scaling", "rope_fraction", "activation"})
    only = {"attention_bias": (True,)}
    names = [
        ("model.layers.*.self_attn.qkv_proj", "gpt_neox.layers.*.attention.query_key_value"),
        ("model.layers.*.self_attn.o_proj", "gpt_neox.layers.*.attention.dense"),
        ("model.layers.*.self_attn", "gpt_neox.layers.*.attention"),
        ("model.layers.*.mlp.up_proj", "gpt_neox.layers.*.mlp.dense_h_to_4h"),
        ("model.layers.*.mlp.down_proj", "gpt_neox.layers.*.mlp.dense_4h_to_h"),
        ("model.layers", "gpt_neox.layers"),
        ("model.embed_tokens", "gpt_neox.embed_in"),
        ("model.norm", "gpt_neox.final_layer_norm"),
        ("lm_head", "embed_out"),
    ]
    spare = (*Family.spare, "model.layers.*.self_attn.bias", "model.layers.*.self_attn.masked_bias")

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        old = {"rope_theta": published.get("rotary_emb_base", self.theta), **published}
        return {
            **read_rope(old, options["n_position"], self.theta, part=published.get("rotary_pct", 0.25)),
            "n_kv_head": options["n_head"],
            "activation": _read_activation(published, "hidden_act", "gelu"),
        }

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rope, part = written_rope(options), options.get("rope_fraction", 1.0)
        return {
            **{**rope, "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": part}},
            **{"rotary_pct": part, "rotary_emb_base": options["rope_base"]},
            "hidden_act": _written_activation(options),
        }


class Opt(_Decoder):
    """OPT: learned positions, layer norms, biases and a plain MLP. Without the 350m, whose norms follow."""

    name, architecture = "opt", "OPTForCausalLM"
    sizes = {**Family.sizes, "n_hidden": "ffn_dim"}
    keys = {"tie_embeddings": ("tie_word_embeddings", True)}
    form = {
        **{"norm": "layer", "gated": False, "learned_positions": True, "norm_epsilon": 1e-5},
        **{"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    }
    free = frozenset({"activation"})
    only = {
        **{"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,), "enable_bias": (True,)},
        "layer_norm_elementwise_affine": (True,),
    }
    names = [
        ("model.layers.*.self_attn.o_proj", "model.decoder.layers.*.self_attn.out_proj"),
        ("model.layers.*.input_layernorm", "model.decoder.layers.*.self_attn_layer_norm"),
        ("model.layers.*.post_attention_layernorm", "model.decoder.layers.*.final_layer_norm"),
        ("model.layers.*.mlp.up_proj", "model.decoder.layers.*.fc1"),
        ("model.layers.*.mlp.down_proj", "model.decoder.layers.*.fc2"),
        ("model.norm", "model.decoder.final_layer_norm"),
        ("model", "model.decoder"),
    ]
    spare = ()

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        require_only(published, {"word_embed_proj_dim": (options["n_embd"], None)})
        return {
            "n_kv_head": options["n_head"],
            "activation": _read_activation(published, "activation_function", "relu"),
        }

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"word_embed_proj_dim": options["n_embd"], "activation_function": _written_activation(options)}


class Olmo2(_Biased):
    """OLMo 2: norms after attention and MLP, queries and keys normalised over all heads."""

    name, architecture = "olmo2", "Olmo2ForCausalLM"
    keys = {**Family.keys, "norm_epsilon": ("rms_norm_eps", 1e-5)}
    form = {"norm_place": "after", "qk_norm": "all"}


class Mixtral(Family):
    """Mixtral: Mistral with experts in place of the MLP. The published balance of the loss has no effect here."""

    name, architecture, source = "mixtral", "MixtralForCausalLM", "planetary.models.moe:build"
    plain = {
        **dict.fromkeys(("qkv_bias", "output_bias", "qk_norm"), False),
        **dict.fromkeys(("head_size", "window", "rope_scaling")),
        "share_gates": True,
    }
    sizes = {**Family.sizes, "n_expert": "num_local_experts", "n_active": "num_experts_per_tok"}
    keys = {**Mistral.keys, "norm_epsilon": ("rms_norm_eps", 1e-5)}
    form = {"balance": 0.0}
    free = Family.free | {"balance"}
    only = {**Family.only, "router_jitter_noise": (0.0, None)}
    theta = 1_000_000.0
    _own_names = {
        "embedding": "model.embed_tokens",
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        "layers.*.attention": "model.layers.*.self_attn",
        "layers.*.mixture_norm": "model.layers.*.post_attention_layernorm",
        "norm": "model.norm",
        "head": "lm_head",
    }
    names = [
        *_own_names.items(),
        ("layers.*.router", "model.layers.*.block_sparse_moe.gate"),
        ("layers.*.experts.gate", "model.layers.*.block_sparse_moe.experts.*.w1.weight"),
        ("layers.*.experts.up", "model.layers.*.block_sparse_moe.experts.*.w3.weight"),
        ("layers.*.experts.down", "model.layers.*.block_sparse_moe.experts.*.w2.weight"),
    ]
    turned, gates = (".experts.gate", ".experts.up", ".experts.down"), (".router.",)
    spare = ("layers.*.attention.rotary_emb.inv_freq",)


class Qwen3Moe(_Biased):
    """Qwen3 with experts in place of every MLP. The published balance of the loss has no effect here."""

    name, architecture, source = "qwen3_moe", "Qwen3MoeForCausalLM", Mixtral.source
    plain = Mixtral.plain
    sizes = {
        **Family.sizes,
        **{"n_hidden": "moe_intermediate_size", "n_expert": "num_experts", "n_active": "num_experts_per_tok"},
    }
    keys = {**Family.keys, "share_gates": ("norm_topk_prob", False)}
    form = {"balance": 0.0, "qk_norm": True}
    free = _Biased.free | {"balance"}
    only = {**Qwen2.only, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
    names = [
        *Mixtral._own_names.items(),
        ("layers.*.router", "model.layers.*.mlp.gate"),
        *(
            (f"layers.*.experts.{part}", f"model.layers.*.mlp.experts.*.{part}_proj.weight")
            for part in ("gate", "up", "down")
        ),
    ]
    turned, gates, spare = Mixtral.turned, Mixtral.gates, Mixtral.spare

    def options(self, published: Mapping[str, Any]) -> dict[str, Any]:
        named = {"num_experts": published.get("num_local_experts"), **published}  # the key since transformers 5
        return super().options({name: value for name, value in named.items() if name != "num_local_experts"})


def _read_activation(published: Mapping[str, Any], name: str, absent: str) -> str:
    value = published.get(name, absent)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise UserError(f"{name} is {value!r}: the model here has {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[value]


def _written_activation(options: Mapping[str, Any]) -> str:
    return next(name for name, own in _ACTIVATIONS.items() if own == options["activation"])
