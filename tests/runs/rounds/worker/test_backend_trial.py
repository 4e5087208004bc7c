"""A machine tries its backends, in processes that play candidates."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from bad_input_support import events, gateway, node_flags, run, started, write_config

from planetary.artifacts.store import BlobStore
from planetary.runs.rounds.worker import backend_trial
from planetary.runs.rounds.worker.backend_trial import BackendChoice, BackendTrial
from waiting import HANG_S

pytestmark = pytest.mark.processes

STEP = "7" * 64
CANDIDATE = """
import json, pathlib, sys, time
folder, plays, step = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def say(name, value):
    (folder / "new").write_text(json.dumps(value))
    (folder / "new").rename(folder / name)
if plays == "dies":
    sys.exit(3)
if plays == "fails":
    (folder / "failed").write_text("'head' is off")
    sys.exit(3)
say("job", {"step": step})
if plays == "hangs":
    time.sleep(60)
say("loaded", {"step": step})
for turn in range(2):
    while not (folder / f"turn-{turn}").exists():
        time.sleep(0.01)
    say(f"times-{turn}", [float(plays), float(plays) + 1])
time.sleep(60)
"""


def choose(folder: Path, plays: Mapping[str, str], step: str = STEP) -> tuple[BackendChoice, list[str]]:
    """Return the choice and the candidates that were started."""
    script = folder / "candidate.py"
    script.write_text(CANDIDATE)
    begun: list[str] = []

    def command(backend: str, own: Path) -> Sequence[str]:
        begun.append(backend)
        return [sys.executable, str(script), str(own), plays[backend], step]

    trial = BackendTrial(list(plays), command, store=BlobStore(folder / "store"), threads=1, log_folder=None)
    return asyncio.run(trial.choose()), begun


def test_fastest_candidate_is_remembered_for_the_step(tmp_path: Path) -> None:
    plays = {"cpu": "20", "pjrt:cpu": "10"}
    choice, begun = choose(tmp_path, plays)
    assert choice == BackendChoice("pjrt:cpu", "cpu 20 ms, pjrt:cpu 10 ms a step: taking pjrt:cpu")
    assert begun == ["cpu", "pjrt:cpu"]
    assert choose(tmp_path, plays) == (choice, ["pjrt:cpu"])
    other, begun = choose(tmp_path, {"cpu": "10", "pjrt:cpu": "20"}, step="8" * 64)
    assert other.backend == "cpu"
    assert sorted(begun) == ["cpu", "pjrt:cpu"]


def test_candidates_that_fail_are_left_out_with_their_reasons(tmp_path: Path) -> None:
    choice, _ = choose(tmp_path, {"cuda": "fails", "cpu": "20", "pjrt:cpu": "dies"})
    assert choice.backend == "cpu"
    assert choice.why == "cpu 20 ms a step: taking cpu; cuda: 'head' is off; pjrt:cpu: exited with status 3"


def test_slow_candidate_is_neither_awaited_nor_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_trial, "PATIENCE_S", 0.2)
    plays = {"cpu": "20", "pjrt:cpu": "hangs"}
    choice, _ = choose(tmp_path, plays)
    assert choice.backend == "cpu"
    assert "pjrt:cpu: not ready" in choice.why
    monkeypatch.undo()
    assert choose(tmp_path, plays | {"pjrt:cpu": "10"})[0].backend == "pjrt:cpu"


def test_a_run_without_a_step_takes_the_first(tmp_path: Path) -> None:
    choice, _ = choose(tmp_path, {"cpu": "20", "pjrt:cpu": "10"}, step="")
    assert choice == BackendChoice("cpu", "nothing to measure in this run: taking cpu")


@pytest.mark.compiles
def test_a_node_tries_its_backends_and_its_workers_say_so(tmp_path: Path, shared_cache: Path) -> None:
    config = write_config(tmp_path, fabric__latency_budget_s=30.0)
    with gateway(config, tmp_path, shared_cache, plain=True) as (process, announced):
        flags = [*node_flags(announced, tmp_path, shared_cache), "--backend=auto", "--node-name=n"]
        with started("node-manager", *flags, cwd=tmp_path, log=tmp_path / "node.log"):
            assert process.wait(HANG_S) == 0, (tmp_path / "gateway.log").read_text()
    journal = events(tmp_path / "run")
    joined = [e for e in journal if e["event"] == "worker_joined"]
    assert [e["worker"] for e in joined] == ["n/0"]
    assert "cpu" in joined[0]["chosen"]
    assert f"a step: taking {joined[0]['backend']}" in joined[0]["chosen"]
    assert {e["backend"] for e in journal if e["event"] == "artifact_published"} >= {"cpu", "pjrt:cpu"}
    assert {e["worker"] for e in journal if e["event"] == "lease_assigned"} == {"n/0"}


def test_auto_is_for_a_machine_and_for_backends_that_fit(tmp_path: Path) -> None:
    ended = run("node-manager", "--host=h", "--plain-loopback", "--backend=auto", "--target=sm_80", cwd=tmp_path)
    assert ended.code == 2
    assert "--target sm_80 with --backend auto: name the backend" in ended.said
    ended = run("node-manager", "--host=h", "--plain-loopback", "--backend=auto", "--island=2", cwd=tmp_path)
    assert ended.code == 2
    assert "an island needs a PJRT backend by name" in ended.said
    ended = run("worker", "--connect=h:1", "--plain-loopback", "--backend=auto", cwd=tmp_path)
    assert ended.code == 2
    assert "a node manager chooses for its machine" in ended.said
