"""The ring with overlap: the next round is trained while one is reduced. Random fault schedules in simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check
from small_training import small_training

from planetary.fleet.protocol.records import WorkerJoined
from planetary.runs.rounds.controller.ring import Ring
from planetary.runs.rounds.records import (
    DeltaAccepted,
    DeltaWithdrawn,
    DigestsDiffered,
    LeaseAssigned,
    ReduceRetried,
    RolledBack,
    RoundClosed,
    RoundMerged,
    RoundsRecord,
    RoundStarted,
)
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster


def overlapping(checkpoint_every: int = 1, plan: Sequence[Fault] = ()) -> SimCluster:
    limits = small_training(rounds=ROUNDS, workers=WORKERS, checkpoint_every=checkpoint_every, ring=True, overlap=True)
    cluster = SimCluster(0, limits, WORKERS, plan)
    assert cluster.run(LIMIT_S)
    check(cluster)
    return cluster


def of(cluster: SimCluster, *kinds: type[RoundsRecord]) -> list:
    return [record for record in cluster.journal if isinstance(record, kinds)]


def test_a_calm_run_trains_each_round_from_one_version_back() -> None:
    cluster = overlapping()
    assert not of(cluster, DeltaWithdrawn, ReduceRetried, DigestsDiffered)
    assert [r.version for r in of(cluster, RoundStarted)] == [0, 0, 1, 2, 3, 4]
    assert [r.version for r in of(cluster, LeaseAssigned)] == [v for v in (0, 0, 1, 2, 3, 4) for _ in range(WORKERS)]
    order = [(type(r), r.round) for r in of(cluster, RoundStarted, RoundClosed, RoundMerged)]
    for number in range(1, ROUNDS):
        assert order.index((RoundStarted, number + 1)) < order.index((RoundClosed, number))
        if number + 2 <= ROUNDS:
            assert order.index((RoundMerged, number)) < order.index((RoundStarted, number + 2))
    assert cluster.gateway is not None
    ring = cluster.controller.topology
    assert isinstance(ring, Ring)
    assert (ring.attempts, ring.groups) == (ROUNDS, 1)


def test_rounds_share_no_seconds() -> None:
    cluster = overlapping()
    finished = of(cluster, RoundMerged)
    lines = cluster.metrics
    assert [lines[r.round].seconds for r in finished] == [r.seconds for r in finished]
    [first, *_] = of(cluster, RoundStarted)
    assert sum(r.seconds for r in finished) == pytest.approx(finished[-1].t - first.t)


def test_a_newcomer_trains_from_the_newest_version() -> None:
    """It was killed in round 3; what it is given after its restart is newer than what the others began from."""
    cluster = overlapping(plan=[Fault(at_s=8.0, kind="kill_worker", worker=1, seconds=0.0)])
    journal = cluster.journal
    [back] = [i for i, r in enumerate(journal) if isinstance(r, WorkerJoined) and r.worker == "node-1/0"][1:]
    [again, *_] = [r for r in journal[back:] if isinstance(r, LeaseAssigned) and r.worker == "node-1/0"]
    others = {r.version for r in of(cluster, LeaseAssigned) if r.round == again.round and r.worker != "node-1/0"}
    assert others == {again.round - 2}
    assert again.version == again.round - 1
    assert [r.task for r in of(cluster, DeltaAccepted)].count(again.task) == 1


def test_loss_of_everyone_goes_back_to_the_gateways_state() -> None:
    """Everybody lost between checkpoints goes back to what the gateway has."""
    [closed] = [r.t for r in of(overlapping(checkpoint_every=6), RoundClosed) if r.round == 3]
    times = (closed + 0.05, closed + 0.051)
    plan = [Fault(at_s=at, kind="kill_worker", worker=w, seconds=0.0) for at in times for w in range(WORKERS)]
    cluster = overlapping(checkpoint_every=6, plan=plan)
    # In mid-reduce: first the round that no worker can finish is void, then the state that none has any more.
    [void, back] = of(cluster, RolledBack)
    assert void.mark.round > back.mark.round == 0
    # The pipeline fills again: the first two rounds after it are trained from where it went back to.
    after = cluster.journal[cluster.journal.index(back) :]
    assert [r.version for r in after if isinstance(r, RoundStarted)][:3] == [0, 0, 1]


def test_contributors_lost_in_mid_reduce_leave_it_to_the_rest() -> None:
    """Worker 2 came back too late to contribute; the others die while they reduce, and it trains the round again."""
    kills = ((8.4, 2), (9.6, 0), (9.601, 1))
    cluster = overlapping(plan=[Fault(at_s=at, kind="kill_worker", worker=w, seconds=0.0) for at, w in kills])
    [back] = of(cluster, RolledBack)
    assert "every worker that had trained for round 2 was lost" in back.reason
    assert back.mark.round == 1
    after = cluster.journal[cluster.journal.index(back) :]
    first = next(r for r in after if isinstance(r, LeaseAssigned))
    assert (first.worker, first.round, first.version) == ("node-2/0", 2, 1)


def test_differing_outer_state_is_named_and_replaced() -> None:
    cluster = overlapping(plan=[Fault(at_s=6.5, kind="flip_bit", worker=1, seconds=0.0)])
    assert [r.workers for r in of(cluster, DigestsDiffered)] == [("node-1/0",)]
