from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planetary.compat.pcp.run_files import DEFAULTS, EXPERIMENT_KEYS, FIXED, NO_EFFECT, REFUSED, WANDB_KEYS
from planetary.core.config import load_config
from planetary.core.configuration.keys import FIELDS
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.monitor.sinks.wandb_sink import WandbSink

WHOLE = {
    "model_path": "models/gpt.mlir",
    "data_path": "data/text.txt",
    "tokenizer": "char",
    "sampling": "fifo",
    "dtype": "bf16",
    "chunk_manifest_path": None,
    "chunk_shuffle": False,
    "chunk_size": 4096,
    "seed": 7,
    "learning_rate": 0.0006,
    "batch_size": 32,
    "block_size": 64,
    "tau": 12,
    "outer_loop_steps": 50,
    "nesterov_momentum": 0.8,
    "max_epochs": 3,
    "wandb_project": "planets",
    "wandb_entity": "team",
    "wandb_run_name": "first/try",
    "wandb_api_key": None,
}


def load(folder: Path, values: object, *overrides: str) -> Config:
    (folder / "trial.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return load_config(folder / "trial.json", overrides)


def test_every_key_of_an_experiment_is_mapped_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load(tmp_path, WHOLE)
    assert config.model.source == str(tmp_path / "models/gpt.mlir")
    assert config.data.source == str(tmp_path / "data/text.txt")
    assert (config.data.tokenizer, config.data.sampling, config.data.shuffle_leases) == ("char", "fifo", False)
    assert (config.data.max_epochs, config.train.precision, config.run.seed) == (3, "bf16", 7)
    assert (config.train.batch_size, config.train.sequence_length) == (32, 64)
    assert (config.train.inner_steps, config.train.rounds) == (12, 50)
    assert (config.optimizer.learning_rate, config.outer.momentum) == (0.0006, 0.8)
    assert config.run.name == "first-try"
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 1
    assert config.sinks == (WandbSink(project="planets", entity="team"),)
    assert any("trial.json: chunk_size: no effect: a lease is always" in line for line in named)


def test_every_mapped_key_exists_and_none_is_in_two_lists() -> None:
    for dotted in EXPERIMENT_KEYS.values():
        section, key = dotted.split(".")
        assert key in FIELDS[section]
    assert not set(EXPERIMENT_KEYS) & set(NO_EFFECT)
    assert not set(REFUSED) & {*EXPERIMENT_KEYS, *NO_EFFECT, *WANDB_KEYS}
    assert not set(WANDB_KEYS) & {*EXPERIMENT_KEYS, *NO_EFFECT}
    assert set(WANDB_KEYS.values()) <= set(WandbSink.__struct_fields__)
    assert set(DEFAULTS) <= set(EXPERIMENT_KEYS)
    for section, fixed in FIXED.items():
        assert set(fixed) <= set(FIELDS[section])
        assert not {f"{section}.{key}" for key in fixed} & set(EXPERIMENT_KEYS.values())


def test_absent_keys_mean_what_they_mean_to_pcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load(tmp_path, {"model_path": "m.mlir", "data_path": "d.txt", "wandb_run_name": None})
    assert (config.data.tokenizer, config.data.sampling, config.data.max_epochs) == ("char", "random", 10)
    assert (config.train.inner_steps, config.train.rounds, config.optimizer.learning_rate) == (10, 100, 0.001)
    assert (config.train.batch_size, config.train.sequence_length) == (0, 0)  # the model's own
    assert (config.run.name, config.outer.momentum) == ("trial", 0.9)
    assert load(tmp_path, {"sampling": "fifo"}).data.shuffle_leases
    assert load(tmp_path, {"data_path": "tokens.u16"}).data.tokenizer == "byte"  # a token file needs none
    assert not caplog.text


def test_the_optimizer_is_pcps(tmp_path: Path) -> None:
    """No key of the file sets it, and the defaults of a TOML file are others."""
    config = load(tmp_path, {"model_path": "m.mlir", "data_path": "d.txt", "learning_rate": 0.0006})
    optimizer = config.optimizer
    assert (optimizer.schedule, optimizer.warmup_steps) == ("constant", 0)
    assert (optimizer.name, optimizer.beta1, optimizer.beta2, optimizer.epsilon) == ("adamw", 0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.decay_min_rank, optimizer.clip_norm) == (0.01, 0, 1.0)
    assert config.outer.learning_rate == 0.7
    assert load(tmp_path, {}, "optimizer.schedule=linear").optimizer.schedule == "linear"


def test_the_grouped_shape_means_the_same(tmp_path: Path) -> None:
    grouped = {
        "artifacts": {"model_path": "models/gpt.mlir"},
        "dataset": {"path": "data/text.txt", "tokenizer": "byte", "sampling": "sequence"},
        "distributed": {"aggregation_strategy": "diloco", "local_steps_per_round": 4, "outer_momentum": 0.5},
        "outputs": {"checkpoint_dir": "x", "wandb_run_name": "grouped"},
    }
    flat = {
        "model_path": "models/gpt.mlir",
        "data_path": "data/text.txt",
        "tokenizer": "byte",
        "sampling": "sequence",
        "tau": 4,
        "nesterov_momentum": 0.5,
        "wandb_run_name": "grouped",
    }
    assert load(tmp_path, grouped) == load(tmp_path, flat)
    with pytest.raises(UserError, match="dataset: expected a JSON object, found str"):
        load(tmp_path, {"dataset": "text.txt"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chunk_manifest_path": "chunks.json"}, "chunk_manifest_path: no effect: leases are cut from the whole"),
        ({"chunk_shuffle": True}, "chunk_shuffle: no effect: it orders the chunks of"),
        ({"chunk_size_mode": "fixed_bytes", "chunk_size_bytes": 9}, "chunk_size_mode, chunk_size_bytes: no effect"),
        ({"should_resume": True}, "planetary train --resume"),
        ({"aggregation_strategy": "decoupled_diloco"}, "aggregation_strategy: no effect: training is plain DiLoCo"),
    ],
)
def test_what_has_no_effect_is_named_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict[str, Any], words: str
) -> None:
    load(tmp_path, values)
    assert words in caplog.text


