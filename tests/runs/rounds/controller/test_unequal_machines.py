"""Leases by measured speed: all workers end a round at once, and steps that the deadline cuts off are trained later."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
from fault_schedules import run_schedule, sweep
from small_training import SmallTraining, small_training

from planetary.runs.rounds.controller.pace import EVEN, MOST_SHARES, LeaseTimes, MeasuredShares, Shares
from planetary.runs.rounds.records import DeltaAccepted, LeaseAssigned, RoundMerged
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.simulated_cluster import STEP_S, SimMachine
from random_schedules import SLOW_SEEDS, surviving

MEASURED = "fabric.leases=measured"


def measured(average: int, **workers: tuple[float, float]) -> MeasuredShares:
    """Shares after one contribution of each worker: seconds of a step, and of transfers."""
    shares = MeasuredShares(average)
    for worker, (step_s, transfer_s) in workers.items():
        shares.observe(
            LeaseTimes(worker=worker, steps=10, trained=10, seconds=10 * step_s, transfer_s=transfer_s, waited_s=0.0)
        )
    return shares


def test_speeds_of_one_and_four_share_the_steps_of_two() -> None:
    assert measured(30, a=(1.0, 0.0), b=(0.25, 0.0)).of(["a", "b"]) == {"a": 12, "b": 48}


def test_transfers_are_part_of_a_finish_time() -> None:
    times = {"a": (0.1, 6.0), "b": (0.1, 0.5), "c": (0.3, 0.5)}
    shares = measured(100, **times).of([*times])
    ends = [times[worker][1] + steps * times[worker][0] for worker, steps in shares.items()]
    assert sum(shares.values()) == 300
    assert max(ends) <= 1.02 * min(ends)


def test_shares_stay_equal_while_finish_times_nearly_are() -> None:
    assert measured(30, a=(1.0, 0.0), b=(1 / (1 + 0.9 * EVEN), 0.0)).of(["a", "b"]) == {"a": 30, "b": 30}
    assert MeasuredShares(30).of(["a", "b"]) == Shares(30).of(["a", "b"]) == {"a": 30, "b": 30}


def test_newcomer_counts_as_the_median_up_to_the_most() -> None:
    """A newcomer counts as the median and nobody gets more than the most."""
    shares = measured(10, a=(1.0, 0.0), b=(1.0, 0.0), c=(0.001, 0.0)).of(["a", "b", "c", "d"])
    assert shares["c"] == 37
    assert {shares[worker] for worker in "abd"} == {1}
    assert measured(30, a=(1.0, 0.0), b=(1.0, 0.0), c=(0.001, 0.0)).of(["a", "b", "c", "d", "e", "f"]) == {
        **dict.fromkeys("abdef", 12),
        "c": 30 * MOST_SHARES,
    }


def unequal(
    speeds: tuple[float, ...], *given: str, rounds: int = 6, inner_steps: int = 60, plan: tuple[Fault, ...] = ()
) -> SimCluster:
    training = small_training(rounds=rounds, workers=len(speeds), inner_steps=inner_steps, eval_every=1000, given=given)
    machines = [SimMachine(speed=speed, is_steady=True) for speed in speeds]
    cluster = SimCluster(5, training, len(speeds), plan, machines=machines)
    assert cluster.run(2000.0), cluster.waits_for
    check_without_eval(cluster)
    return cluster


def check_without_eval(cluster: SimCluster) -> None:
    assert isinstance(cluster.training, SmallTraining)
    replayed = cluster.training.replay(cluster.journal)["w"]
    np.testing.assert_array_equal(cluster.parameters.state.params["w"], replayed)


R = TypeVar("R")


def of(cluster: SimCluster, kind: type[R]) -> list[R]:
    return [record for record in cluster.journal if isinstance(record, kind)]


def test_speeds_of_one_and_four_reach_nine_tenths_of_their_sum() -> None:
    """The rest is what every round of the simulator takes beside its steps, 0.8 s of 10."""
    cluster = unequal((1.0, 4.0), MEASURED, inner_steps=120)
    later = [r for r in of(cluster, DeltaAccepted) if r.round >= 3]
    for round_ in range(3, 7):
        ends = [r.seconds + r.transfer_s for r in later if r.round == round_]
        assert len(ends) == 2
        assert max(ends) <= 1.1 * min(ends)
    tokens = sum(r.tokens for r in later)
    seconds = sum(r.seconds for r in of(cluster, RoundMerged) if r.round >= 3)
    each = cluster.config.train.batch_size * cluster.config.train.sequence_length / STEP_S  # tokens/s at speed 1
    assert tokens / seconds >= 0.9 * 5 * each


def test_without_it_the_slower_one_is_waited_for() -> None:
    cluster = unequal((1.0, 4.0))
    last = [r for r in of(cluster, DeltaAccepted) if r.round == 6]
    assert max(r.seconds for r in last) > 3 * min(r.seconds for r in last)


@pytest.mark.parametrize("topology", ["star", "ring"])
def test_equal_speeds_train_the_bits_of_equal_leases(topology: str) -> None:
    where = (f"sync.topology={topology}", f"sync.precision={'f64' if topology == 'ring' else 'f32'}")
    equal, by_speed = unequal((1.0, 1.0), *where, rounds=3), unequal((1.0, 1.0), *where, MEASURED, rounds=3)
    first, second = equal.parameters.state.params, by_speed.parameters.state.params
    np.testing.assert_array_equal(first["w"], second["w"])
    parts = by_speed.config.leases_per_slice
    assert [r.lease * parts for r in of(equal, LeaseAssigned)] == [r.lease for r in of(by_speed, LeaseAssigned)]
    assert [r.tokens_total for r in of(equal, RoundMerged)] == [r.tokens_total for r in of(by_speed, RoundMerged)]


def test_steps_at_the_deadline_count_and_the_rest_come_later() -> None:
    """Steps that are trained at the deadline count and the others go to a later round."""
    slow = Fault(at_s=20.0, kind="slow_worker", worker=1)
    cluster = unequal((1.0, 1.0), MEASURED, "fabric.round_deadline_s=20", plan=(slow,))
    assert cluster.struck == ["slow_worker"]
    cut = [r for r in of(cluster, DeltaAccepted) if r.untrained]
    assert cut
    assert all(r.worker == "node-1/0" for r in cut)
    assert all(r.tokens == 8 * (1 + len(r.more)) for r in of(cluster, DeltaAccepted))
    trained = [lease for r in of(cluster, DeltaAccepted) for lease in (r.lease, *r.more)]
    assert len(trained) == len(set(trained)) == cluster.controller.state.ledger.trained
    assert set(cut[0].untrained) <= set(trained)  # later


def test_orphans_are_divided_to_fill_the_remaining_time() -> None:
    """Orphans are divided among all and fill the time until the others end."""
    shares = measured(30, a=(0.1, 0.0), b=(0.4, 0.0))
    assert shares.of_orphans("a", 30, 7, 0.0) == 5
    assert shares.of_orphans("a", 30, 7, 2.05) == 20
    assert shares.of_orphans("b", 30, 7, 2.05) == 5
    assert shares.of_orphans("c", 30, 7, 2.05) == 8  # as slow as the median
    assert shares.of_orphans("a", 3, 7, 2.05) == 3
    assert MeasuredShares(30).of_orphans("a", 30, 7, 2.05) == 5
    assert Shares(1).of_orphans("a", 3, 7, 2.05) == 1


def test_the_steps_of_a_lost_worker_are_divided_among_the_others() -> None:
    """The round waits for neither its restart nor a lease trained anew, and every step counts once."""
    plan = [Fault(at_s=9.0, kind="kill_worker", worker=1)]
    given = (MEASURED, "fabric.round_deadline_s=60")
    training = small_training(rounds=4, workers=4, inner_steps=40, given=given)
    cluster = SimCluster(0, training, 4, plan, step_s=0.2, machines=[SimMachine(is_steady=True)] * 4)
    assert cluster.run(300.0)
    accepted = [record for record in cluster.journal if isinstance(record, DeltaAccepted)]
    rounds = {record.round: record for record in cluster.journal if isinstance(record, RoundMerged)}
    hit = next(number for number in rounds if sum(r.round == number for r in accepted) > 4)
    leases = [lease for r in accepted if r.round == hit for lease in (r.lease, *r.more)]
    assert sorted(leases) == list(range(min(leases), min(leases) + 4 * 40))
    assert len({r.worker for r in accepted if r.round == hit and len(r.more) < 30}) >= 3
    usual = min(r.seconds for r in rounds.values())
    assert rounds[hit].seconds < usual + 0.5 * 40 * 0.2  # simulated seconds; a lease takes 40 * 0.2


@pytest.mark.slow
def test_unequal_leases_survive_random_faults() -> None:
    for more in ({}, {"ring": True}, {"overlap": True, "given": ("sync.overlap=eager", MEASURED)}):
        seen = sweep(range(4300, 4303), **{"given": (MEASURED,), "speeds": (1.0, 4.0, 2.0), **more})
        assert seen.records[RoundMerged] >= 3 * 6


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"ring": True}, {"overlap": True}], ids=["star", "ring", "overlap"])
def test_unequal_leases_survive_more_random_faults(mode: dict[str, bool]) -> None:
    cut = 0
    given = (MEASURED, "fabric.round_deadline_s=4")
    for seed in range(SLOW_SEEDS, SLOW_SEEDS + 5):
        cluster = run_schedule(seed, **mode, one_epoch=True, given=given, speeds=(1.0, 4.0, 2.0))
        history = surviving(cluster.journal, overlapping=True)
        cut += sum(bool(r.untrained) for r in history if isinstance(r, DeltaAccepted))
    assert cut > 0
