"""The star with overlap: contributions travel while the next round is trained. Fault schedules in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, recorded_deltas, sweep
from small_training import small_training

from planetary.runs.rounds.records import (
    DeltaAccepted,
    DeltaWithdrawn,
    LeaseAssigned,
    RolledBack,
    RoundClosed,
    RoundMerged,
    RoundsRecord,
    RoundsResumed,
    RoundStarted,
)
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from random_schedules import SLOW_SEEDS, SOAK_SEEDS

PLAIN = ("outer.momentum=0", "outer.learning_rate=1", "outer.merge=mean", "outer.loss_rise=0")
EAGER = ("sync.overlap=eager", "sync.compression=float32", *PLAIN)
UPLINK = 600.0  # bytes/s; the tensors of a result take about 0.4 s


def slow_lines(
    given: Sequence[str] = EAGER,
    plan: Sequence[Fault] = (),
    seed: int = 1,
    uplink: float = UPLINK,
    strikes: Callable[[SimCluster], Sequence[int]] = lambda cluster: [],
) -> SimCluster:
    """Run with slow lines to the gateway, and check what must hold.

    `strikes` names the workers whose connections break now; the first time that it names any is the only one.
    """
    cluster = SimCluster(seed, small_training(rounds=ROUNDS, workers=WORKERS, given=given), WORKERS, plan)
    for worker in range(WORKERS):
        cluster.world.network.throttle(f"node-{worker}", cluster.place.node, uplink)
    struck: list[int] = []

    def look() -> None:
        if cluster.gateway is not None and cluster.gateway.controller is not None and not struck:
            struck.extend(strikes(cluster))
            for worker in struck:
                assert cluster.world.network.drop(f"node-{worker}") > 0

    with recorded_deltas(cluster):
        assert cluster.run(LIMIT_S, look), f"hangs: {cluster.waits_for}"
    check(cluster)
    return cluster


def of(cluster: SimCluster, *kinds: type[RoundsRecord]) -> list:
    return [record for record in cluster.journal if isinstance(record, kinds)]


def test_contributions_arrive_while_the_next_round_is_trained() -> None:
    cluster = slow_lines()
    order = [(type(r), r.round) for r in of(cluster, RoundStarted, RoundClosed, RoundMerged)]
    for number in range(1, ROUNDS):
        assert order.index((RoundStarted, number + 1)) < order.index((RoundClosed, number))
    assert [r.version for r in of(cluster, LeaseAssigned)] == [v for v in (0, 0, 1, 2, 3, 4) for _ in range(WORKERS)]


def test_eager_leases_begin_with_the_workers_own_part() -> None:
    assigned = of(slow_lines(), LeaseAssigned)
    owners = {r.task: r.worker for r in assigned}
    later = [r for r in assigned if r.round > 1]
    assert all([owners[task] for task in r.ahead] == [r.worker] and r.ahead_tokens > 0 for r in later)


def test_broken_upload_is_withdrawn_and_its_lease_retrained() -> None:
    """An upload that breaks off is withdrawn and its lease trained again."""

    def strikes(cluster: SimCluster) -> Sequence[int]:
        opened = cluster.controller.state.open
        return [1] if opened is not None and any(c.worker == "node-1/0" for c in opened.contributions) else []

    cluster = slow_lines(strikes=strikes)
    [withdrawn] = of(cluster, DeltaWithdrawn)
    assert (withdrawn.round, withdrawn.worker) == (1, "node-1/0")
    assert withdrawn.reason == "the worker that sent it was lost"
    assert len([r for r in of(cluster, DeltaAccepted) if r.lease == withdrawn.lease]) == 2


def test_round_of_broken_uploads_goes_back_a_version() -> None:
    """A round whose uploads all break off goes back to the version before."""

    def strikes(cluster: SimCluster) -> Sequence[int]:
        return range(WORKERS) if cluster.controller.state.closing is not None else []

    [back] = of(slow_lines(strikes=strikes, uplink=130.0), RolledBack)
    assert back.mark.round == 0
    assert "every worker that had trained for round 1 was lost" in back.reason


@pytest.mark.parametrize(
    "given",
    [EAGER, (*EAGER, "outer.merge=rda"), ("sync.overlap=async", "sync.compression=int8", *PLAIN)],
    ids=["eager", "eager-rda", "async-int8"],
)
def test_random_fault_schedules(given: tuple[str, ...]) -> None:
    assert sweep(range(4200, 4202), given=given).records[RoundMerged] >= 2 * ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("down", ["none", "int4"])
def test_more_random_fault_schedules(down: str) -> None:
    given = (*EAGER, f"sync.broadcast_compression={down}", "sync.compression=int4")
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 10), given=given).records[RoundsResumed] > 0


@pytest.mark.slow
def test_connections_that_break_at_random_on_slow_lines() -> None:
    withdrawn = 0
    for seed in range(4300, 4308):
        drawn = random.Random(seed)
        times = [(drawn.uniform(6.0, 25.0), drawn.randrange(WORKERS)) for _ in range(10)]
        plan = [Fault(at_s=at, kind="drop_link", worker=worker, seconds=0.0) for at, worker in times]
        withdrawn += len(of(slow_lines(plan=plan, seed=seed, uplink=250.0), DeltaWithdrawn))
    assert withdrawn > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_random_fault_schedules() -> None:
    sweep(range(SOAK_SEEDS, SOAK_SEEDS + 500), checkpoint_every=2, given=EAGER).require(RoundsResumed)
