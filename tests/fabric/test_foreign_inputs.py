"""Whole runs of models and nodes as other tools know them: 64-bit tokens, targets that no compiler here knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input_support import events, run, write_config

from token_models import text_model

pytestmark = [pytest.mark.processes, pytest.mark.compiles, pytest.mark.timeout(180)]


def test_a_model_of_64_bit_tokens_trains(tmp_path: Path, shared_cache: Path) -> None:
    """As PyTorch's exporters write them; its targets have another type than its tokens."""
    (tmp_path / "model.mlir").write_text(text_model("int64", "uint32"))
    config = write_config(tmp_path, model__source='"model.mlir"', model__options="{}", optimizer__learning_rate=0.1)
    ended = run("train", config, "--workers=1", "--json", f"--cache={shared_cache}", cwd=tmp_path)
    assert ended.code == 0, ended.err
    (folder,) = (tmp_path / "runs").iterdir()
    closed = [event for event in events(folder) if event["event"] == "delta_accepted"]
    assert len(closed) == 3
    assert closed[-1]["loss"] < closed[0]["loss"] - 0.1
