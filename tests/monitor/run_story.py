"""A made-up run for the monitor's tests: two workers, three rounds, one worker lost in round 2."""

from __future__ import annotations

from typing import Any

import msgspec

from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.monitor.run_folder import RunFacts, RunHistory
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus

PARAMS = 1000


def event(t: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "t": t, **fields}


def lease(t: float, name: str, number: int, worker: str, round_: int, **fields: Any) -> dict[str, Any]:
    return event(t, name, lease=number, task=number, worker=worker, round=round_, pid=1, node="n", **fields)


def joined(t: float, worker: str, pid: int = 1) -> dict[str, Any]:
    return event(t, "worker_joined", worker=worker, pid=pid, node="n", backend="cpu", target="host")


def lost(t: float, worker: str, reason: str = "its process was killed by signal 9", pid: int = 1) -> dict[str, Any]:
    return event(t, "worker_lost", worker=worker, pid=pid, node="n", reason=reason)


def finished(t: float, round_: int) -> dict[str, Any]:
    sizes = {"workers": 2, "tokens": 200, "tokens_total": 200 * round_}
    return event(
        t, "round_finished", round=round_, **sizes, loss=2.0, seconds=10.0, compute_fraction=0.9, durable=False
    )


def metrics(number: int, loss: float, eval_loss: float | None = None, *, workers: int = 2) -> RoundMetrics:
    return RoundMetrics(
        round=number,
        loss=loss,
        eval_loss=eval_loss,
        tokens=200,
        tokens_total=200 * number,
        seconds=10.0,
        workers=workers,
        inner_steps=5,
        bytes_up=4 * PARAMS * workers + 40,
        bytes_down=4 * PARAMS * workers + 40,
        tokens_per_s=20.0,
        compute_fraction=0.9,
    )


EVENTS = [
    event(
        100.0,
        "run_started",
        kind="rounds",
        format=FORMAT,
        run="demo",
        rounds=3,
        config_hash="ab",
        model="cd",
        params=PARAMS,
    ),
    joined(101.0, "n/0"),
    joined(102.0, "n/1", pid=2),
    event(103.0, "round_started", round=1, version=0, workers=2),
    lease(103.0, "lease_assigned", 0, "n/0", 1),
    lease(103.0, "lease_assigned", 1, "n/1", 1),
    lease(112.0, "delta_accepted", 0, "n/0", 1, tokens=100, loss=3.0, seconds=9.0),
    lease(113.0, "delta_accepted", 1, "n/1", 1, tokens=100, loss=3.2, seconds=9.0),
    finished(113.0, 1),
    event(113.0, "round_started", round=2, version=1, workers=2),
    lease(113.0, "lease_assigned", 2, "n/0", 2),
    lease(113.0, "lease_assigned", 3, "n/1", 2),
    lost(118.0, "n/1", pid=2),
    lease(118.0, "lease_returned", 3, "n/1", 2, to="round", reason="lost"),
    joined(119.0, "n/1", pid=3),
    lease(119.5, "lease_assigned", 3, "n/1", 2),
    lease(120.0, "lease_started", 3, "n/1", 2),
    lease(122.0, "delta_accepted", 2, "n/0", 2, tokens=100, loss=2.0, seconds=9.0),
    lease(123.0, "delta_accepted", 3, "n/1", 2, tokens=100, loss=2.2, seconds=9.0),
    finished(123.0, 2),
]
ENDING = [
    event(123.0, "round_started", round=3, version=2, workers=2),
    lease(123.0, "lease_assigned", 4, "n/0", 3),
    lease(123.0, "lease_assigned", 5, "n/1", 3),
    lease(132.0, "delta_accepted", 4, "n/0", 3, tokens=100, loss=1.8, seconds=9.0),
    lease(133.0, "delta_accepted", 5, "n/1", 3, tokens=100, loss=2.0, seconds=9.0),
    finished(133.0, 3),
    event(134.0, "run_finished", round=3, ok=True, reason="all rounds are done"),
]
METRICS = [metrics(1, 3.1, 3.0), metrics(2, 2.1, 2.2), metrics(3, 1.9, 2.0)]
FACTS = RunFacts(
    run="demo",
    params=PARAMS,
    inner_steps=5,
    config_hash="ab",
    seed=7,
    bigram_loss=2.5,
    versions={"numpy": "2"},
)


def history(**changes: Any) -> RunHistory:
    whole = RunHistory(name="demo", events=EVENTS + ENDING, metrics=METRICS, facts=FACTS)
    return msgspec.structs.replace(whole, **changes)


def status(**changes: Any) -> TrainingStatus:
    whole = TrainingStatus(
        run="demo",
        state="training",
        round=7,
        rounds=12,
        rounds_finished=6,
        inner_steps=30,
        loss=((1, 4.2), (2, 3.1), (3, 2.8), (4, 2.61), (5, 2.5), (6, 2.44)),
        eval_loss=((2, 3.0), (4, 2.7), (6, 2.45)),
        tokens_total=368_640,
        tokens_per_s=12_345.6,
        bytes_up=157_286_400,
        bytes_down=183_500_800,
        started_at=1000.0,
        seconds_left=72.4,
        workers=(
            TrainerStatus(
                name="laptop/0",
                node="laptop",
                pid=3,
                state="training",
                backend="cpu",
                target="host",
                round=7,
                step=18,
                loss=2.4312,
            ),
            TrainerStatus(
                name="laptop/1",
                node="laptop",
                pid=4,
                state="lost",
                backend="cpu",
                target="host",
                round=7,
                lost_count=2,
            ),
        ),
        message="laptop/1 was lost: its process was killed by signal 9",
    )
    return msgspec.structs.replace(whole, **changes)
