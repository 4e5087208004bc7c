"""Composers, expert workers and their gateway as real processes, some of which are killed."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from killable_run import KillableRun, kill
from split_mixture import Role, SplitMixture
from version_streams import expert_streams

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.jsonl import read_json_lines
from planetary.machine.journal import replay
from planetary.runs.mixture.methods.ownership import round_robin
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.records import FragmentAdvanced, MixtureRecord, MixtureState
from planetary.runs.rounds.records import EvalFinished

pytestmark = pytest.mark.processes

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


def check_finished(
    run: KillableRun, rounds: int, *, per_round: int = PER_ROUND, composers: int = 2, replicas: int = 1
) -> list[dict]:
    """Every round has one line, the journal replays to the end, and every expert has one stream of versions."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["round"] for line in lines) == list(range(1, rounds + 1))
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["eval_loss"] is not None
    records = list(read_json_lines(run.folder / "events.jsonl", MixtureRecord))
    assert all(expert_streams(records, round_robin(1, 3, composers).tolist(), replicas).values())
    state = replay(records, MixtureState())
    assert state.ended is not None
    assert state.ended.ok
    assert state.round == rounds
    assert all(shard.progress == rounds * per_round for shard in state.shards)
    assert sum(shard.step for shard in state.shards) >= rounds * per_round * composers
    checkpoint = load_latest(run.folder / "checkpoints")
    assert checkpoint.info.round == rounds
    assert all(np.isfinite(value).all() for value in checkpoint.params.values())
    return lines


def test_killed_composer_and_gateway_come_back(start: Start) -> None:
    run = start("--rounds=8")
    run.wait_for(lambda event: event["event"] == "artifact_published")
    grants = {run.wait_for_event("shard_granted")["worker"]: 1 for _ in range(2)}
    assert len(grants) == 2
    pids = {event["worker"]: event["pid"] for event in run.of("worker_joined")}
    run.wait_for_event("round_finished", round=1)
    victim = sorted(grants)[0]
    kill(pids[victim])
    run.wait_for_event("worker_lost", pid=pids[victim])
    again = run.wait_for_event("shard_granted", worker=victim)
    assert again["epoch"] == 2
    kept = [e["step"] for e in run.of("shard_kept") if (e["shard"], e["epoch"]) == (again["shard"], 1)]
    assert again["step"] == max(kept)  # every refresh interval
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


@pytest.mark.soak
def test_next_owner_speaks_until_a_killed_one_comes_back(start: Start) -> None:
    """When a first owner is killed the next speaks for its experts until it comes back."""
    twice = (
        "moe.composers=3",
        "moe.replicas=2",
        "fabric.workers=3",
        "fabric.latency_budget_s=1",  # a lost composer's shard is kept for twice that
        "train.batch_size=8",
        "train.sequence_length=64",
        "train.inner_steps=500",
    )
    run = start("--rounds=4", overrides=(*TINY, *twice))
    run.wait_for(lambda event: event["event"] == "artifact_published")
    for _ in range(3):
        run.wait_for_event("shard_granted")
    owner = {event["shard"]: event["worker"] for event in run.of("shard_granted")}
    pids = {event["worker"]: event["pid"] for event in run.of("worker_joined")}
    run.wait_for_event("fragment_merged", tier="experts", fragment=0)
    # Its supervisor would have it back within seconds.
    supervisor = psutil.Process(pids[owner[0]]).parent()
    assert supervisor is not None
    supervisor.suspend()
    try:
        kill(pids[owner[0]])
        assert run.wait_for_event("speaker_changed", shard=0)["by"] == 1
        run.wait_for_event("surrogates_refreshed", shard=0, by=1)
        assert run.wait_for_event("fragment_merged", tier="experts", fragment=0)["shards"] == [1]
    finally:
        supervisor.resume()
    assert run.wait_for_event("shard_granted", shard=0)["epoch"] == 2
    code, _, error = run.finish()
    assert code == 0, error
    lines = check_finished(run, 4, per_round=500, composers=3, replicas=2)
    assert lines[-1]["loss"] < lines[0]["loss"]
    state = max(path.stat().st_size for path in (run.folder / "payloads" / "shard").rglob("*") if path.is_file())
    assert sum(line["bytes_up"] for line in lines) > 0.9 * state * len(run.of("shard_kept"))  # all that came is counted


