"""`planetary parity`: two backends, one table, and a limit that scripts can branch on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planetary.cli.main import main

MODEL = ["nanochat", "--preset", "tiny"]


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.compiles
def test_iree_keeps_up_with_xla(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["parity", *MODEL, "--backends", "pjrt:cpu,cpu", "--steps", "4", f"--cache={tmp_path}"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"], found["steps"]) == ("pjrt:cpu", "cpu", 4)
    assert len(found["losses_a"]) == len(found["update_norms_b"]) == 4
    assert found["losses_a"] != [found["losses_a"][0]] * 4  # every step has a batch of its own
    assert 0 <= found["loss"]["median"] <= found["loss"]["max"] < 1e-4
    assert 0 <= found["drift"] <= found["worst_drift"] < 1e-2
    assert main([*command, "--at-most", "-1"]) == 3
    shown = capsys.readouterr()
    assert "loss, step 4" in shown.out
    assert "median" in shown.out
    assert "pjrt:cpu by" in said(shown.err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backends", "cpu"], "--backends expects two, as in pjrt:cpu,cpu; found 'cpu'"),
        (["--backends", "cpu,tpu"], "unknown backend 'tpu'"),
        (["--steps", "0"], "--steps expects at least 1, found 0"),
        (["--step", "lr=1"], "unknown field `lr`"),
    ],
)
def test_what_cannot_be_compared_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *MODEL, *arguments, f"--cache={tmp_path}"]) == 2
    assert says in said(capsys.readouterr().err)
