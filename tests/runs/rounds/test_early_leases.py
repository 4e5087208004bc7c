"""Leases that are given out before their round is open: what must hold beside faults, unequal speeds and lies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fault_schedules import LIMIT_S, WORKERS, check, recorded_deltas
from small_training import small_training

from planetary.core.config import config_from_tables
from planetary.core.errors import UserError
from planetary.fleet.protocol.records import TaskAborted, WorkerBanned, WorkerLeft, WorkerLost
from planetary.runs.rounds.records import (
    ContributionsJudged,
    DeltaAccepted,
    LeaseAssigned,
    LeaseReturned,
    RoundsRecord,
    WorkerSlow,
)
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.simulated_cluster import SimMachine

PLAIN = ("outer.momentum=0", "outer.learning_rate=1", "outer.merge=mean", "outer.loss_rise=0", "eval.every=8")
STREAMING = ("sync.overlap=streaming", "sync.fragments=2", "sync.delay=2", "sync.mixing=0.5")
ROUNDS = 8


def run(
    plan: Sequence[Fault] = (),
    *given: str,
    speeds: Sequence[float] = (),
    seed: int = 5,
    keys: Sequence[str] = STREAMING,
) -> SimCluster:
    training = small_training(rounds=ROUNDS, workers=WORKERS, given=(*keys, *PLAIN, *given))
    cluster = SimCluster(seed, training, WORKERS, plan, machines=[SimMachine(speed=speed) for speed in speeds])
    with recorded_deltas(cluster):
        assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    check(cluster)
    assert of(cluster, LeaseAssigned, early=True)
    return cluster


def of(cluster: SimCluster, record_type: type[RoundsRecord], **values: object) -> list:
    found = (record for record in cluster.journal if isinstance(record, record_type))
    return [record for record in found if all(getattr(record, key) == value for key, value in values.items())]


@pytest.mark.parametrize("at_s", [6.6, 7.2, 7.8, 8.4])
def test_a_worker_that_is_let_go_leaves_at_the_end_of_its_lease(at_s: float) -> None:
    """Its early lease pauses for a round that the others take long for."""
    cluster = run([Fault(at_s=at_s, kind="let_go", worker=0, seconds=0.0)], speeds=(1.0, 0.4, 0.4))
    assert not of(cluster, WorkerLost, kind="stuck")
    [left] = of(cluster, WorkerLeft, worker="node-0/0")
    assert left.t - at_s < 2.0


def test_waiting_for_a_slow_worker_keeps_the_next_deadline() -> None:
    cluster = run([Fault(at_s=8.0, kind="hang_worker", worker=2, seconds=0.0)], speeds=(1.0, 1.0, 0.3))
    [stuck] = of(cluster, WorkerLost, kind="stuck")
    assert "it made no progress on its task for 20 s" in stuck.reason  # the least that there is


def test_paused_early_lease_makes_no_fast_worker_slow() -> None:
    cluster = run(speeds=(1.0, 0.3, 0.3))
    assert not of(cluster, WorkerSlow, worker="node-0/0")
    assert max(record.transfer_s for record in of(cluster, DeltaAccepted, worker="node-0/0")) < 1.0


@pytest.mark.parametrize("speed", [0.6, 0.3])
def test_every_version_is_mixed_into_workers_values(speed: float) -> None:
    """Every version is mixed into a worker's values whatever is taken back."""
    keys = ("sync.overlap=decoupled", "sync.fragments=3", "sync.delay=2", "sync.compression=float32")
    cluster = run((), "fabric.quorum=2", speeds=(1.0, 1.0, speed), seed=3, keys=keys)
    assert of(cluster, LeaseReturned, to="pool")
    mixed: dict[int, int] = {}  # task -> the newest version in the values at its end
    for lease in of(cluster, LeaseAssigned):
        if lease.after:
            assert set(range(mixed[lease.after] + 1, lease.version + 1)) <= set(lease.missed)
        mixed[lease.task] = max(lease.version, lease.mixes, mixed.get(lease.after, -1))


@pytest.mark.parametrize("at_s", [7.5, 7.8])
def test_a_nan_that_an_early_lease_began_from_costs_one_task(at_s: float) -> None:
    cluster = run([Fault(at_s=at_s, kind="poison_worker", worker=0, seconds=0.0)], speeds=(1.0, 0.4, 0.4))
    assert len(of(cluster, TaskAborted, kind="numerics")) == 1
    assert not of(cluster, WorkerBanned)


def test_a_liar_is_found_where_no_step_is_behind_any_delta() -> None:
    """With one fragment and a delay of the whole lease the shared values are taken at its end."""
    keys = ("sync.overlap=streaming", "sync.delay=4", "sync.mixing=0.5", "sync.compression=float32")
    cluster = run([Fault(at_s=6.0, kind="lie", worker=0, seconds=4.0, lie="huge")], keys=keys)
    assert all(record.share == 0.0 for record in of(cluster, DeltaAccepted) if record.round > 1)
    refused = {m.worker for record in of(cluster, ContributionsJudged) for m in record.measures if m.refused}
    assert refused == {"node-0/0"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("sync.delay=5",), "sync.delay: expected at most train.inner_steps (4), found 5"),
        (("sync.delay=4",), "sync.delay: expected fewer than train.inner_steps (4) with sync.fragments = 1"),
    ],
)
def test_a_delay_in_which_nothing_would_be_trained_is_refused(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as found:
        config_from_tables({}, ["sync.overlap=streaming", "train.inner_steps=4", *given])
    assert words in str(found.value)
