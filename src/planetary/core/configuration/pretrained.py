"""Folders as `transformers` keeps pretrained models (`from_pretrained`, `save_pretrained`), and the same models here.

A folder has `config.json`, the weights in safetensors files, and most have `tokenizer.json`. Of some families the model
here has the same parameters under the same names; a `Layout` translates the names of the options in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from planetary.core.errors import UserError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
_ABSENT = object()
_SCALINGS: Mapping[str, tuple[str, ...]] = {  # types of stretched rotary positions, and the keys of each
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
}


class Layout(Protocol):
    """One family of published models.

    Attributes:
        model_type: as `config.json` says it.
        architecture: class of `transformers`.
        source: function that builds the same model here.
    """

    @property
    def model_type(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def source(self) -> str: ...

    def options(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `source` a `config.json` stands for.

        Raises:
            UserError: it asks for a feature the model here lacks.
        """
        ...

    def describes(self, options: Mapping[str, Any]) -> bool:
        """Whether a model that `source` builds with `options`, all of them, is of this family."""
        ...

    def unneeded(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return patterns of tensors (own names) that the weights may hold although they are no parameters here."""
        ...

    def published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `config.json` of a model built with `options`, all of them."""
        ...

    def own_name(self, stored: str) -> str:
        """Return the parameter's name here."""
        ...

    def stored_name(self, own: str) -> str:
        """Return the name that `save_pretrained` gives a parameter."""
        ...


class Gpt2Layout:
    """GPT-2. The head is the embedding; the folder's weights may or may not stand below `transformer.`"""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    source = "planetary.models.gpt2:build"
    _prefix = "transformer."
    _only = {  # noqa: RUF012
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }

    def options(self, published: Mapping[str, Any]) -> dict[str, Any]:
        _require(published, self._only)
        options = {name: _size(published, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
        inner = published.get("n_inner")
        if inner not in (None, 4 * options["n_embd"]):
            raise UserError(f"n_inner is {inner}: the model here has 4 * n_embd = {4 * options['n_embd']}")
        return {**options, "n_position": _size(published, "n_positions")}

    def describes(self, options: Mapping[str, Any]) -> bool:
        return True

    def unneeded(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Causal masks, and the head where it is stored a second time."""
        return ("h.*.attn.bias", "h.*.attn.masked_bias", "lm_head.weight")

    def published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{name: options[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
            "n_positions": options["n_position"] or options["sequence_length"],
            **{name: values[0] for name, values in self._only.items()},
        }

    def own_name(self, stored: str) -> str:
        return stored.removeprefix(self._prefix)

    def stored_name(self, own: str) -> str:
        return self._prefix + own


class LlamaLayout:
    """Llama, with stretched rotary positions, biases and a tied head where a folder has them."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    source = "planetary.models.llama:build"
    _only: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
    _head_size: int | None = None  # head size; None: hidden_size / num_attention_heads, where the folder has no entry
    _sizes = {  # noqa: RUF012
        "n_position": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "n_hidden": "intermediate_size",
        "vocab_size": "vocab_size",
    }

    def options(self, published: Mapping[str, Any]) -> dict[str, Any]:
        _require(published, self._only)
        options: dict[str, Any] = {own: _size(published, name) for own, name in self._sizes.items()}
        options["n_kv_head"] = published.get("num_key_value_heads") or options["n_head"]
        width = published.get("head_dim") or self._head_size
        if width not in (None, options["n_embd"] // options["n_head"]):
            options["head_size"] = width
        options["norm_epsilon"] = _number(published, "rms_norm_eps", 1e-6)
        options["tie_embeddings"] = bool(published.get("tie_word_embeddings", False))
        options |= self._own(published)
        # `rope_parameters` since transformers 5; two keys before.
        rope = {"rope_theta": published.get("rope_theta", 10_000.0), **_table(published, "rope_scaling")}
        rope |= _table(published, "rope_parameters")
        options["rope_base"] = _number(rope, "rope_theta")
        del rope["rope_theta"]
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        if not isinstance(kind, str) or kind not in ("default", *_SCALINGS):
            types = ", ".join(f"'{one}'" for one in ("default", *_SCALINGS))
            raise UserError(f"rotary positions of type {kind!r}: the model here has those of types {types}")
        if kind != "default":
            if kind == "yarn":
                rope.setdefault("original_max_position_embeddings", options["n_position"])
            unknown = sorted(name for name, value in rope.items() if name not in _SCALINGS[kind] and value is not None)
            if unknown:
                raise UserError(f"rotary positions of type {kind!r} have {unknown[0]}, which the model here has not")
            scaling = {name: rope[name] for name in _SCALINGS[kind] if rope.get(name) is not None}
            for name in scaling:
                if name != "truncate":
                    _number(scaling, name)
            options["rope_scaling"] = scaling if kind == "llama3" else {"rope_type": kind, **scaling}
        return options

    def _own(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that this family has beside Llama's common ones."""
        found = {}
        if published.get("attention_bias"):
            found |= {"qkv_bias": True, "output_bias": True}
        return {**found, "mlp_bias": True} if published.get("mlp_bias") else found

    def _own_published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `config.json` for the options of `_own`."""
        return {"attention_bias": bool(options.get("output_bias")), "mlp_bias": bool(options.get("mlp_bias"))}

    def describes(self, options: Mapping[str, Any]) -> bool:
        return not options.get("qk_norm") and bool(options.get("qkv_bias")) == bool(options.get("output_bias"))

    def unneeded(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Tables of rotary positions, and a tied head where it is stored a second time."""
        head = ("lm_head.weight",) if options.get("tie_embeddings") else ()
        return ("model.layers.*.self_attn.rotary_emb.inv_freq", *head)

    def published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        scaling = {name: value for name, value in (options["rope_scaling"] or {}).items() if value is not None}
        rope = {"rope_type": "llama3", **scaling} if scaling else {"rope_type": "default"}
        return {
            **{name: options[own] for own, name in self._sizes.items() if own != "n_position"},
            "num_key_value_heads": options["n_kv_head"],
            "head_dim": options.get("head_size") or options["n_embd"] // options["n_head"],
            "max_position_embeddings": options["n_position"] or options["sequence_length"],
            "rms_norm_eps": options["norm_epsilon"],
            "tie_word_embeddings": options["tie_embeddings"],
            "rope_parameters": {"rope_theta": options["rope_base"], **rope},
            "rope_theta": options["rope_base"],  # this and the next for transformers before 5
            "rope_scaling": rope if scaling else None,
            **{name: values[0] for name, values in self._only.items()},
            **self._own_published(options),
        }

    def own_name(self, stored: str) -> str:
        return stored

    def stored_name(self, own: str) -> str:
        return own


class Qwen2Layout(LlamaLayout):
    """Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. Without sliding windows."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    _only = {"hidden_act": ("silu",), "use_sliding_window": (False,)}  # noqa: RUF012

    def _own(self, published: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv_bias": True}

    def _own_published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def describes(self, options: Mapping[str, Any]) -> bool:
        others = any(options.get(name) for name in ("qk_norm", "output_bias", "mlp_bias"))
        return bool(options.get("qkv_bias")) and not others


class Qwen3Layout(LlamaLayout):
    """Qwen3: Llama with normalised queries and keys, and heads of their own size. Without sliding windows."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    _only = {  # noqa: RUF012
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
    }
    _head_size = 128

    def _own(self, published: Mapping[str, Any]) -> dict[str, Any]:
        biases = {"qkv_bias": True, "output_bias": True} if published.get("attention_bias") else {}
        return {"qk_norm": True, **biases}

    def _own_published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention_bias": bool(options.get("output_bias"))}

    def describes(self, options: Mapping[str, Any]) -> bool:
        biases = bool(options.get("qkv_bias")) == bool(options.get("output_bias")) and not options.get("mlp_bias")
        return bool(options.get("qk_norm")) and biases


LAYOUTS: tuple[Layout, ...] = (Gpt2Layout(), LlamaLayout(), Qwen2Layout(), Qwen3Layout())


def is_pretrained(folder: Path) -> bool:
    """Whether this is such a folder."""
    return (folder / CONFIG_FILE).is_file()


def read_settings(path: Path, content: str) -> dict[str, Any]:
    """Return the object in a JSON file of a published folder; anything else in it counts as an empty one.

    Raises:
        UserError: it cannot be read or is no JSON; `content`: of the folder, in words.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {content} {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def read_published(folder: Path) -> tuple[Layout, dict[str, Any]]:
    """Return the layout of a folder, and the `config.json`.

    Raises:
        UserError: it cannot be read, or is of another family than those in `LAYOUTS`.
    """
    path = folder / CONFIG_FILE
    published = read_settings(path, "the pretrained model")
    kind = published.get("model_type")
    for layout in LAYOUTS:
        if layout.model_type == kind:
            return layout, published
    known = ", ".join(repr(layout.model_type) for layout in LAYOUTS)
    raise UserError(f"{path}: model_type is {kind!r}; pretrained models can be of type {known}")


def pretrained_tables(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration's tables, completed from a pretrained folder that is `model.source`.

    That is `model.source`, `options`, `weights` and `weights_optional`, and `data.tokenizer` where nothing is said.

    Raises:
        UserError: the folder is not understood, the tables contradict it, or it has no tokenizer and nothing is said.
    """
    layout, published = read_published(folder)
    try:
        options = layout.options(published)
    except UserError as error:
        raise UserError(f"cannot train the pretrained model {folder}: {error}") from None
    model, data = dict(tables["model"]), dict(tables.get("data", {}))
    given = model.get("options", {})
    if not isinstance(given, Mapping):
        return dict(tables)  # wrong in itself, and refused as such
    for name, value in given.items():
        if name in options and value != options[name]:
            raise UserError(
                f"model.options.{name} is {value}, and {folder / CONFIG_FILE} says {options[name]}: leave it out (from "
                "a file: --set 'model.options={}')"
            )
    if model.get("weights"):
        raise UserError(f"model.weights is {model['weights']}, and {folder} has weights of its own: leave it out")
    patterns = (*model.get("weights_optional", ()), *layout.unneeded(options))
    model |= {"source": layout.source, "options": {**options, **given}, "weights": str(folder)}
    model["weights_optional"] = list(dict.fromkeys(patterns))
    if "tokenizer" not in data:
        if not (folder / TOKENIZER_FILE).is_file():
            raise UserError(
                f"{folder} has no {TOKENIZER_FILE}, and other tokens than the model was trained with would be noise to "
                "it: name its tokenizer in data.tokenizer"
            )
        data["tokenizer"] = str(folder / TOKENIZER_FILE)
    return {**tables, "model": model, "data": data}


def _require(published: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in only.items():
        found = published.get(name, _ABSENT)
        if found is not _ABSENT and found not in values:
            raise UserError(f"{name} is {found!r}: the model here has {values[0]!r} only")


_LARGEST_SIZE, _MOST_LAYERS = 2**31 - 1, 4096
_LARGEST_NUMBER = 1e12  # largest base, factor or length; the largest published base is 1e9


def _size(published: Mapping[str, Any], name: str) -> int:
    value, most = published.get(name), _MOST_LAYERS if "layer" in name else _LARGEST_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r}: expected a whole number from 1 to {most}")
    return value


def _number(published: Mapping[str, Any], name: str, absent: float | None = None) -> float:
    value = published.get(name, absent)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LARGEST_NUMBER:
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r}: expected a number from 0 to {_LARGEST_NUMBER:g}")
    return float(value)


def _table(published: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = published.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r}: expected an object, or null")
    return value or {}
