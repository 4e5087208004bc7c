"""Names in GGUF files, by architecture: settings as keys of a published `config.json`, tensors as published ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from planetary.core.errors import UserError

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_OTHERS = {
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_KNOWN = (
    *("vocab_size", "tensor_data_layout", "attention.value_length", "attention.sliding_window_pattern"),
    *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.finetuned", "attention.causal"),
)
"""Other settings that are read, or change no numbers."""
_NOTHING = (0, False, "", "none")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_qkv": "model.layers.*.self_attn.qkv_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}
_AROUND = {  # Gemma's four norms
    "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the divisors of rotary frequencies, of Llama 3.1 and later."""


class GgufFamily(msgspec.Struct, frozen=True):
    """One architecture of GGUF files.

    Attributes:
        architecture: as `general.architecture` says it; first part of the settings' keys.
        model_type: of the published `config.json`.
        names: beginnings of tensors' names -> published ones.
        pairs: the two channels that a rotary position turns are neighbours in the rows of queries and keys.
        added: number that was added to the weights of norms.
    """

    architecture: str
    model_type: str
    names: dict[str, str]
    pairs: bool = False
    added: float = 0.0

    def published(self, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return the `config.json` of a file with these settings and shapes of tensors."""
        prefix = f"{self.architecture}."
        found: dict[str, Any] = {"model_type": self.model_type, "dtype": "float32", "torch_dtype": "float32"}
        for key, value in metadata.items():
            name = {**_SIZES, **_OTHERS}.get(key.removeprefix(prefix))
            if key.startswith(prefix) and name is not None:
                found[name] = value
            elif key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN and value not in _NOTHING:
                raise UserError(f"{key} is {value!r:.80}, a setting that is not known here")
        self._read_heads(found, metadata)
        found["vocab_size"] = tensors.get("token_embd.weight", (0,))[0]
        found["tie_word_embeddings"] = "output.weight" not in tensors
        if self.model_type != "qwen2":
            found["attention_bias"] = any(f"blk.0.attn_{part}.bias" in tensors for part in ("q", "output"))
            found["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
        kind = metadata.get(f"{prefix}rope.scaling.type", "none")
        if kind != "none":
            original = metadata.get(f"{prefix}rope.scaling.original_context_length")
            scaling = {"rope_type": kind, "factor": metadata.get(f"{prefix}rope.scaling.factor")}
            found["rope_scaling"] = {**scaling, **({"original_max_position_embeddings": original} if original else {})}
        if self.added:
            found["query_pre_attn_scalar"] = self._scalar(found)
        return {**found, **_ids(metadata)}

    def _read_heads(self, found: dict[str, Any], metadata: Mapping[str, Any]) -> None:
        """Add the part of a head's channels that turn, and the layers without a window."""
        prefix, heads = f"{self.architecture}.", found.get("num_attention_heads")
        width = found.get("head_dim")
        if width is None and isinstance(heads, int) and heads and isinstance(found.get("hidden_size"), int):
            width = found["hidden_size"] // heads
        if (values := metadata.get(f"{prefix}attention.value_length", width)) != width:
            raise UserError(f"{prefix}attention.value_length is {values!r}: expected {width}, the width of keys")
        if (turning := metadata.get(f"{prefix}rope.dimension_count", width)) != width and width:
            if not isinstance(turning, int) or not isinstance(width, int):
                raise UserError(f"{prefix}rope.dimension_count is {turning!r:.80}: expected a number of channels")
            found["partial_rotary_factor"] = turning / width
        pattern = metadata.get(f"{prefix}attention.sliding_window_pattern")
        if isinstance(pattern, list):
            found["layer_types"] = ["sliding_attention" if near else "full_attention" for near in pattern]
        elif pattern is not None:
            found["sliding_window_pattern"] = pattern

    def _scalar(self, published: Mapping[str, Any]) -> int:
        """Return the square of the divisor of Gemma's scores, which a file does not have."""
        is_27b = published.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[self.architecture]
        if is_27b and isinstance(published.get("num_attention_heads"), int):
            return published["hidden_size"] // published["num_attention_heads"]
        return published.get("head_dim", 256)

    def metadata(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a model with a published `config.json`, with all keys.

        Raises:
            UserError: the architecture has no place for a setting.
        """
        prefix = f"{self.architecture}."
        names = {**_SIZES, **_OTHERS}
        found = {prefix + key: published[name] for key, name in names.items() if published.get(name) is not None}
        rope = published["rope_parameters"]
        expected: dict[str, Any] = {"partial_rotary_factor": (1.0, None), "attention_factor": (None,)}
        if self.added:
            every = {"gemma2": 2, "gemma3": 6}[self.architecture]
            layers = range(1, published["num_hidden_layers"] + 1)
            kinds = ["sliding_attention" if i % every else "full_attention" for i in layers]
            expected |= {"query_pre_attn_scalar": (self._scalar(published),), "layer_types": (kinds,)}
        if self.architecture == "gemma3":
            expected["rope_local_base_freq"] = (10_000.0,)
            rope = rope["full_attention"]
        elif self.architecture == "llama":
            expected["sliding_window"] = (None,)
        for name, values in expected.items():
            if (value := {**published, **rope}.get(name)) is not None and value not in values:
                raise UserError(f"{name} is {value!r:.80}: {self.architecture!r} files have no place for it")
        found[f"{prefix}rope.freq_base"] = rope["rope_theta"]
        found[f"{prefix}rope.dimension_count"] = published["head_dim"]
        found[f"{prefix}attention.value_length"] = published["head_dim"]
        found[f"{prefix}vocab_size"] = published["vocab_size"]
        if rope["rope_type"] == "longrope":
            raise UserError("rotary positions of type 'longrope' are not written to GGUF files here")
        if rope["rope_type"] in {"linear", "yarn"}:
            found |= {f"{prefix}rope.scaling.type": rope["rope_type"], f"{prefix}rope.scaling.factor": rope["factor"]}
            if original := rope.get("original_max_position_embeddings"):
                found[f"{prefix}rope.scaling.original_context_length"] = original
        return {"general.architecture": self.architecture, **found}

    def stored_name(self, name: str) -> str:
        """Return the published name of a tensor in the file."""
        return _renamed(name, self.names.items(), name)

    def name_in_file(self, stored: str) -> str:
        """Return the name in the file of a published tensor. Raises `UserError` where there is none."""
        found = _renamed(stored, ((own, name) for name, own in self.names.items()), "")
        if not found:
            raise UserError(f"GGUF files of the architecture {self.architecture!r} have no tensor {stored!r}")
        return found

    def own_values(
        self, stored: str, value: np.ndarray, published: Mapping[str, Any], *, back: bool = False
    ) -> np.ndarray:
        """Return a tensor's published numbers of those in the file, or with `back` the other way."""
        if self.added and stored.endswith("norm.weight"):
            return value + np.float32(self.added if back else -self.added)
        if self.pairs and (match := re.search(r"\.self_attn\.([qk])_proj\.", stored)):
            heads = published["num_attention_heads"]
            heads = heads if match[1] == "q" else published.get("num_key_value_heads") or heads
            form = (heads, 2, -1) if back else (heads, -1, 2)
            return value.reshape(*form, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        return value


def _renamed(name: str, names: Iterable[tuple[str, str]], otherwise: str) -> str:
    for old, new in names:
        if match := re.match(re.escape(old).replace(r"\*", r"(\d+)") + r"(?=\.(weight|bias)$)", name):
            return new.replace("*", match[1] if "*" in old else "") + name[match.end() :]
    return otherwise


def _ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens; a text ends with the end of a turn, too."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = list(dict.fromkeys(i for i in (ids["eos"], ids["eot"]) if i is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else (ends or [None])[0],
        "pad_token_id": ids["padding"],
    }


def llama3_factors(scaling: Mapping[str, Any], size: int, base: float) -> np.ndarray:
    """Return the divisors [size / 2], float32, of the rotary frequencies of a head with `size` channels."""
    frequency = base ** (-np.arange(size // 2) * 2 / size)
    waves = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / scaling["factor"] + kept)).astype(np.float32)


def llama3_scaling(factors: np.ndarray, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stretched positions whose frequencies are divided by `factors` [D / 2].

    The file has the divisors and not the settings: those of Llama 3.1 and 3.2 are tried.

    Raises:
        UserError: the divisors are others.
    """
    size = published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]
    for factor in (8.0, 32.0):
        scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        expected = llama3_factors(scaling, size, float(published["rope_theta"]))
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-3):
            return {"rope_type": "llama3", **scaling}
    raise UserError(f"{ROPE_FACTORS} divides rotary frequencies by other numbers than those of Llama 3.1 and 3.2")


GGUF_FAMILIES: tuple[GgufFamily, ...] = (
    GgufFamily("llama", "llama", _NAMES, pairs=True),
    GgufFamily("qwen2", "qwen2", _NAMES),
    GgufFamily("qwen3", "qwen3", _NAMES),
    GgufFamily("phi3", "phi3", {**_NAMES, "blk.*.ffn_up": "model.layers.*.mlp.gate_up_proj"}),
    GgufFamily("gemma2", "gemma2", {**_NAMES, **_AROUND}, added=1.0),
    GgufFamily("gemma3", "gemma3_text", {**_NAMES, **_AROUND}, added=1.0),
)


def family_of_file(architecture: str) -> GgufFamily:
    """Return the family of a file. Raises `UserError` for one that is not known here."""
    for family in GGUF_FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(repr(family.architecture) for family in GGUF_FAMILIES)
    raise UserError(f"general.architecture is {architecture!r}; GGUF files can be of {known}")


def family_of_type(model_type: str) -> GgufFamily:
    """Return the family of a published model. Raises `UserError` where GGUF files have none that is known here."""
    wanted = "llama" if model_type == "mistral" else model_type
    for family in GGUF_FAMILIES:
        if family.model_type == wanted:
            return family
    known = ", ".join(repr(family.model_type) for family in GGUF_FAMILIES)
    raise UserError(f"model_type is {model_type!r}; GGUF files are written of {known}")
