"""`model.source` is a folder with a pretrained model: what it stands for, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "n_inner": None,
    "n_positions": 64,
    "vocab_size": 300,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA_OPTIONS = {
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 16,
    "n_hidden": 24,
    "vocab_size": 300,
    "n_position": 64,
    "norm_epsilon": 1e-6,
    "tie_embeddings": False,
    "rope_base": 10_000.0,
}
STRETCHED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def folder_of(place: Path, published: Any, *, tokenizer: bool = True) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(published))
    if tokenizer:
        (place / "tokenizer.json").write_text("{}")
    return place


def configured(place: Path, published: Any, **tables: Any) -> Config:
    model = tables.pop("model", {})
    return config_from_tables({"model": {"source": str(folder_of(place, published)), **model}, **tables})


def test_a_qwen2_is_a_llama_with_biases(tmp_path: Path) -> None:
    published = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64}
    config = configured(tmp_path / "qwen2", published)
    assert config.model.source == "planetary.models.llama:build"
    assert config.model.options == {**LLAMA_OPTIONS, "qkv_bias": True}
    with pytest.raises(UserError, match="use_sliding_window is True"):
        configured(tmp_path / "sliding", {**published, "use_sliding_window": True})


def test_gpt2_keeps_its_sizes_weights_and_tokenizer(tmp_path: Path) -> None:
    config = configured(tmp_path / "gpt2", GPT2, train={"batch_size": 4, "sequence_length": 32})
    assert config.model.source == "planetary.models.gpt2:build"
    assert config.model.options == {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 300, "n_position": 64}
    assert config.model.weights == str(tmp_path / "gpt2")
    assert "h.*.attn.bias" in config.model.weights_optional
    assert config.data.tokenizer == str(tmp_path / "gpt2" / "tokenizer.json")
    assert (config.train.batch_size, config.train.sequence_length) == (4, 32)


def test_relative_folder_is_found_from_the_file(tmp_path: Path) -> None:
    """A relative folder is found from the file and the configuration is read back."""
    folder_of(tmp_path / "gpt2", GPT2)
    (tmp_path / "run.toml").write_text('[model]\nsource = "gpt2"\n')
    config = load_config(tmp_path / "run.toml")
    (tmp_path / "again.toml").write_text(to_toml(config))
    again = load_config(tmp_path / "again.toml")
    assert again == config
    assert again.model.options["n_layer"] == 2


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"num_key_value_heads": None}, {"n_kv_head": 4}, id="as many keys as queries"),
        pytest.param({"tie_word_embeddings": True}, {"tie_embeddings": True}, id="tied"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": None}, {"rope_base": 5e5}, id="another base"),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **STRETCHED}},
            {"rope_base": 5e5, "rope_scaling": STRETCHED},
            id="stretched, before transformers 5",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCHED}},
            {"rope_base": 5e5, "rope_scaling": STRETCHED},
            id="stretched",
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            id="stretched evenly",
        ),
        pytest.param(
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": None}, "max_position_embeddings": 64},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            id="stretched by yarn",
        ),
        pytest.param({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}, id="biases of attention"),
        pytest.param({"mlp_bias": True}, {"mlp_bias": True}, id="biases of the MLP"),
        pytest.param({"head_dim": 8}, {"head_size": 8}, id="heads of their own size"),
        pytest.param({"model_type": "qwen3", "head_dim": 8}, {"qk_norm": True, "head_size": 8}, id="qwen3"),
        pytest.param({"model_type": "qwen3"}, {"qk_norm": True, "head_size": 128}, id="qwen3 with its own default"),
    ],
)
def test_a_llama_is_the_model_here(tmp_path: Path, changed: dict[str, Any], options: dict[str, Any]) -> None:
    config = configured(tmp_path, {**LLAMA, **changed})
    assert config.model.source == "planetary.models.llama:build"
    assert config.model.options == {**LLAMA_OPTIONS, **options}
    assert ("lm_head.weight" in config.model.weights_optional) == bool(options.get("tie_embeddings"))


@pytest.mark.parametrize(
    ("published", "text"),
    [
        ({"model_type": "bert"}, r"model_type is 'bert'; pretrained models can be of type 'gpt2', 'llama'"),
        ([], "model_type is None"),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu': the model here has 'gelu_new' only"),
        ({**GPT2, "layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({**GPT2, "n_inner": 32}, "n_inner is 32: the model here has 4"),
        ({**GPT2, "n_layer": "two"}, "n_layer is 'two': expected a whole number from 1 to 4096"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected a whole number from 1 to"),
        ({**LLAMA, "vocab_size": 10**30}, "vocab_size is 1000000000.*: expected a whole number from 1 to"),
        ({**LLAMA, "rms_norm_eps": "x"}, "rms_norm_eps is 'x': expected a number"),
        ({**LLAMA, "rms_norm_eps": True}, "rms_norm_eps is True: expected a number"),
        ({**LLAMA, "rope_theta": float("nan")}, "rope_theta is nan: expected a number"),
        ({**LLAMA, "rope_scaling": "x"}, "rope_scaling is 'x': expected an object"),
        ({**LLAMA, "rope_scaling": {"type": []}}, r"rotary positions of type \[\]"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 1e300}}, r"factor is 1e\+300: expected a number"),
        ({k: v for k, v in GPT2.items() if k != "vocab_size"}, "vocab_size is None"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary positions of type 'dynamic'"),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "rotary positions of type 'yarn' have mscale",
        ),
    ],
)
def test_what_the_model_here_does_not_have_is_refused(tmp_path: Path, published: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        configured(tmp_path, published)


def test_a_damaged_description_is_an_error(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000):
        (folder_of(tmp_path, GPT2) / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
            config_from_tables({"model": {"source": str(tmp_path)}})


def test_options_may_add_to_the_folder_and_not_contradict_it(tmp_path: Path) -> None:
    assert configured(tmp_path, GPT2, model={"options": {"n_layer": 2}}).model.options["n_layer"] == 2
    with pytest.raises(UserError, match=r"model\.options\.n_layer is 4, and .*config\.json says 2: leave it out"):
        configured(tmp_path, GPT2, model={"options": {"n_layer": 4}})
    with pytest.raises(UserError, match=r"has weights of its own"):
        configured(tmp_path, GPT2, model={"weights": "other.safetensors"})


def test_tokens_of_another_tokenizer_are_never_taken_in_silence(tmp_path: Path) -> None:
    source = {"source": str(folder_of(tmp_path, GPT2, tokenizer=False))}
    with pytest.raises(UserError, match=r"has no tokenizer\.json, .* name its tokenizer in data\.tokenizer"):
        config_from_tables({"model": source})
    assert config_from_tables({"model": source, "data": {"tokenizer": "byte"}}).data.tokenizer == "byte"
