"""A resume with other mathematics names the keys, both values, and the way to train on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from planetary.cli.main import build_parser
from planetary.core.config import apply_overrides, config_from_tables
from planetary.core.configuration.identity import config_hash, mathematical_changes
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.run.choice import resumed_run


def _run(folder: Path) -> Path:
    (folder / "checkpoints" / "round-000003").mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config_from_tables({"train": {"rounds": 9}})))
    return folder


def test_changed_keys_are_named_with_both_values(tmp_path: Path) -> None:
    folder = _run(tmp_path / "it's a run")
    with pytest.raises(UserError) as caught:
        resumed_run(folder, ["optimizer.learning_rate=0.25", "train.inner_steps=7", "train.rounds=20"])
    text = str(caught.value)
    assert "optimizer.learning_rate = 0.25 (it has " in text
    assert "train.inner_steps = 7 (it has " in text
    words = shlex.split(text[text.index("planetary train") :])
    found = vars(build_parser("train").parse_args(words[1:]))
    assert found["config"] == folder / "config.toml"
    assert f"model.weights={folder}/checkpoints/round-000003/params.safetensors" in found["set"]


@pytest.mark.parametrize("section", [{"adapter": {"rank": 4}}, {"model": {"freeze": ["wte.*"]}}])
def test_checkpoint_of_a_part_is_not_named_as_weights(tmp_path: Path, section: dict[str, dict[str, object]]) -> None:
    """The command was refused: such a checkpoint has the trained tensors only."""
    folder = _run(tmp_path / "run")
    (folder / "config.toml").write_text(to_toml(config_from_tables({"train": {"rounds": 9}, **section})))
    with pytest.raises(UserError) as caught:
        resumed_run(folder, ["optimizer.learning_rate=0.25"])
    text = str(caught.value)
    assert "model.weights" not in text
    words = shlex.split(text[text.index("planetary export") :].partition(", then")[0])
    assert vars(build_parser("export").parse_args(words[1:]))["format"] == "hf"


@pytest.mark.parametrize("harmless", ["train.rounds=20", "eval.every=5", "train.remat=blocks", "fabric.workers=3"])
def test_other_keys_may_change(tmp_path: Path, harmless: str) -> None:
    assert resumed_run(_run(tmp_path / "run"), [harmless])[1] == tmp_path / "run"


@pytest.mark.parametrize(
    "override",
    ["optimizer.beta2=0.5", "outer.momentum=0.1", "run.seed=9", "sync.compression=int8", "sync.topology=ring"],
)
def test_changes_are_those_of_the_hash(override: str) -> None:
    before = config_from_tables({})
    after = apply_overrides(before, [override])
    assert config_hash(before) != config_hash(after)
    assert override.partition("=")[0] in [key for key, _, _ in mathematical_changes(before, after)]
    assert mathematical_changes(before, before) == []
