"""Adapters beside one base: folders of `peft` and runs, in the functions that a worker calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from planetary.artifacts.adapter_folder import write_adapter
from planetary.artifacts.safetensors_file import read_safetensors
from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.core.tensors import digest_of
from planetary.models.zoo import ZOO
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_served
from planetary.run.model.serving_export import export_served
from planetary.runs.rounds.preparation.run_model import model_of
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.gateway import ServingSetup
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.local_sequences import LocalSequences
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.model_check import check_model
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.scheduling.sampling import SamplingOptions
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.runtime.device_program import open_on_xla
from saved_parameters import save_parameters

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_position": 64},
    "llama": {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_hidden": 64, "vocab_size": 256},
}
LAYERS = {
    "gpt2": ("transformer.h.{}.attn.c_attn", "transformer.h.{}.mlp.c_fc"),
    "llama": ("model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"),
}


def base_of(folder: Path, family: str = "llama") -> Path:
    """Write a pretrained folder with random weights."""
    model = {"source": ZOO[family].source, "options": SIZES[family]}
    tables = {"model": model, "train": {"batch_size": 2, "sequence_length": 32}, "data": {"source": "stdlib"}}
    run = write_values(folder.parent / f"{folder.name}-run", config_from_tables(tables))
    export_pretrained(run, folder)
    return folder


def write_values(run: Path, config: Config) -> Path:
    """Write a run's folder with random trained parameters."""
    rng = np.random.default_rng(1)
    params = {k: rng.normal(0, 0.2, v.shape).astype(np.float32) for k, v in model_of(config).start.items()}
    save_parameters(run, params, 3)
    (run / "config.toml").write_text(to_toml(config))
    return run


def adapter_of(
    folder: Path, base: Path, layers: Mapping[str, tuple[int, int]], rank: int, seed: int, **changes: Any
) -> Path:
    """Write a folder of `peft` with random values; `layers`: inputs and outputs by name."""
    rng, tensors = np.random.default_rng(seed), {}
    for layer, (inputs, outputs) in layers.items():
        tensors[f"{layer}.lora_A.weight"] = rng.normal(0, 0.3, (rank, inputs)).astype(np.float32)
        tensors[f"{layer}.lora_B.weight"] = rng.normal(0, 0.3, (outputs, rank)).astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(layers), **changes}
    _, stored = read_safetensors(base / "model.safetensors")
    folder.mkdir()
    write_adapter(folder, config, {n: n for n in tensors}, tensors, {n: digest_of(v) for n, v in stored.items()})
    return folder


