"""The ring with overlap: the next round is trained while one is reduced. Random fault schedules in simulated time."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, run_schedule

from planetary.fabric.protocol.records import (
    AnyRecord,
    DeltaAccepted,
    DeltaWithdrawn,
    DigestsDiffered,
    LeaseAssigned,
    ReduceRetried,
    RolledBack,
    RoundClosed,
    RoundFinished,
    RoundStarted,
    RunResumed,
    WorkerJoined,
)
from planetary.simulation.cluster import SimCluster, policy
from planetary.simulation.faults import KINDS, Fault
from planetary.simulation.small_training import encode_story

SCHEDULES = 80


def overlapping(checkpoint_every: int = 1, plan: Sequence[Fault] = ()) -> SimCluster:
    limits = policy(rounds=ROUNDS, workers=WORKERS, checkpoint_every=checkpoint_every, ring=True, overlap=True)
    cluster = SimCluster(0, limits, WORKERS, plan)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    return cluster


def of(cluster: SimCluster, *kinds: type[AnyRecord]) -> list:
    return [record for record in cluster.disk.journal if isinstance(record, kinds)]


@pytest.mark.parametrize("block", range(2))
def test_random_fault_schedules(block: int) -> None:
    struck: collections.Counter[str] = collections.Counter()
    seen: collections.Counter[type] = collections.Counter()
    size = SCHEDULES // 2
    for seed in range(block * size, (block + 1) * size):
        cluster = run_schedule(seed, overlap=True)
        check(cluster, seed)
        struck.update(cluster.struck)
        seen.update(type(record) for record in cluster.disk.journal)
    for kind in KINDS:
        assert struck[kind] > 0, f"no schedule of this block had a {kind} that hit anything"
    assert seen[DeltaWithdrawn] > 0
    assert seen[ReduceRetried] > 0


def test_rare_checkpoints() -> None:
    """Newcomers get a worker's state through the gateway, and the next reduction waits for that."""
    seen: collections.Counter[type] = collections.Counter()
    for seed in range(2000, 2040):
        cluster = run_schedule(seed, checkpoint_every=3, overlap=True)
        check(cluster, seed)
        seen.update(type(record) for record in cluster.disk.journal)
    assert seen[RunResumed] > 0


def test_same_seed_same_story() -> None:
    for seed in (3, 17, 91):
        first, second = run_schedule(seed, overlap=True), run_schedule(seed, overlap=True)
        assert encode_story(first.disk.journal) == encode_story(second.disk.journal)


def test_a_calm_run_trains_each_round_from_one_version_back() -> None:
    cluster = overlapping()
    assert not of(cluster, DeltaWithdrawn, ReduceRetried, DigestsDiffered)
    assert [r.version for r in of(cluster, RoundStarted)] == [0, 0, 1, 2, 3, 4]
    assert [r.version for r in of(cluster, LeaseAssigned)] == [v for v in (0, 0, 1, 2, 3, 4) for _ in range(WORKERS)]
    order = [(type(r), r.round) for r in of(cluster, RoundStarted, RoundClosed, RoundFinished)]
    for number in range(1, ROUNDS):
        assert order.index((RoundStarted, number + 1)) < order.index((RoundClosed, number))
        if number + 2 <= ROUNDS:
            assert order.index((RoundFinished, number)) < order.index((RoundStarted, number + 2))
    assert cluster.gateway is not None
    ring = cluster.gateway.controller.topology
    assert ring is not None
    assert (ring._attempts, ring._groups) == (ROUNDS, 1)


def test_rounds_share_no_seconds() -> None:
    cluster = overlapping()
    finished = of(cluster, RoundFinished)
    lines = cluster.disk.metrics
    assert [lines[r.round].seconds for r in finished] == [r.seconds for r in finished]
    lock_step = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS, ring=True), WORKERS)
    assert lock_step.run(LIMIT_S)
    assert sum(r.seconds for r in finished) < sum(line.seconds for line in lock_step.disk.metrics.values())
    assert sum(r.seconds for r in finished) < cluster.world.now


def test_a_newcomer_trains_from_the_newest_version() -> None:
    """It was killed in round 3; what it is given after its restart is newer than what the others began from."""
    cluster = overlapping(plan=[Fault(at_s=8.0, kind="kill_worker", worker=1, seconds=0.0)])
    journal = cluster.disk.journal
    [back] = [i for i, r in enumerate(journal) if isinstance(r, WorkerJoined) and r.worker == "node-1/0"][1:]
    [again, *_] = [r for r in journal[back:] if isinstance(r, LeaseAssigned) and r.worker == "node-1/0"]
    others = {r.version for r in of(cluster, LeaseAssigned) if r.round == again.round and r.worker != "node-1/0"}
    assert others == {again.round - 2}
    assert again.version == again.round - 1
    assert [r.task for r in of(cluster, DeltaAccepted)].count(again.task) == 1


def test_everybody_lost_between_checkpoints_goes_back_to_what_the_gateway_has() -> None:
    plan = [Fault(at_s=at, kind="kill_worker", worker=w, seconds=0.0) for at in (8.0, 8.001) for w in range(WORKERS)]
    cluster = overlapping(checkpoint_every=6, plan=plan)
    # In mid-reduce: first the round that nobody can finish is void, then what nobody has any more.
    [void, back] = of(cluster, RolledBack)
    assert void.mark.round > back.mark.round == 0
    # The pipeline fills again: the first two rounds after it are trained from where it went back to.
    after = cluster.disk.journal[cluster.disk.journal.index(back) :]
    assert [r.version for r in after if isinstance(r, RoundStarted)][:3] == [0, 0, 1]


def test_contributors_lost_in_mid_reduce_leave_the_round_to_whoever_is_left() -> None:
    """Worker 2 came back too late to contribute; the others die while they reduce, and it trains the round again."""
    kills = ((6.8, 2), (7.9, 0), (7.901, 1))
    cluster = overlapping(plan=[Fault(at_s=at, kind="kill_worker", worker=w, seconds=0.0) for at, w in kills])
    [back] = of(cluster, RolledBack)
    assert "every worker that had trained for round 2 was lost" in back.reason
    assert back.mark.round == 1
    after = cluster.disk.journal[cluster.disk.journal.index(back) :]
    first = next(r for r in after if isinstance(r, LeaseAssigned))
    assert (first.worker, first.round, first.version) == ("node-2/0", 2, 1)


def test_another_outer_state_than_everybodys_is_named_and_replaced() -> None:
    cluster = overlapping(plan=[Fault(at_s=6.5, kind="flip_bit", worker=1, seconds=0.0)])
    assert [r.workers for r in of(cluster, DigestsDiffered)] == [("node-1/0",)]
