"""A run ends when its held-out loss stops improving, whatever happens to its gateway, with the best version kept."""

from __future__ import annotations

import math

import pytest
from fault_schedules import LIMIT_S
from small_training import small_training

from planetary.artifacts.checkpoint import list_checkpoints
from planetary.core.config import config_from_tables
from planetary.core.errors import UserError
from planetary.fleet.gateway.run_files import CHECKPOINTS
from planetary.fleet.protocol.records import RunFinished
from planetary.run.kinds import kind_of
from planetary.runs.rounds.controller.early_stopping import has_stopped_improving, why_stopped
from planetary.runs.rounds.records import EvalFinished, RoundFinished
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster

ROUNDS = 30


@pytest.mark.parametrize(
    ("losses", "patience", "gain", "stops"),
    [
        ([5.0, 4.0, 4.0, 4.0], 2, 0.0, True),
        ([5.0, 4.0, 4.0, 3.9, 3.9], 2, 0.0, False),
        ([5.0, 4.0, 4.0, 4.0], 0, 0.0, False),
        ([5.0, 4.95, 4.9, 4.85], 2, 0.1, False),  # 4.9 is 0.1 below the best that counts
        ([5.0, 4.95, 4.91, 4.9], 2, 0.1, True),
        ([5.0, 4.0, 4.5, 4.5, 3.0], 2, 0.0, True),  # it had stopped before
        ([5.0, math.inf, math.inf], 2, 0.0, True),
        ([], 1, 0.0, False),
    ],
)
def test_patience_counts_evaluations_without_a_gain(
    losses: list[float], patience: int, gain: float, stops: bool
) -> None:
    evals = {2 * number: loss for number, loss in enumerate(losses, 1)}
    assert has_stopped_improving(evals, patience, gain) == stops
    assert has_stopped_improving(dict(reversed(evals.items())), patience, gain) == stops


def test_reason_names_the_best_round() -> None:
    why = why_stopped({1: 5.0, 2: 3.0, 3: 3.5}, 2, 0.1)
    assert "2 evaluations in a row with no gain of 0.1" in why
    assert "3.5000 after round 3; the best is 3.0000 after round 2" in why


def stopped(seed: int, *given: str, faults: tuple[Fault, ...] = ()) -> SimCluster:
    """Train two workers until no evaluation gains 100 nats, as none but the first does."""
    options = ("eval.patience=2", "eval.least_gain=100", *given)
    cluster = SimCluster(seed, small_training(rounds=ROUNDS, workers=2, given=options), 2, faults)
    assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    return cluster


def check(cluster: SimCluster) -> RunFinished:
    """Check the end of a run, and that the best version's checkpoint is there; return the last record."""
    journal = cluster.journal
    evals = {record.version: record.loss for record in journal if isinstance(record, EvalFinished)}
    rounds = [record.round for record in journal if isinstance(record, RoundFinished)]
    end = journal[-1]
    assert isinstance(end, RunFinished)
    assert (end.ok, end.kind) == (True, "done")
    assert end.reason.startswith("eval.patience is spent")
    assert max(rounds) < ROUNDS
    best = min(evals, key=lambda version: evals[version])
    kept = [one.round for one in list_checkpoints(cluster.folder / "run" / CHECKPOINTS)]
    assert {best, max(rounds)} <= set(kept)
    return end


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("eval.every=3", "checkpoint.every=5"),
        ("checkpoint.every=7", "checkpoint.keep=1"),
        ("sync.topology=ring", "sync.overlap=async", "sync.precision=f32", "outer.loss_rise=0"),
        ("sync.overlap=streaming", "sync.compression=float32", "sync.fragments=2", "sync.delay=2"),
    ],
    ids=" ".join,
)
def test_a_run_ends_when_its_loss_stops_improving(given: tuple[str, ...]) -> None:
    check(stopped(1, *given))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_a_restarted_gateway_agrees_about_the_end(seed: int) -> None:
    """The gateway dies in every part of the run; the number of rounds may differ by those trained meanwhile."""
    faults = tuple(Fault(at_s=4.0 + 2.5 * i + 0.3 * seed, kind="kill_gateway", seconds=1.0) for i in range(4))
    check(stopped(seed, faults=faults))


def test_runs_that_cannot_end_early_refuse_the_keys() -> None:
    for section, why in (
        ({"rl": {"task": "sort"}}, "rl.goal ends a run"),
        ({"moe": {"composers": 2}}, "composers end together"),
        ({"federation": {"hub": "h:1", "site": "a"}}, "the hub ends a federation"),
    ):
        config = config_from_tables({**section, "eval": {"patience": 3}})
        kind = kind_of(config)
        with pytest.raises(UserError, match=f"eval.patience: .*{why}"):
            kind.check(config)