def layers_of(base: Path, family: str, *chosen: int) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the layers with these numbers."""
    specs, _ = read_safetensors(base / "model.safetensors")
    shapes = {spec.name.removesuffix(".weight"): spec.shape for spec in specs}
    names = [name.format(number) for number in chosen for name in LAYERS[family]]
    order = 1 if family == "llama" else -1  # Conv1D has the inputs first
    return {name: shapes[name][::-1][::order] for name in names}  # type: ignore[misc]


def served(base: Path, adapters: Mapping[str, Path], **keys: Any) -> ServedModel:
    folders = {name: str(folder) for name, folder in adapters.items()}
    section = ServeConfig(model=str(base), adapters=folders, context=32, batch=2, cache_mb=1.0, **keys)
    return load_served(Config().having(section))


@dataclass
class Worker:
    """A served model on XLA, as a worker holds it."""

    model: ServedModel

    def __post_init__(self) -> None:
        self.shape = self.model.shape(ServeConfig(context=32, batch=2, cache_mb=1.0))
        runner = open_on_xla(self.model.program(self.shape), optimise=False)
        self.loaded = LoadedModel(runner, self.shape, self.model.arrays())
        for number, one in enumerate(self.model.adapters, 1):
            self.loaded.add_adapter(number, one.arrays)

    def compute(self, adapter: int, message: ComputeCall) -> dict[str, np.ndarray]:
        return self.loaded.compute(msgspec.structs.replace(message, adapter=adapter))

    def texts(self, *asked: tuple[int, str]) -> list[list[int]]:
        """Return the greedy tokens after prompts, each with an adapter, all computed beside each other."""
        sequences = LocalSequences(self.loaded, self.shape, self.model.vocabulary)
        for number, (adapter, prompt) in enumerate(asked):
            sequences.submit(
                SequenceRequest(
                    number=number,
                    prompt=tuple(prompt.encode()),
                    most=8,
                    options=SamplingOptions(temperature=0.0),
                    adapter=adapter,
                )
            )
        found: list[list[int]] = [[] for _ in asked]
        for output in sequences.tokens():
            found[output.sequence] += [token.token for token in output.tokens]
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "weights"), [("gpt2", "f32"), ("llama", "f32"), ("llama", "bf16"), ("llama", "int8"), ("llama", "int4")]
)
def test_every_function_has_the_changed_matrices(tmp_path: Path, family: str, weights: str) -> None:
    """Of each adapter, and of none, all functions find what the whole forward pass with merged matrices finds."""
    base = base_of(tmp_path / "base", family)
    one = adapter_of(tmp_path / "one", base, layers_of(base, family, 0, 1), rank=4, seed=1)
    other = adapter_of(tmp_path / "other", base, layers_of(base, family, 1), rank=2, seed=2)
    model = served(base, {"one": one, "other": other}, weights=weights)
    assert [adapter.name for adapter in model.adapters] == ["one", "other"]
    worker, trials = Worker(model), [model.trial(Worker(model).shape, number) for number in range(3)]
    for number, trial in enumerate(trials):
        check_model(partial(worker.compute, number), worker.shape, trial, "a test")
    assert len({trial.values for trial in trials}) == 3


@pytest.mark.slow
def test_texts_of_several_adapters_are_those_of_each_alone(tmp_path: Path) -> None:
    """In one cache with equal prompts, of which no page is another adapter's."""
    base = base_of(tmp_path / "base")
    one = adapter_of(tmp_path / "one", base, layers_of(base, "llama", 0, 1), rank=4, seed=1)
    other = adapter_of(tmp_path / "other", base, layers_of(base, "llama", 1), rank=2, seed=2)
    both = Worker(served(base, {"one": one, "other": other}))
    prompt = "a prompt with a whole page of it"[:20]
    alone = [
        Worker(served(base, {})).texts((0, prompt))[0],
        Worker(served(base, {"one": one})).texts((1, prompt))[0],
        Worker(served(base, {"other": other})).texts((1, prompt))[0],
    ]
    assert len({tuple(text) for text in alone}) == 3
    assert both.texts(*((adapter, prompt) for adapter in (0, 1, 2, 1, 0, 2))) == [alone[i] for i in (0, 1, 2, 1, 0, 2)]


