"""The whole fabric under hundreds of random fault schedules, in simulated time."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from planetary.fabric.records import (
    DeltaAccepted,
    DeltaRejected,
    LeaseAssigned,
    RoundClosed,
    RoundFinished,
    RunFinished,
    RunResumed,
    WorkerLost,
)
from planetary.fabric.state import replay
from planetary.testing.cluster import SimCluster, encode_story, policy, replay_parameters
from planetary.testing.faults import KINDS, Fault, draw_plan

ROUNDS, WORKERS = 6, 3
SCHEDULES = 400
LIMIT_S = 600.0


def run_schedule(seed: int, checkpoint_every: int = 1) -> SimCluster:
    limits = policy(rounds=ROUNDS, workers=WORKERS, checkpoint_every=checkpoint_every)
    plan = draw_plan(seed, workers=WORKERS, horizon_s=25.0, most=12)
    cluster = SimCluster(seed, limits, WORKERS, plan)
    ended = cluster.run(LIMIT_S)
    where = f"seed {seed}: {cluster.struck}"
    assert ended, f"hangs; {where}; {cluster.gateway and cluster.gateway.controller.stall}"
    return cluster


def final_history(cluster: SimCluster) -> list:
    """The journal without what was voided by resumes."""
    history: list = []
    for record in cluster.disk.journal:
        if isinstance(record, RunResumed):
            ends = [
                i
                for i, r in enumerate(history)
                if isinstance(r, RoundFinished | RoundClosed) and r.round == record.mark.round
            ]
            history = history[: ends[-1] + 1] if ends else []
        history.append(record)
    return history


def check(cluster: SimCluster, seed: int) -> None:
    assert cluster.gateway is not None
    state = cluster.gateway.controller.state
    where = f"seed {seed}: {cluster.struck}"
    end = cluster.disk.journal[-1]
    assert isinstance(end, RunFinished), where
    assert end.ok, f"{end.reason}; {where}"
    assert state.round == ROUNDS, where

    # The journal replays to the live state.
    assert replay(cluster.disk.journal) == state, where

    # Every token counts once: no lease is in two rounds of the final history, and the ledger agrees.
    history = final_history(cluster)
    accepted = [r for r in history if isinstance(r, DeltaAccepted)]
    closed = {r.round: r for r in history if isinstance(r, RoundClosed)}
    leases = [r.lease for r in accepted]
    assert max(collections.Counter(leases).values()) == 1, where
    assert state.ledger.trained == len(leases), where
    assert state.ledger.held == [], where
    assert state.tokens_total == sum(r.tokens for r in accepted), where
    for number in range(1, ROUNDS + 1):
        assert closed[number].contributions == sum(r.round == number for r in accepted), where

    # The parameters are exactly what the final history says they are.
    assert cluster.gateway.controller.policy.inner_steps == 4
    theta = cluster.gateway._theta[ROUNDS]
    np.testing.assert_array_equal(theta, replay_parameters(cluster.disk.journal, 4), err_msg=where)

    # One metrics line per round, evaluated unless newer rounds overtook it twice.
    assert sorted(cluster.disk.metrics) == list(range(1, ROUNDS + 1)), where
    assert cluster.disk.metrics[ROUNDS].eval_loss is not None, where


@pytest.mark.parametrize("block", range(8))
def test_random_fault_schedules(block: int) -> None:
    struck: collections.Counter[str] = collections.Counter()
    size = SCHEDULES // 8
    for seed in range(block * size, (block + 1) * size):
        cluster = run_schedule(seed)
        check(cluster, seed)
        struck.update(cluster.struck)
    for kind in KINDS:
        assert struck[kind] > 0, f"no schedule of this block had a {kind} that hit anything"


def test_no_finished_round_is_lost() -> None:
    """A round that the journal calls finished and durable is never trained again after a resume."""
    resumes = 0
    for seed in range(1000, 1120):
        cluster = run_schedule(seed)
        durable = 0
        for record in cluster.disk.journal:
            if isinstance(record, RoundFinished) and record.durable:
                durable = max(durable, record.round)
            if isinstance(record, RunResumed):
                resumes += 1
                assert record.mark.round >= durable, f"seed {seed} lost round {durable}"
    assert resumes > 20


def test_rare_checkpoints_resume_from_the_last_one() -> None:
    for seed in range(2000, 2060):
        check(run_schedule(seed, checkpoint_every=3), seed)


def test_same_seed_same_story() -> None:
    for seed in (3, 17, 91):
        first, second = run_schedule(seed), run_schedule(seed)
        assert encode_story(first.disk.journal) == encode_story(second.disk.journal)
        assert first.struck == second.struck


def test_calm_run_has_no_losses() -> None:
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS), WORKERS)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    assert not [r for r in cluster.disk.journal if isinstance(r, WorkerLost | DeltaRejected)]
    assert cluster.gateway is not None
    assert cluster.gateway.controller.state.ledger.trained == ROUNDS * WORKERS


def test_killed_workers_lease_is_trained_again_after_its_restart() -> None:
    faults = [Fault(at_s=6.0, kind="kill_worker", worker=1, seconds=0.0)]
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS), WORKERS, faults)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    journal = cluster.disk.journal
    lost = next(i for i, r in enumerate(journal) if isinstance(r, WorkerLost))
    assert journal[lost].worker == "node-1/0"
    lease = next(r.lease for r in reversed(journal[:lost]) if isinstance(r, LeaseAssigned) and r.worker == "node-1/0")
    again = next(r for r in journal[lost:] if isinstance(r, LeaseAssigned) and r.lease == lease)
    assert again.worker == "node-1/0"
    assert again.pid == 2


def test_poisoned_results_are_rejected_and_name_the_worker() -> None:
    faults = [Fault(at_s=6.0, kind="poison_worker", worker=2, seconds=0.0)]
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS), WORKERS, faults)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    rejected = [r for r in cluster.disk.journal if isinstance(r, DeltaRejected)]
    assert [r.worker for r in rejected] == ["node-2/0"]
    assert "NaN" in rejected[0].reason


def test_a_run_without_workers_fails_with_a_reason() -> None:
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS), 0)
    assert cluster.run(LIMIT_S)
    end = cluster.disk.journal[-1]
    assert isinstance(end, RunFinished)
    assert not end.ok
    assert "no worker was connected for 120 s" in end.reason
