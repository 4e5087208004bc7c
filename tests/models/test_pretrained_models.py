"""Folders of pretrained models: read, trained on, and written; the numbers are those of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.artifacts.pretrained_weights import read_pretrained
from planetary.artifacts.safetensors_file import safetensors_pieces
from planetary.compiler.frontend.export import Model, export_model
from planetary.core.config import Config, config_from_tables, to_toml
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import ByteTokenizer
from planetary.fabric.preparation.preparation import builder_options, given_weights
from planetary.models.zoo import ZOO
from planetary.run.model.authoring import load
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.trained_model import fill_tree, load_trained

BATCH = {"batch_size": 2, "sequence_length": 8}
STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4}
MODELS = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_position": 16},
    "llama": {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "n_hidden": 24, "vocab_size": 256},
    "llama, tied": {
        **{"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "n_hidden": 24, "vocab_size": 256},
        **{"tie_embeddings": True, "norm_epsilon": 1e-6, "rope_base": 5e5, "rope_scaling": STRETCHED},
    },
    "llama, qwen2": {
        **{"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "n_hidden": 24, "vocab_size": 256},
        **{"qkv_bias": True, "rope_base": 1e6, "norm_epsilon": 1e-6},
    },
    "llama, qwen3": {
        **{"n_layer": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "n_hidden": 24, "vocab_size": 256},
        **{"qk_norm": True, "head_size": 6, "n_position": 64, "norm_epsilon": 1e-6},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
        },
    },
    "llama, biases": {
        **{"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "n_hidden": 24, "vocab_size": 256},
        **{"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 8)).astype(np.int32)


def config_of(name: str, **model: Any) -> Config:
    source = ZOO[name.partition(",")[0]].source
    return config_from_tables(
        {"model": {"source": source, "options": MODELS[name], **model}, "train": BATCH, "data": {"source": "stdlib"}}
    )


def run_of(folder: Path, config: Config) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a run's folder with random parameters, and return it with them."""
    model = export_model(config.model.source, builder_options(config, config.model.source))
    rng = np.random.default_rng(1)
    params = {k: rng.normal(0, 0.2, v.shape).astype(np.float32) for k, v in model.initial("param").items()}
    info = CheckpointInfo(
        round=3,
        config_hash="",
        model="",
        model_digest="",
        param_specs=tuple(TensorSpec(k, "f32", v.shape) for k, v in params.items()),
        data_key="",
        controller=msgspec.Raw(b"{}"),
        random_state={},
    )
    write_checkpoint(folder / "checkpoints", Checkpoint(info, params, params), keep=1)
    (folder / "config.toml").write_text(to_toml(config))
    return folder, params


def from_folder(folder: Path) -> tuple[Config, Model]:
    """Return the configuration and the model, with its weights, that a run with this folder has."""
    config = config_from_tables({"model": {"source": str(folder)}, "train": BATCH, "data": {"source": "stdlib"}})
    model = export_model(config.model.source, builder_options(config, config.model.source))
    return config, given_weights(model, config.model)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_run_exports_can_be_trained_on(tmp_path: Path, name: str) -> None:
    run, params = run_of(tmp_path / "run", config_of(name))
    made = export_pretrained(run, tmp_path / "out")
    assert (made.round, made.param_count) == (3, sum(value.size for value in params.values()))
    config, model = from_folder(tmp_path / "out")
    assert config.model.source == ZOO[name.partition(",")[0]].source
    assert config.model.options.items() >= MODELS[name].items()
    found = model.initial("param")
    assert found.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == ByteTokenizer().to_json()
    with pytest.raises(UserError, match="already holds a model"):
        export_pretrained(run, tmp_path / "out")
    assert export_pretrained(run, tmp_path / "out", force=True) == made