def test_wrong_adapters_are_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    layers = layers_of(base, "llama", 0)
    good = adapter_of(tmp_path / "good", base, layers, rank=4, seed=1)

    def refused(message: str, folder: Path, name: str = "style", **keys: Any) -> None:
        with pytest.raises(UserError, match=message):
            served(base, {name: folder}, **keys)

    refused("there is no folder", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    refused(r"has no adapter_config\.json", tmp_path / "empty")
    refused("two models are named 'base'", good, "base")
    refused("follow", good, follow=True)
    odd = {"model.layers.7.self_attn.q_proj": (32, 32)}
    refused(r"changes the matrix 'model\.layers\.7\.self_attn\.q_proj'", adapter_of(tmp_path / "a", base, odd, 4, 1))
    wide = {"model.layers.0.self_attn.q_proj": (48, 32)}
    refused("from 48 inputs to 32 outputs, .* is \\[32, 32\\]", adapter_of(tmp_path / "b", base, wide, 4, 1))
    refused(r"A of 'model\.layers\.0.* says that the rank is 3", adapter_of(tmp_path / "c", base, layers, 4, 1, r=3))
    table = {"model.embed_tokens": (32, 256)}
    refused("no matrix of a linear layer alone", adapter_of(tmp_path / "d", base, table, 4, 1))
    refused(
        "'modules_to_save|modules_to_save is", adapter_of(tmp_path / "e", base, layers, 4, 1, modules_to_save=["x"])
    )
    other = base_of(tmp_path / "other")
    specs, tensors = read_safetensors(other / "model.safetensors")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1  # of the last tensor's last number
    (other / "model.safetensors").write_bytes(data)
    last = specs[-1].name
    with pytest.raises(UserError, match=rf"trained with another base: '{last}' has other values here"):
        served(other, {"style": good})
    assert tensors[last].size


def test_run_that_trained_an_adapter_is_one(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    tables = {"model": {"source": str(base)}, "train": {"batch_size": 2, "sequence_length": 32}}
    adapter = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    config = config_from_tables({**tables, "data": {"source": "stdlib"}, "adapter": adapter})
    run = write_values(tmp_path / "run", config)
    model, alone = served(base, {"tuned": run}), served(run, {})
    assert json.dumps([one.name for one in model.variants]) == '["tuned"]'
    shape = model.shape(ServeConfig(context=32, batch=2, cache_mb=1.0))
    assert model.trial(shape, 1).values == alone.trial(shape).values
    other = config_from_tables({**tables, "data": {"source": "stdlib"}, "adapter": {**adapter, "base": "int8"}})
    with pytest.raises(UserError, match="beside a base in int8"):
        served(base, {"tuned": write_values(tmp_path / "rounded", other)})
    with pytest.raises(UserError, match="trained no adapter"):
        served(base, {"tuned": tmp_path / "base-run"})


def test_models_and_adapters_are_never_left_out(tmp_path: Path) -> None:
    """Where one of them cannot be served, the whole is refused."""
    for section in (ServeConfig(model="a", models={"b": "b"}), ServeConfig(model="a", adapters={"b": "b"})):
        with pytest.raises(UserError, match="an exported folder has one model"):
            export_served(Config().having(section), tmp_path / "served")
    job: Any = SimpleNamespace(config=Config().having(ServeConfig(model="a", models={"b": "b"})))
    with pytest.raises(UserError, match="a job of a site serves one model"):
        ServingSetup(load_served).prepare(job)


@pytest.mark.doors("torch", "transformers", "peft")
@pytest.mark.parametrize("family", SIZES)
def test_greedy_texts_are_those_of_peft(tmp_path: Path, family: str) -> None:
    """Two adapters that `peft` wrote, of other ranks and layers, beside each other and their base."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = base_of(tmp_path / "base", family)
    chosen = {"gpt2": (["c_attn", "c_fc"], ["c_proj"]), "llama": (["q_proj", "v_proj"], ["down_proj", "k_proj"])}
    for rank, name, layers in zip((3, 5), ("one", "other"), chosen[family], strict=True):
        torch.manual_seed(rank)
        wanted = LoraConfig(r=rank, lora_alpha=7, target_modules=layers, use_rslora=rank == 5, task_type="CAUSAL_LM")
        theirs: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), wanted)
        with torch.no_grad():
            for part, parameter in theirs.named_parameters():
                if "lora_B" in part:
                    parameter.normal_(std=0.3)
        theirs.save_pretrained(tmp_path / name)
    prompt = "def of_all"
    ids, expected = torch.tensor([[*prompt.encode()]]), []
    for name in ("", "one", "other"):
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        model = PeftModel.from_pretrained(model, tmp_path / name) if name else model
        with torch.no_grad():
            out = model.eval().generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(text) for text in expected}) == 3
    worker = Worker(served(base, {"one": tmp_path / "one", "other": tmp_path / "other"}))
    assert worker.texts((0, prompt), (1, prompt), (2, prompt)) == expected
