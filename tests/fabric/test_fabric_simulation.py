"""The whole fabric under hundreds of random fault schedules, in simulated time."""

from __future__ import annotations

import collections

import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, run_schedule

from planetary.fabric.protocol.records import (
    DeltaRejected,
    LeaseAssigned,
    RoundFinished,
    RunFinished,
    RunResumed,
    WorkerLost,
)
from planetary.simulation.cluster import SimCluster, policy
from planetary.simulation.faults import KINDS, Fault
from planetary.simulation.small_training import encode_story

SCHEDULES = 400


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
