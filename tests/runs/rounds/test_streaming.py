"""Streaming: one fragment a round, mixed into the next lease on the way. Fault schedules in simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, sweep
from small_training import small_training

from planetary.fleet.protocol.records import WorkerJoined
from planetary.runs.rounds.records import (
    EvalFinished,
    LeaseAssigned,
    LeaseCarried,
    LeaseReturned,
    RoundMerged,
    RoundsRecord,
    RoundsResumed,
)
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from random_schedules import SLOW_SEEDS, SOAK_SEEDS

PLAIN = ("outer.momentum=0", "outer.learning_rate=1", "outer.merge=mean", "outer.loss_rise=0")


def streaming(fragments: int, delay: int, mixing: float, *other: str) -> tuple[str, ...]:
    keys = f"sync.fragments={fragments}", f"sync.delay={delay}", f"sync.mixing={mixing}"
    return ("sync.overlap=streaming", *keys, *PLAIN, *other)


def run(given: Sequence[str], plan: Sequence[Fault] = ()) -> SimCluster:
    cluster = SimCluster(3, small_training(rounds=ROUNDS, workers=WORKERS, given=given), WORKERS, plan)
    assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    check(cluster)
    return cluster


def of(cluster: SimCluster, *kinds: type[RoundsRecord]) -> list:
    return [record for record in cluster.journal if isinstance(record, kinds)]


def ends(cluster: SimCluster) -> list[bytes]:
    state = cluster.parameters.state
    return [values.tobytes() for table in (state.params, state.velocity) for values in table.values()]


@pytest.mark.parametrize(
    "outer", [("outer.momentum=0.9", "outer.learning_rate=0.7", "outer.merge=mean"), ("outer.merge=rda",)], ids=str
)
def test_one_fragment_without_delay_is_lock_step_bit_for_bit(outer: tuple[str, ...]) -> None:
    lock_step, streamed = run(outer), run(("sync.overlap=streaming", *outer))
    assert ends(lock_step) == ends(streamed)
    assert lock_step.controller.state.evals == streamed.controller.state.evals


def test_leases_follow_each_other_and_mix_in_the_last_round() -> None:
    assigned = of(run(streaming(2, 2, 0.5)), LeaseAssigned)
    of_round = {r.task: r.round + r.early for r in assigned}
    owners = {r.task: (r.worker, of_round[r.task]) for r in assigned}
    assert all((r.after, r.mixes) == (0, -1) for r in assigned if of_round[r.task] == 1)
    later = [r for r in assigned if of_round[r.task] > 1]
    assert len(later) == WORKERS * (ROUNDS - 1)
    assert all(owners[r.after] == (r.worker, of_round[r.task] - 1) for r in later)
    assert all(r.mixes == of_round[r.task] - 1 for r in later)


def test_contributor_goes_on_before_its_round_closes() -> None:
    """It pauses after τ steps, so that nobody is further ahead; without a delay nobody is ahead at all."""
    cluster = run(streaming(2, 2, 0.5))
    early = [r for r in of(cluster, LeaseAssigned) if r.early]
    assert len(early) >= ROUNDS - 1
    assert {(r.task, r.round, r.to) for r in of(cluster, LeaseCarried)} == {
        (r.task, r.round, r.round + 1) for r in early
    }
    assert not any(r.early for r in of(run(streaming(2, 0, 0.5)), LeaseAssigned))


@pytest.mark.parametrize("overlap", ["streaming", "decoupled"])
def test_workers_with_leases_ahead_still_evaluate_what_is_due(overlap: str) -> None:
    given = streaming(2, 4, 0.5, "eval.every=2", "sync.compression=float32", f"sync.overlap={overlap}")
    cluster = run(given)
    assert [r.version for r in of(cluster, EvalFinished)] == list(range(2, ROUNDS + 1, 2))
    assert any(r.early for r in of(cluster, LeaseAssigned))


def test_early_leases_are_taken_back_for_their_round() -> None:
    """Two of three workers are away for a minute, and the third is needed for the quorum of two."""
    lost = [Fault(at_s=5.5, kind="partition", worker=worker, seconds=60.0) for worker in (1, 2)]
    cluster = run(streaming(2, 2, 0.5, "fabric.quorum=2"), lost)
    early = {r.task for r in of(cluster, LeaseAssigned) if r.early}
    assert early & {r.task for r in of(cluster, LeaseReturned) if r.to == "pool"}


def test_returning_worker_begins_at_the_shared_fragments() -> None:
    """A worker that comes back begins at the shared values of all fragments."""
    cluster = run(streaming(2, 2, 0.5), [Fault(at_s=8.0, kind="kill_worker", worker=1, seconds=0.0)])
    journal = cluster.journal
    [back] = [i for i, r in enumerate(journal) if isinstance(r, WorkerJoined) and r.worker == "node-1/0"][1:]
    [again, *_] = [r for r in journal[back:] if isinstance(r, LeaseAssigned) and r.worker == "node-1/0"]
    assert again.after == 0
    assert again.version >= again.round - 2


@pytest.mark.parametrize(
    "given",
    [streaming(3, 2, 0.5), streaming(2, 4, 0.25, "sync.compression=int4", "sync.broadcast_compression=int8")],
    ids=["whole", "coded"],
)
def test_random_fault_schedules(given: tuple[str, ...]) -> None:
    assert sweep(range(4200, 4202), given=given).records[RoundMerged] >= 2 * ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [streaming(4, 1, 0.5), streaming(2, 0, 0.0, "sync.compression=float32")], ids=["whole", "float32"]
)
def test_more_random_fault_schedules(given: tuple[str, ...]) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 10), given=given).records[RoundsResumed] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_random_fault_schedules() -> None:
    given = streaming(3, 2, 0.5, "sync.compression=int4")
    sweep(range(SOAK_SEEDS, SOAK_SEEDS + 500), checkpoint_every=2, given=given).require(RoundsResumed)
