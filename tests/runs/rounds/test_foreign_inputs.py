"""Whole runs of models and nodes as other tools know them: 64-bit tokens, targets that no compiler here knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input_support import events, gateway, node_flags, run, started, write_config

from token_models import text_model
from waiting import HANG_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.compiles]


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


def test_first_worker_without_artifact_is_refused_and_cpu_trains(tmp_path: Path, shared_cache: Path) -> None:
    """IREE does not compile comparisons of 16-bit targets for Vulkan; a CPU joins later."""
    (tmp_path / "model.mlir").write_text(text_model("uint16", "uint16"))
    config = write_config(tmp_path, model__source='"model.mlir"', model__options="{}")
    with gateway(config, tmp_path, shared_cache, plain=True) as (process, announced):
        wait_until(lambda: events(tmp_path / "run"), "the run began", process=process)
        flags = node_flags(announced, tmp_path, shared_cache)
        odd = run("node-manager", *flags, "--backend=vulkan", "--target=sm_90a", "--node-name=odd", cwd=tmp_path)
        assert odd.code == 3, odd.err
        note = "vulkan:sm_90a is compiled as sm_89"
        assert note in " ".join(odd.err.split())
        assert note in (tmp_path / "gateway.log").read_text()
        (refused,) = [event for event in events(tmp_path / "run") if event["event"] == "worker_refused"]
        assert refused["worker"] == "odd/0"
        assert "IREE 3.13.0 cannot compile the training step" in refused["reason"]
        with started("node-manager", *flags, cwd=tmp_path):
            assert process.wait(HANG_S) == 0, (tmp_path / "gateway.log").read_text()
    assert events(tmp_path / "run")[-1]["ok"]
