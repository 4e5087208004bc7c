"""Decoupled rounds: a quorum closes them, and the leases of the others go on. Fault schedules in simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fault_schedules import LIMIT_S, WORKERS, check, recorded_deltas, run_schedule, sweep
from small_training import small_training

from planetary.core.config import config_from_tables
from planetary.core.errors import UserError
from planetary.runs.rounds.records import (
    DeltaAccepted,
    LeaseAssigned,
    LeaseCarried,
    RoundClosed,
    RoundMerged,
    RoundsRecord,
    RoundsResumed,
)
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from random_schedules import SLOW_SEEDS, SOAK_SEEDS

PLAIN = ("outer.momentum=0", "outer.learning_rate=1", "outer.merge=mean", "outer.loss_rise=0")
KEYS = ("sync.overlap=decoupled", "sync.fragments=3", "sync.delay=2", "sync.compression=float32")
ROUNDS = 10


def run(plan: Sequence[Fault] = (), given: Sequence[str] = (*KEYS, *PLAIN)) -> SimCluster:
    cluster = SimCluster(3, small_training(rounds=ROUNDS, workers=WORKERS, given=given), WORKERS, plan)
    with recorded_deltas(cluster):
        assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    check(cluster)
    return cluster


def of(cluster: SimCluster, *kinds: type[RoundsRecord]) -> list:
    return [record for record in cluster.journal if isinstance(record, kinds)]


@pytest.fixture(scope="module")
def uneven() -> SimCluster:
    """A run in which worker 2 takes five times as long for a step."""
    return run([Fault(at_s=5.0, kind="slow_worker", worker=2, seconds=0.0)])


def test_a_slow_worker_holds_up_nobody_and_its_leases_count(uneven: SimCluster) -> None:
    closed = of(uneven, RoundClosed)
    assert any("(quorum 1)" in r.why and "grace time" in r.why for r in closed)
    slow = [r for r in of(uneven, DeltaAccepted) if r.worker == "node-2/0"]
    assigned = {r.task: r for r in of(uneven, LeaseAssigned)}
    late = [r for r in slow if r.round > assigned[r.task].round]
    assert late
    others = len(of(uneven, DeltaAccepted)) - len(slow)
    assert others > 2 * len(slow)


def test_a_lease_that_goes_on_says_so_for_each_round(uneven: SimCluster) -> None:
    rounds: dict[int, int] = {r.task: r.round for r in of(uneven, LeaseAssigned)}
    for record in of(uneven, LeaseCarried):
        assert (record.round, record.to) == (rounds[record.task], record.round + 1)
        rounds[record.task] = record.to
    assert all(rounds[r.task] == r.round for r in of(uneven, DeltaAccepted))


def test_a_worker_that_was_away_mixes_in_what_it_missed(uneven: SimCluster) -> None:
    missed = [r for r in of(uneven, LeaseAssigned) if r.missed]
    assert missed
    for record in missed:
        assert record.after
        assert record.missed == tuple(range(record.missed[0], record.version + 1))


def test_a_contribution_that_missed_its_fragment_weighs_less(uneven: SimCluster) -> None:
    assigned = {r.task: r for r in of(uneven, LeaseAssigned)}
    for record in of(uneven, DeltaAccepted):
        known = max(assigned[record.task].version, assigned[record.task].mixes)
        newer = [v for v in range(known + 1, record.round) if (record.round - v) % 3 == 0]
        assert record.stale == len(newer)


def test_no_round_is_shorter_than_a_lease_of_the_fastest_worker(uneven: SimCluster) -> None:
    """Or H, the steps between two merges of a fragment, would collapse with more workers."""
    fastest = min(r.seconds for r in of(uneven, DeltaAccepted))
    begun = {r.round: r.t for r in reversed(of(uneven, LeaseAssigned))}
    carried = {r.to: r.t for r in of(uneven, LeaseCarried)}
    opened = {number: min(t for table in (begun, carried) if (t := table.get(number))) for number in begun}
    lasted = [opened[n + 1] - opened[n] for n in sorted(opened) if n + 1 in opened and n > 1]
    assert min(lasted) >= 0.9 * fastest


def test_a_quorum_of_all_in_a_calm_run_is_streaming() -> None:
    shared = (*PLAIN, "sync.fragments=3", "sync.delay=2", "sync.compression=float32", f"fabric.quorum={WORKERS}")
    one, other = (run(given=(f"sync.overlap={name}", *shared)) for name in ("streaming", "decoupled"))
    assert {r.task for r in of(other, LeaseCarried)} == {r.task for r in of(other, LeaseAssigned) if r.early}
    found, expected = (cluster.parameters.state.params for cluster in (one, other))
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in expected.items()}


def test_random_fault_schedules() -> None:
    seen = sweep(range(4200, 4203), given=(*KEYS, *PLAIN))
    assert seen.records[RoundMerged] >= 3 * 6
    assert seen.records[LeaseCarried] > 0


def test_late_whole_results_are_folded_into_later_rounds() -> None:
    """One fragment: 1 / (1 + n) of the tokens after n newer versions, and no lease is cancelled."""
    given = ("sync.overlap=decoupled", "sync.delay=2", "sync.compression=float32", "fabric.quorum=2", *PLAIN)
    cluster = run_schedule(4701, given=given, speeds=(1.0, 1.0, 0.3))
    late = [r for r in of(cluster, DeltaAccepted) if r.stale]
    assert late
    assert {r.task for r in late} <= {r.task for r in of(cluster, LeaseCarried)}


@pytest.mark.parametrize("overlap", ["streaming", "decoupled"])
def test_measured_leases_are_refused_with_mixed_fragments(overlap: str) -> None:
    given = [f"sync.overlap={overlap}", "sync.compression=float32", "fabric.leases=measured"]
    with pytest.raises(UserError, match=f'fabric.leases: expected "equal" with sync.overlap = "{overlap}"'):
        config_from_tables({}, given)


@pytest.mark.slow
def test_more_random_fault_schedules() -> None:
    given = ("sync.overlap=decoupled", "sync.fragments=2", "sync.delay=1", "sync.mixing=0.5", "fabric.quorum=2")
    codecs = ("sync.compression=int4", "sync.broadcast_compression=int8")
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 10), given=(*given, *codecs, *PLAIN)).records[RoundsResumed] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_random_fault_schedules() -> None:
    sweep(range(SOAK_SEEDS, SOAK_SEEDS + 500), checkpoint_every=2, given=(*KEYS, *PLAIN)).require(RoundsResumed)