def test_a_folder_is_a_model_for_every_command(tmp_path: Path) -> None:
    run, params = run_of(tmp_path / "run", config_of("gpt2"))
    export_pretrained(run, tmp_path / "out")
    model = load(tmp_path / "out", options=BATCH)
    np.testing.assert_array_equal(model.initial("param")["wpe.weight"], params["wpe.weight"])
    assert {argument.shape for argument in model.manifest.arguments[-2:]} == {(2, 8)}
    with pytest.raises(UserError, match=r"n_layer is 3"):
        load(tmp_path / "out", options={"n_layer": 3})


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    with pytest.raises(UserError, match=r"no model that is planetary\.models\.nanochat:build.*load_into"):
        export_pretrained(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="is not a run folder"):
        export_pretrained(tmp_path / "absent", tmp_path / "out")


def written(folder: Path, tensors: dict[str, np.ndarray], files: int = 1, **published: Any) -> Path:
    """Write a folder of a pretrained model, in `files` files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **published}))
    names = sorted(tensors)
    parts = {f"part-{i}.safetensors": names[i::files] for i in range(files)}
    if files == 1:
        parts = {"model.safetensors": names}
    else:
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, own in parts.items():
        specs = [TensorSpec(name, "f32", tensors[name].shape) for name in own]
        (folder / file).write_bytes(b"".join(safetensors_pieces(specs, tensors, {"format": "pt"})))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_weights_are_in_one_file_or_several_with_or_without_the_models_name(tmp_path: Path, files: int) -> None:
    tensors = {"transformer.wte.weight": np.ones((4, 2), np.float32), "ln_f.bias": np.zeros(2, np.float32)}
    specs, found = read_pretrained(written(tmp_path / "gpt2", tensors, files))
    assert {spec.name: spec.shape for spec in specs} == {"wte.weight": (4, 2), "ln_f.bias": (2,)}
    np.testing.assert_array_equal(found["wte.weight"], tensors["transformer.wte.weight"])


def test_weights_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    folder = written(tmp_path / "gpt2", {"wte.weight": np.ones(1, np.float32)})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no weights in .*; pytorch_model\.bin is a pickle, which can run any code"):
        read_pretrained(folder)
    index = folder / "model.safetensors.index.json"
    for damaged in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(damaged)
        with pytest.raises(UserError, match="is damaged, it is no index of weights"):
            read_pretrained(folder)
    index.write_text('{"weight_map": {"wte.weight": "../../elsewhere.safetensors"}}')
    with pytest.raises(UserError, match="expected the names of files beside it"):
        read_pretrained(folder)
    twice = {"transformer.ln_f.bias": np.ones(1, np.float32), "ln_f.bias": np.ones(1, np.float32)}
    with pytest.raises(UserError, match=r"'transformer\.ln_f\.bias' is there twice"):
        read_pretrained(written(tmp_path / "twice", twice))


def test_a_longer_text_than_the_positions_is_refused() -> None:
    with pytest.raises(UserError, match="n_position=16 positions, fewer than sequence_length=32"):
        export_model(ZOO["gpt2"].source, {**MODELS["gpt2"], "sequence_length": 32})


needs_transformers = pytest.mark.doors("torch", "transformers")


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_has_the_same_scores_in_transformers(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = run_of(tmp_path / "run", config_of(name))
    export_pretrained(run, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    trained = load_trained(run)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(np.asarray(trained.logits(trained.params, TOKENS)), expected, rtol=1e-4, atol=1e-5)
    text = "def f(x):\n\treturn 'é€'"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pretrained_model_has_the_same_scores_here(tmp_path: Path, name: str, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    run, _ = run_of(tmp_path / "run", config_of(name))
    export_pretrained(run, tmp_path / "out")
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out")).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder, max_shard_size="4KB")
    (folder / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    config, model = from_folder(folder)
    params = model.initial("param")
    with torch.no_grad():
        expected = theirs.float().eval()(torch.from_numpy(TOKENS).long()).logits.numpy()
    run, _ = run_of(tmp_path / "again", config)
    trained = load_trained(run)
    filled = fill_tree(trained.params, params, config.model.source, whole=True)
    np.testing.assert_allclose(np.asarray(trained.logits(filled, TOKENS)), expected, rtol=1e-4, atol=1e-5)
