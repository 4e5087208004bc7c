"""Folders of pretrained models: read, trained on, and written; the numbers are those of `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from installed_example import install_example
from planetary.artifacts.checkpoint import Checkpoint, load_latest, write_checkpoint
from planetary.artifacts.pretrained_weights import read_pretrained
from planetary.artifacts.safetensors_file import safetensors_pieces
from planetary.compiler.frontend.export import Model, export_model
from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config, DataConfig
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import ByteTokenizer
from planetary.models.llama import cache_sizes
from planetary.models.zoo import ZOO
from planetary.run.model.authoring import load
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.pretrained_files import keep_files
from planetary.run.model.served import load_folder, load_trained
from planetary.run.model.trained_model import fill_tree, tree_names
from planetary.runs.rounds.preparation.options import builder_options, given_weights
from saved_parameters import save_parameters

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
TOKENS: Any = np.random.default_rng(0).integers(0, 256, (2, 8)).astype(np.int32)


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
    save_parameters(folder, params, 3)
    (folder / "config.toml").write_text(to_toml(config))
    return folder, params


def write_checkpoint_without(run: Path, params: dict[str, np.ndarray], frozen: str) -> None:
    """Replace a run's checkpoint by one without a tensor, as of a run that does not train it."""
    found = load_latest(run / "checkpoints")
    kept = {name: value for name, value in params.items() if name != frozen}
    specs = tuple(spec for spec in found.info.param_specs if spec.name != frozen)
    info = msgspec.structs.replace(found.info, param_specs=specs, round=4)
    write_checkpoint(run / "checkpoints", Checkpoint(info, kept, kept), keep=1)


def from_folder(folder: Path, **batch: int) -> tuple[Config, Model]:
    """Return the configuration and the model, with its weights, that a run with this folder has."""
    config = config_from_tables(
        {"model": {"source": str(folder)}, "train": {**BATCH, **batch}, "data": {"source": "stdlib"}}
    )
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
def test_weights_load_from_one_or_several_files(tmp_path: Path, files: int) -> None:
    """Weights are in one file or several with or without the model's name."""
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


@pytest.mark.parametrize("name", [name for name, options in MODELS.items() if "rope_scaling" not in options])
def test_a_longer_text_than_the_positions_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"n_position=16 positions.* fewer than sequence_length=32"):
        export_model(ZOO[name.partition(",")[0]].source, {**MODELS[name], "n_position": 16, "sequence_length": 32})


LONG = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 16),
        (STRETCHED, 16),  # published with the stretched length
        ({"rope_type": "linear", "factor": 2.0}, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}, 16),
        (LONG | {"original_max_position_embeddings": 4}, 16),  # divisors for long texts
        (LONG | {"original_max_position_embeddings": 16, "factor": 2.0}, 16),
    ],
)
def test_stretched_positions_allow_longer_texts(scaling: dict[str, Any] | None, longest: int) -> None:
    options = {**MODELS["llama"], "n_position": 16, "rope_scaling": scaling}
    assert cache_sizes(**options, sequence_length=longest).positions == longest
    with pytest.raises(UserError, match=f"n_position={longest} positions"):
        cache_sizes(**options, sequence_length=longest + 1)


# --- a run that started from a folder ---------------------------------------------------------------------------

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaModel"], "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "dtype": "bfloat16", "initializer_range": 0.5},
    **{"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2, "a_key_of_tomorrow": {"x": 1}},
}
FILES = {
    "tokenizer_config.json": json.dumps(
        {"bos_token": "Ā", "eos_token": {"__type": "AddedToken", "content": "ā"}, "pad_token": "Ă"}
    ),
    "special_tokens_map.json": '{"bos_token": "Ā"}',
    "generation_config.json": '{"eos_token_id": [1, 2], "do_sample": true, "temperature": 0.6}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "LICENSE": "as you like",
    "README.md": "of the old model",
    "model.bin": "weights",
}


