"""Composers, expert workers and their gateway as real processes, some of which are killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from killable_run import KillableRun, kill

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.jsonl import read_json_lines
from planetary.moe.records import MixtureRecord, replay

# Compiling the mixture's five functions takes half a minute: too long for every run of the tests.
pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(300)]

PER_ROUND = 100
TINY = (
    "model.options.n_layer=1",
    "model.options.n_head=2",
    "model.options.n_kv_head=1",
    "model.options.n_embd=32",
    "model.options.n_expert=3",  # on two composers: one of them has an empty place
    "model.options.n_active=2",
    "model.options.n_latent=16",
    "model.options.n_hidden=32",
    "moe.composers=2",
    "moe.rank=4",
    "fabric.workers=2",
    "train.batch_size=2",
    "train.sequence_length=16",
    f"train.inner_steps={PER_ROUND}",
    "optimizer.warmup_steps=2",
    "optimizer.schedule=constant",
    "eval.batches=2",
    "eval.every=1",
    "checkpoint.every=1",
)

Start = Callable[..., KillableRun]


@pytest.fixture
def start(tmp_path: Path, shared_cache: Path) -> Iterator[Start]:
    runs: list[KillableRun] = []

    def begin(*arguments: str, resume: bool = False, overrides: tuple[str, ...] = TINY) -> KillableRun:
        runs.append(
            KillableRun(
                tmp_path / "run",
                shared_cache,
                *arguments,
                resume=resume,
                example="parallax-tiny.toml",
                overrides=overrides,
            )
        )
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def check_finished(run: KillableRun, rounds: int) -> list[dict]:
    """Every round has one line, and the journal replays to the end: one stream of versions and epochs everywhere."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["round"] for line in lines) == list(range(1, rounds + 1))
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["eval_loss"] is not None
    state = replay(read_json_lines(run.folder / "events.jsonl", MixtureRecord), PER_ROUND)
    assert state.ended is not None
    assert state.ended.ok
    assert state.round == rounds
    assert all(shard.step == rounds * PER_ROUND for shard in state.shards)
    checkpoint = load_latest(run.folder / "checkpoints")
    assert checkpoint.info.round == rounds
    assert all(np.isfinite(value).all() for value in checkpoint.params.values())
    return lines


def test_a_killed_composer_comes_back_and_a_killed_gateway_is_resumed(start: Start) -> None:
    run = start("--rounds=8")
    run.wait_for(lambda event: event["event"] == "artifact_published", within_s=150)  # several functions to compile
    grants = {run.wait_for_event("shard_granted")["worker"]: 1 for _ in range(2)}
    assert len(grants) == 2
    pids = {event["worker"]: event["pid"] for event in run.of("worker_joined")}
    run.wait_for_event("round_finished", round=1)
    victim = sorted(grants)[0]
    kill(pids[victim])
    run.wait_for_event("worker_lost", pid=pids[victim])
    again = run.wait_for_event("shard_granted", worker=victim)
    assert again["epoch"] == 2
    assert again["step"] >= PER_ROUND - 5  # at most one refresh before what it had
    run.wait_for_event("round_finished", round=3)
    kill(run.child("gateway").pid)
    code, _, error = run.finish()
    assert code == 6
    assert "SIGKILL" in error
    resumed = start(resume=True)
    assert resumed.wait_for_event("run_resumed")["mark"]["round"] >= 3
    code, out, error = resumed.finish()
    assert code == 0, error
    assert "Trained 8 rounds" in out
    lines = check_finished(resumed, 8)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert json.loads((run.folder / "report.json").read_text())["outcome"] == "finished"


def test_expert_workers_take_over_when_composers_die_and_every_process_may_be_killed(start: Start) -> None:
    """Claim 6 of docs/parallax.md: fifty losses at random moments."""
    overrides = (*TINY, "moe.expert_workers=2", "fabric.workers=4")
    run = start("--rounds=200", overrides=overrides)
    rng = random.Random(0)
    for lost in range(50):
        run.wait_for_event("round_finished")
        if lost % 10 == 9:
            kill(run.child("gateway").pid)
            run.finish()
            run = start(resume=True)
            continue
        workers = [p for p in run.family() if "worker" in p.cmdline()]
        if workers:
            kill(rng.choice(workers).pid)
    code, _, error = run.finish(within_s=280)
    assert code == 0, error
    check_finished(run, 200)
