"""PCP's files as they are: a model of torch-mlir, an `experiment.json`, a text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planetary.core.config import load_config
from planetary.monitor.sinks.wandb_sink import WandbSink
from planetary.run.model.trained_model import can_generate
from waiting import HANG_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "pcp"


@pytest.mark.processes
@pytest.mark.compiles
def test_the_example_trains_unchanged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planetary", "train", str(EXAMPLE / "experiment.json"), "--json"]
    ended = subprocess.run(
        [*command, f"--cache={tmp_path / 'cache'}"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "pcp-small"
    assert load_config(run / "config.toml").sinks == (WandbSink(project="pcp-distributed"),)
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds] == [1, 2, 3, 4, 5, 6]
    assert rounds[-1]["eval_loss"] < rounds[0]["eval_loss"] < 5.6  # ln 256: nothing learned
    characters = json.loads((run / "characters.json").read_text())["characters"]
    assert characters == "".join(sorted(set((EXAMPLE / "data.txt").read_text())))
    # The model is its loss only; the logits are found in its graph, so generation is offered and works.
    assert can_generate(load_config(run / "config.toml"))
    generate = [sys.executable, "-m", "planetary", "generate", str(run), "--prompt", "the ", "--tokens", "20"]
    said = subprocess.run(generate, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("the ")
    assert len(said.stdout) == len("the ") + 20 + 1