def llama_folder(folder: Path, **model: Any) -> tuple[Path, Config]:
    """Write a pretrained Llama with all that a folder may have beside it; return it with a run's configuration."""
    options = {**MODELS["llama"], "n_layer": 1, "n_head": 2, "n_kv_head": 1, "norm_epsilon": 1e-6, **BATCH}
    values = export_model(ZOO["llama"].source, options).initial("param")
    rng = np.random.default_rng(2)
    tensors = {name: rng.normal(0, 0.2, value.shape).astype(np.float32) for name, value in values.items()}
    written(folder, tensors)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tables = {"model": {"source": str(folder), **model}, "train": BATCH, "data": {"source": "stdlib"}}
    return folder, config_from_tables(tables)


def test_a_weight_file_of_a_package_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example: an .npz file stands for a folder, in a configuration and where it is served."""
    install_example("my_weights.py", "planetary.weight_files: npz = my_weights:NumpyFile", tmp_path, monkeypatch)
    monkeypatch.setenv("PLANETARY_CACHE", str(tmp_path / "cache"))
    folder, _ = llama_folder(tmp_path / "theirs")
    texts = {path.name: path.read_text() for path in folder.glob("*.json")}
    _, values = read_pretrained(folder)
    np.savez(tmp_path / "model.npz", **texts, **values)  # pyright: ignore[reportArgumentType]
    config, model = from_folder(tmp_path / "model.npz")
    assert config.model.options == from_folder(folder)[0].model.options
    for name, value in model.initial("param").items():
        np.testing.assert_array_equal(value, values[name], err_msg=name)
    served, expected = load_folder(tmp_path / "model.npz"), load_folder(folder)
    assert served.name == "model"
    np.testing.assert_array_equal(
        np.asarray(served.logits(served.params, TOKENS)), np.asarray(expected.logits(expected.params, TOKENS))
    )


def test_an_export_has_everything_of_the_folder_it_began_with(tmp_path: Path) -> None:
    old, config = llama_folder(tmp_path / "old")
    run, _ = run_of(tmp_path / "run", config)
    keep_files(config, run)
    shutil.rmtree(old)  # the run has kept it
    export_pretrained(run, tmp_path / "new")
    now = json.loads((tmp_path / "new" / "config.json").read_text())
    assert now == {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    specs, _ = read_pretrained(tmp_path / "new")
    assert {spec.dtype for spec in specs} == {"bf16"}
    for name, text in FILES.items():
        if name in {"README.md", "model.bin"}:
            assert not (tmp_path / "new" / name).exists()
        else:
            assert (tmp_path / "new" / name).read_text() == text
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == ByteTokenizer().to_json()


def test_a_served_run_has_the_template_and_ends_of_its_folder(tmp_path: Path) -> None:
    _, config = llama_folder(tmp_path / "old")
    run, _ = run_of(tmp_path / "run", config)
    keep_files(config, run)
    served = load_folder(run)
    assert served.chat_template == FILES["chat_template.jinja"]
    assert served.ends == {1, 2}
    assert dict(served.special_tokens)["eos_token"] == "ā"


def test_another_tokenizer_brings_its_own_files(tmp_path: Path) -> None:
    _, config = llama_folder(tmp_path / "old")
    run, _ = run_of(tmp_path / "run", msgspec.structs.replace(config, data=DataConfig(source="stdlib")))
    export_pretrained(run, tmp_path / "new")
    now = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (now["bos_token_id"], now["eos_token_id"], now["pad_token_id"]) == (0, 0, None)
    assert now["a_key_of_tomorrow"] == {"x": 1}
    assert not (tmp_path / "new" / "generation_config.json").exists()
    assert not (tmp_path / "new" / "chat_template.jinja").exists()


def test_a_new_model_has_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    old, _ = llama_folder(tmp_path / "old")
    config = config_of("llama")
    data = msgspec.structs.replace(config.data, tokenizer=str(old / "tokenizer.json"))
    run, _ = run_of(tmp_path / "run", msgspec.structs.replace(config, data=data))
    export_pretrained(run, tmp_path / "new")
    now = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (now["bos_token_id"], now["eos_token_id"], now["pad_token_id"]) == (0, 1, 2)
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == FILES["chat_template.jinja"]
    assert "a_key_of_tomorrow" not in now


FROZEN = "model.embed_tokens.weight"


def frozen_run(tmp_path: Path) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Return a folder, and a run from it with a frozen tensor, which its checkpoint has not."""
    old, config = llama_folder(tmp_path / "old", roles={FROZEN: "buffer"})
    run, params = run_of(tmp_path / "run", config)
    write_checkpoint_without(run, params, FROZEN)
    _, values = read_pretrained(old)
    return old, run, {**params, FROZEN: values[FROZEN]}