def test_what_happens_anyway_is_not_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, {"chunk_size_mode": "diloco_slices", "should_resume": False, "aggregation_strategy": "diloco"})
    assert not caplog.text


def test_a_secret_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set the environment variable WANDB_API_KEY") as caught:
        load(tmp_path, {"wandb_api_key": "not-to-be-shown"})
    assert "not-to-be-shown" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"taus": 3}, "unknown key taus; did you mean tau?"),
        ({"tau": "3"}, "train.inner_steps: expected a whole number >= 1, found '3' (string)"),
        ({"tau": 2.5}, "train.inner_steps: expected a whole number >= 1, found 2.5"),
        ({"sampling": "lifo"}, 'data.sampling: expected one of "fifo", "random", "sequence", found \'lifo\''),
        ({"dtype": "f64"}, "train.precision: expected one of"),
        ({"model_path": 3}, "model.source: expected a string"),
        ({"max_epochs": -1}, "data.max_epochs: expected a whole number >= 0"),
        ({"chunk_shuffle": "yes", "sampling": "fifo"}, "data.shuffle_leases: expected true or false"),
        ({"grpo_config": {"beta": 0.1}}, "whose reward is in PCP"),
        ("[1]", "expected one JSON object"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_wrong_experiment_is_refused(tmp_path: Path, values: object, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        load(tmp_path, values)
    assert "trial.json" in str(caught.value)


def test_a_flag_repairs_an_experiment(tmp_path: Path) -> None:
    assert load(tmp_path, {"tau": "3"}, "train.inner_steps=3").train.inner_steps == 3


def test_paths_are_found_beside_the_file_or_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PCP keeps its experiments in a folder of their own and starts beside it."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "here.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path / "experiments", {"data_path": "here.txt"}).data.source == str(tmp_path / "here.txt")
    (tmp_path / "experiments" / "here.txt").write_text("y")
    found = load(tmp_path / "experiments", {"data_path": "here.txt"}).data.source
    assert found == str(tmp_path / "experiments" / "here.txt")