# --- fifty kills ------------------------------------------------------------------------------------------------

ROUNDS, PER_ROUND_LONG = 180, 20  # long enough for all kills
LONG = (
    # Runs without waits differ, the more so the faster they learn: not what the example has.
    "optimizer.name=adamw",
    "optimizer.learning_rate=0.003",
    "optimizer.beta1=0.9",
    "model.options.n_expert=8",
    "moe.composers=2",
    "moe.expert_workers=2",
    "fabric.workers=4",
    "train.batch_size=2",
    f"train.rounds={ROUNDS}",
    f"train.inner_steps={PER_ROUND_LONG}",
    "eval.every=1000",  # and after the last round
    "checkpoint.every=1000",
)
OWNERS = round_robin(2, 8, 2).tolist()
KILLS: dict[Role, int] = {"composer": 20, "expert worker": 20, "gateway": 10}


@dataclass(frozen=True)
class Ended:
    """Attributes:
    loss: held-out, of the assembled model.
    steps: that the model has in it, of all shards together.
    """

    loss: float
    steps: int


def run_to_the_end(mixture: SplitMixture, kills: Sequence[Role], rng: random.Random) -> Ended:
    """Kill a process of each of these roles, a random time after a composer was heard of."""
    left = list(kills)
    began = time.monotonic()
    try:
        kill_at: float | None = None
        while not mixture.finished():
            assert time.monotonic() < began + 1500, f"{mixture.killed}; {mixture.tail_of_log()}"
            if kill_at is None and left and any(event["event"] == "shard_kept" for event in mixture.news()):
                kill_at = time.monotonic() + rng.uniform(0, 1)
            if kill_at is not None and time.monotonic() >= kill_at and mixture.kill_one(left[0], rng.randrange(8)):
                del left[0]
                kill_at = None
            time.sleep(0.05)
    finally:
        mixture.close()
    assert not left, f"the run ended before {len(left)} of the kills"
    records = mixture.records()
    streams = expert_streams(records, OWNERS)  # raises where an expert has more than one
    assert len(streams) == 16
    assert all(streams.values())
    loss = next(record.loss for record in reversed(records) if isinstance(record, EvalFinished))
    merged = [r for r in records if isinstance(r, FragmentAdvanced) and r.tier is Tier.BACKBONE]
    state = replay(records, MixtureState())
    ended = Ended(loss, sum(shard.step for shard in state.shards))
    found = {
        "killed": mixture.killed,
        "seconds": round(time.monotonic() - began),
        "held-out": ended.loss,
        "steps": ended.steps,
        "steps of the merged backbone": sum(record.steps for record in merged),
        "merges of one composer": sum(len(record.shards) == 1 for record in merged) / len(merged),
        "versions of an expert": sorted({len(stream) for stream in streams.values()}),
    }
    sys.stdout.write(json.dumps(found) + "\n")  # for people: pytest -s
    return ended


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_kills_cost_no_version_and_no_loss(tmp_path: Path, shared_cache: Path) -> None:
    """Gateways are started again beside workers that are still there, as on several machines.

    Both models have the steps of the run in them, and no more than reports were on their way at its end. The one with
    kills may be better by more than what runs differ by, on the same tokens: while a composer is away the other one is
    merged alone, and its steps count whole. A model that was merged from two composers after n steps of each has taken
    n, one that they trained in turn 2 n (bench/results/parallax.md).
    """
    rng = random.Random(0)
    kills: list[Role] = [role for role, count in KILLS.items() for _ in range(count)]
    rng.shuffle(kills)

    def train(name: str, kills: Sequence[Role]) -> Ended:
        mixture = SplitMixture(tmp_path / name, shared_cache, "parallax-offload.toml", LONG, 4)
        return run_to_the_end(mixture, kills, rng)

    calm, killed = train("calm", []), train("killed", kills)
    all_steps = 2 * ROUNDS * PER_ROUND_LONG
    assert all(all_steps <= run.steps <= all_steps + 2 * PER_ROUND_LONG for run in (calm, killed)), (calm, killed)
    assert killed.loss < 1.01 * calm.loss
