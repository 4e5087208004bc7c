"""Families of published models: their `config.json` as options of a model here and back, and the tensors' names.

A family is a table. What it does not name it does not have: a key of `config.json` that would change numbers and is not
in the table is refused (`_MATTERS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from planetary.core.configuration.published_values import (
    ABSENT,
    read_number,
    read_rope,
    read_size,
    read_table,
    require_only,
    written_rope,
)
from planetary.core.errors import UserError

DECODER, MIXTURE = "planetary.models.llama:build", "planetary.models.moe:build"
PLAIN: Mapping[str, Mapping[str, Any]] = {
    DECODER: {
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "learned_positions"), False),
        **dict.fromkeys(("norm_plus_one", "parallel", "scale_embedding"), False),
        **dict.fromkeys(("head_size", "window", "window_rope_base", "score_scale", "score_cap", "logit_cap")),
        **{"rope_fraction": 1.0, "activation": "silu", "gated": True, "norm": "rms", "norm_place": "before"},
        **{"fused": "no", "full_layers": [], "rope_scaling": None},
    },
    MIXTURE: {
        **dict.fromkeys(("qkv_bias", "output_bias", "qk_norm"), False),
        **dict.fromkeys(("head_size", "window", "rope_scaling")),
        "share_gates": True,
    },
}
"""Options of a function that say which form the model has -> values of the plain form, their defaults."""

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_OFF: tuple[Any, ...] = (None, False)
_MATTERS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "lm_head_bias", "qk_layernorm"), _OFF),
    **dict.fromkeys(("use_qk_norm", "use_bidirectional_attention", "use_sliding_window", "alibi"), _OFF),
    **dict.fromkeys(("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), _OFF),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attention_multiplier", "no_rope_layers", "no_rope_layer_interval"), _OFF
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "quantization_config"), _OFF),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "logit_scale", "logits_scaling"), (None, 1, 1.0)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (None, 1, 1.0)),
}
"""Keys of `config.json` that change numbers in some family -> values with which they do not."""


class Family:
    """One family of published models.

    Attributes:
        model_type: as `config.json` says it.
        architecture: class of `transformers`.
        source: function that builds the same model here.
        sizes: options -> keys with whole numbers, each needed.
        keys: other options -> their key, and its value where `config.json` has none.
        form: options that are the same in the whole family.
        free: more options that `read` may set.
        only: keys that may have these values alone; the first is written.
        names: own beginnings of tensors' names -> stored ones, specific ones first; `*` is a number. A stored one with
            a number more is one of a stack, which is one tensor here.
        turned: ends of own names of stacks whose parts are stored transposed.
        gates: parts of own names of matrices that are no linear layers in `transformers`, and get no adapters there.
        spare: patterns of stored tensors (own names) that are no parameters.
        theta: base of rotary positions without a key.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    source: ClassVar[str] = DECODER
    sizes: ClassVar[Mapping[str, str]] = {
        "n_position": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "n_hidden": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "tie_embeddings": ("tie_word_embeddings", False),
    }
    form: ClassVar[Mapping[str, Any]] = {}
    free: ClassVar[frozenset[str]] = frozenset({"head_size", "rope_scaling"})
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    names: ClassVar[Sequence[tuple[str, str]]] = ()
    turned: ClassVar[tuple[str, ...]] = ()
    gates: ClassVar[tuple[str, ...]] = ()
    spare: ClassVar[tuple[str, ...]] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    theta: ClassVar[float] = 10_000.0

    def options(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `source` a `config.json` stands for.

        Raises:
            UserError: it asks for a feature the model here lacks.
        """
        require_only(published, self.only)
        options: dict[str, Any] = {own: read_size(published, name) for own, name in self.sizes.items()}
        for own, (name, absent) in self.keys.items():
            value = published.get(name, absent)
            if isinstance(absent, bool) or value is None:
                options[own] = value if value is None else bool(value)
            else:
                options[own] = read_size(published, name) if own == "window" else read_number(published, name, absent)
        options |= {**self.form, **self.read(published, options)}
        read = {*self.only, *self.sizes.values(), *(name for name, _ in self.keys.values())}
        read.update(self.published_only(options))
        require_only(published, {name: values for name, values in _MATTERS.items() if name not in read})
        plain = PLAIN.get(self.source, {})
        return {name: value for name, value in options.items() if value != plain.get(name, ABSENT)}

    def published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `config.json` of a model built with `options`, all of them."""
        return {
            **{name: options[own] for own, name in self.sizes.items() if own != "n_position"},
            self.sizes["n_position"]: options["n_position"] or options["sequence_length"],
            **{name: options[own] for own, (name, _) in self.keys.items()},
            **{name: values[0] for name, values in self.only.items()},
            **self.published_only(options),
        }

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that need more than a key; `options`: those that do not."""
        given = {name: value for name, value in published.items() if value is not None}
        found = {"n_kv_head": read_size({"num_key_value_heads": options["n_head"], **given}, "num_key_value_heads")}
        width = read_size(given, "head_dim") if "head_dim" in given else None
        found |= {"head_size": width} if width not in (None, options["n_embd"] // options["n_head"]) else {}
        return {**found, **read_rope(published, options["n_position"], self.theta)}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that `read` reads."""
        return {
            "num_key_value_heads": options["n_kv_head"],
            "head_dim": options.get("head_size") or options["n_embd"] // options["n_head"],
            **written_rope(options),
        }

    def describes(self, options: Mapping[str, Any]) -> bool:
        """Whether a model that `source` builds with `options` is of this family."""
        plain, free = PLAIN.get(self.source, {}), {*self.free, *self.keys, *self.sizes}
        for name in {*plain, *self.form} - free:
            usual = self.form.get(name, plain.get(name))
            if options.get(name, plain.get(name, usual)) != usual:
                return False
        return not ("output_bias" in free and bool(options.get("qkv_bias")) != bool(options.get("output_bias")))

    def unneeded(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return patterns of tensors (own names) that the weights may hold although they are no parameters here."""
        return (*self.spare, *((self.own_name("lm_head.weight"),) if options.get("tie_embeddings") else ()))

    def own_name(self, stored: str) -> str:
        """Return the parameter's name here, or the name of a layer's kind (`fc1`)."""
        return self.own_place(stored)[0]

    def own_place(self, stored: str) -> tuple[str, int | None]:
        """Return the parameter's name here, and the place in the stack it is a part of, if any."""
        for pattern, replacement in self._to_own:
            if match := pattern.match(stored):
                numbers = list(match.groups())
                own = replacement.replace("*", "{}")
                place = int(numbers.pop()) if len(numbers) > replacement.count("*") else None
                return own.format(*numbers) + stored[match.end() :], place
        return stored, None

    def stored_name(self, own: str) -> str:
        """Return the name that `save_pretrained` gives a parameter; `*` stands for the place in a stack."""
        for pattern, replacement in self._to_stored:
            if match := pattern.match(own):
                numbers = [*match.groups(), "*"]
                return replacement.replace("*", "{}").format(*numbers) + own[match.end() :]
        return own

    @cached_property
    def _to_own(self) -> list[tuple[re.Pattern[str], str]]:
        ends = [(stored.rpartition(".")[2], own.rpartition(".")[2]) for own, stored in self.names if "*" in own]
        return _patterns([(stored, own) for own, stored in self.names] + ends)

    @cached_property
    def _to_stored(self) -> list[tuple[re.Pattern[str], str]]:
        return _patterns(self.names)


def _patterns(names: Sequence[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(re.escape(a).replace(r"\*", r"(\d+)") + r"(?=\.|$)"), b) for a, b in names]


class Gpt2(Family):
    """GPT-2. The head is the embedding; the folder's weights may or may not stand below `transformer.`"""

    model_type, architecture, source = "gpt2", "GPT2LMHeadModel", "planetary.models.gpt2:build"
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


class _Biased(Family):
    """Families in which one key gives biases to all of attention."""

    free = Family.free | {"qkv_bias", "output_bias"}

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        biases = bool(published.get("attention_bias"))
        return {**super().read(published, options), "qkv_bias": biases, "output_bias": biases}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().published_only(options), "attention_bias": bool(options.get("output_bias"))}


class Llama(_Biased):
    """Llama, with stretched rotary positions, biases and a tied head where a folder has them."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    keys = {**Family.keys, "mlp_bias": ("mlp_bias", False)}


class Mistral(Family):
    """Mistral: Llama in which a token sees a window."""

    model_type, architecture = "mistral", "MistralForCausalLM"
    keys = {**Family.keys, "window": ("sliding_window", None)}


class Qwen2(Family):
    """Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. Without sliding windows."""

    model_type, architecture = "qwen2", "Qwen2ForCausalLM"
    form = {"qkv_bias": True}
    only = {"hidden_act": ("silu",), "use_sliding_window": (False,), "sliding_window": (None, ...)}


class Qwen3(_Biased):
    """Qwen3: Llama with normalised queries and keys, and heads of their own size. Without sliding windows."""

    model_type, architecture = "qwen3", "Qwen3ForCausalLM"
    form = {"qk_norm": True}
    only = Qwen2.only

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        return super().read({"head_dim": 128, **published}, options)


_FULL, _NEAR = "full_attention", "sliding_attention"


class Gemma2(_Biased):
    """Gemma 2: norms around attention and MLP, bounded scores, a window in every other layer."""

    model_type, architecture = "gemma2", "Gemma2ForCausalLM"
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
        every = self.every if self.model_type == "gemma2" else every
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

    model_type, architecture = "gemma3_text", "Gemma3ForCausalLM"
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


class Phi3(Family):
    """Phi-3 and Phi-4: Llama with one matrix for queries, keys and values, and one for gate and up."""

    model_type, architecture = "phi3", "Phi3ForCausalLM"
    keys = {**Mistral.keys, "norm_epsilon": ("rms_norm_eps", 1e-5)}
    form = {"fused": "rows"}
    free = Family.free | {"rope_fraction"}

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        rope = read_rope(published, options["n_position"], self.theta, part=published.get("partial_rotary_factor", 1.0))
        return {**super().read({**published, "rope_parameters": None, "rope_scaling": None}, options), **rope}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        part = {"partial_rotary_factor": options.get("rope_fraction", 1.0)}
        found = super().published_only(options)
        return {**found, **part, "rope_parameters": {**found["rope_parameters"], **part}}


class GptNeox(Family):
    """GPT-NeoX and Pythia: layer norms, biases, a plain MLP, attention and MLP side by side."""

    model_type, architecture = "gpt_neox", "GPTNeoXForCausalLM"
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


class Opt(Family):
    """OPT: learned positions, layer norms, biases and a plain MLP. Without the 350m, whose norms follow."""

    model_type, architecture = "opt", "OPTForCausalLM"
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

    model_type, architecture = "olmo2", "Olmo2ForCausalLM"
    keys = {**Family.keys, "norm_epsilon": ("rms_norm_eps", 1e-5)}
    form = {"norm_place": "after", "qk_norm": "all"}


class Mixtral(Family):
    """Mixtral: Mistral with experts in place of the MLP. The published balance of the loss has no effect here."""

    model_type, architecture, source = "mixtral", "MixtralForCausalLM", MIXTURE
    sizes = {**Family.sizes, "n_expert": "num_local_experts", "n_active": "num_experts_per_tok"}
    keys = {**Mistral.keys, "norm_epsilon": ("rms_norm_eps", 1e-5)}
    form = {"balance": 0.0}
    free = Family.free | {"balance"}
    theta = 1_000_000.0
    _own_names = {
        "embedding": "model.embed_tokens",
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        "layers.*.attention": "model.layers.*.self_attn",
        "layers.*.expert_norm": "model.layers.*.post_attention_layernorm",
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
    turned, gates, spare = (".experts.down",), (".router.",), ("layers.*.attention.rotary_emb.inv_freq",)


class Qwen3Moe(_Biased):
    """Qwen3 with experts in place of every MLP. The published balance of the loss has no effect here."""

    model_type, architecture, source = "qwen3_moe", "Qwen3MoeForCausalLM", MIXTURE
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


FAMILIES: tuple[Family, ...] = (
    *(Gpt2(), Llama(), Mistral(), Qwen2(), Qwen3(), Gemma2(), Gemma3(), Phi3(), GptNeox(), Opt(), Olmo2()),
    *(Mixtral(), Qwen3Moe()),
)


def family_of(source: str, options: Mapping[str, Any], model_type: str = "") -> Family | None:
    """Return the family of a model that `source` builds with `options`; None: there is none.

    Several may describe it: `model_type` is then preferred.
    """
    found = [family for family in FAMILIES if family.source == source and family.describes(options)]
    return next((family for family in found if family.model_type == model_type), found[0] if found else None)
