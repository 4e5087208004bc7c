"""A run on a data set in a user's file goes on with the same examples, or says why it cannot; nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import planetary
from waiting import HANG_S

pytestmark = pytest.mark.processes

MODEL = """
import jax.numpy as jnp, numpy as np

def build(batch_size):
    def loss_fn(params, x, y):
        return jnp.mean((x @ params["w"] - y) ** 2)
    x, y = np.zeros((batch_size, 3), np.float32), np.zeros(batch_size, np.float32)
    return loss_fn, {"w": np.zeros(3, np.float32)}, (x, y)
"""
DATA = """
import numpy as np

def points():
    for number in range(COUNT):
        if number == FAILS:
            raise ConnectionError("the store hung up")
        x = np.random.default_rng(number).standard_normal(3)
        yield {"x": x, "y": x @ [1.0, 2.0, 3.0]}
"""
SETTINGS = """
[model]
source = "model.py:build"
[data]
source = "data.py:points"
[train]
rounds = 2
inner_steps = 4
batch_size = 8
[optimizer]
name = "sgd"
momentum = 0.0
learning_rate = 0.05
warmup_steps = 0
schedule = "constant"
[outer]
merge = "mean"
[fabric]
workers = 1
threads = 1
[eval]
batches = 1
"""


def write(folder: Path, count: int, fails: int = -1) -> None:
    (folder / "data.py").write_text(DATA.replace("COUNT", str(count)).replace("FAILS", str(fails)))


def train(folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planetary.cli.main", "train", *more, f"--cache={folder / 'cache'}"]
    command += [] if "--resume" in more else [str(folder / "run.toml"), f"--run-dir={folder / name}"]
    return subprocess.run(command, timeout=HANG_S, capture_output=True, text=True, check=False)


def test_resumed_run_needs_the_same_examples(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.toml").write_text(SETTINGS)
    write(tmp_path, 200, fails=150)
    failed = train(tmp_path, "run")
    assert failed.returncode
    assert "points failed at example 150: ConnectionError: the store hung up (" in " ".join(failed.stderr.split())

    write(tmp_path, 200)
    whole = train(tmp_path, "whole", "--set", "train.rounds=4")
    assert not whole.returncode, whole.stderr
    half = train(tmp_path, "run")
    assert not half.returncode, half.stderr
    before = planetary.Run.open(tmp_path / "run").params()
    longer = ("--resume", str(tmp_path / "run"), "--set", "train.rounds=4")

    write(tmp_path, 120)
    shorter = train(tmp_path, "run", *longer)
    assert shorter.returncode
    assert "was trained on other data than data.source gives now" in " ".join(shorter.stderr.split())
    write(tmp_path, 200, fails=150)
    assert "the store hung up" in train(tmp_path, "run", *longer).stderr
    np.testing.assert_array_equal(planetary.Run.open(tmp_path / "run").params()["w"], before["w"])

    write(tmp_path, 200)
    resumed = train(tmp_path, "run", *longer)
    assert not resumed.returncode, resumed.stderr
    found, expected = (planetary.Run.open(tmp_path / name).params()["w"] for name in ("run", "whole"))
    assert not np.array_equal(found, before["w"])
    np.testing.assert_array_equal(found, expected)

    run = planetary.Run.open(tmp_path / "whole")
    (loss,) = [event["loss"] for event in run.events if event["event"] == "eval_finished" and event["version"] == 4]
    evaluated = run.evaluate(metrics=["loss"], cache=tmp_path / "cache")
    assert evaluated == {"held_out": {"loss": pytest.approx(loss, rel=1e-5)}}