def test_a_frozen_tensor_is_in_every_use_of_the_model(tmp_path: Path) -> None:
    _, run, expected = frozen_run(tmp_path)
    export_pretrained(run, tmp_path / "new", dtype="float32")
    _, exported = read_pretrained(tmp_path / "new")
    generated = load_trained(run).params
    served = load_folder(run).params
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(exported[name], value, err_msg=name)
    for params in (generated, served):
        found = dict(zip(tree_names(params), jax.tree.leaves(params), strict=True))
        np.testing.assert_array_equal(np.asarray(found[FROZEN]), expected[FROZEN])


needs_transformers = pytest.mark.doors("torch", "transformers")


def loaded_whole(folder: Path, **options: Any) -> Any:
    """Return a folder's model as transformers loads it, which neither lacks a tensor nor has one too many."""
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, loading = found
    assert not any(loading.values()), loading
    return model


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_has_the_same_scores_in_transformers(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoTokenizer

    run, _ = run_of(tmp_path / "run", config_of(name))
    export_pretrained(run, tmp_path / "out")
    theirs = loaded_whole(tmp_path / "out", attn_implementation="eager")
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


@needs_transformers
def test_folder_with_frozen_tensors_loads_in_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoTokenizer

    old, run, _ = frozen_run(tmp_path)
    new = tmp_path / "new"
    export_pretrained(run, new, dtype="float32")
    theirs = loaded_whole(new)
    trained = load_trained(run)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(np.asarray(trained.logits(trained.params, TOKENS)), expected, rtol=1e-4, atol=1e-5)
    for load_config in (AutoConfig, AutoTokenizer):
        before, after = (load_config.from_pretrained(folder) for folder in (old, new))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
            assert getattr(before, name, None) == getattr(after, name, None), name
    assert theirs.generation_config.temperature == 0.6


CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\n---\n\n# The model before it was trained\n"


@needs_transformers
def test_a_round_trip_gives_equal_files(tmp_path: Path) -> None:
    """Without training, a folder of transformers comes back: equal bytes of all files, but for the card's text."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    old, new = tmp_path / "old", tmp_path / "new"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    theirs: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=260, eos_token_id=257, bos_token_id=256))
    theirs = theirs.to(torch.bfloat16)
    theirs.generation_config = GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=[257, 258])
    theirs.save_pretrained(old)
    (tmp_path / "bytes.json").write_bytes(ByteTokenizer().to_json())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "bytes.json"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(old)
    (old / "README.md").write_text(CARD)
    (old / "LICENSE").write_text("as you like")
    config, model = from_folder(old)
    run, _ = run_of(tmp_path / "run", config)
    keep_files(config, run)
    values = model.initial("param")
    info = msgspec.structs.replace(load_latest(run / "checkpoints").info, round=4)
    write_checkpoint(run / "checkpoints", Checkpoint(info, values, values), keep=1)
    export_pretrained(run, new)
    assert {path.name for path in new.iterdir()} == {path.name for path in old.iterdir()}
    for path in old.iterdir():
        if path.name not in {"model.safetensors", "README.md"}:
            assert (new / path.name).read_bytes() == path.read_bytes(), path.name
    assert (new / "README.md").read_text().startswith(CARD[: CARD.index("# The")])
    assert "before it was trained" not in (new / "README.md").read_text()
    before, after = read_pretrained(old), read_pretrained(new)
    assert sorted(before[0], key=str) == sorted(after[0], key=str)
    for name, value in before[1].items():
        np.testing.assert_array_equal(after[1][name], value, err_msg=name)
