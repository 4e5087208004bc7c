"""The whole fabric under hundreds of random fault schedules, in simulated time."""

from __future__ import annotations

import msgspec
import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, run_schedule, sweep
from small_training import SmallTraining, encode_story, small_training

from planetary.core.config import load_config
from planetary.fleet.gateway.run_files import CONFIG, EVENTS, LOCK, STEP, has_run
from planetary.fleet.protocol.records import RunFinished, RunStarted, WorkerLost
from planetary.run.choice import new_run
from planetary.runs.rounds.records import DeltaRejected, LeaseAssigned, RoundsResumed
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from random_schedules import SLOW_SEEDS, SOAK_SEEDS


@pytest.mark.parametrize(
    "seeds", [range(14), *(pytest.param(s, marks=pytest.mark.slow) for s in (range(14, 67), range(67, 120)))], ids=str
)
def test_random_fault_schedules(seeds: range) -> None:
    sweep(seeds).require(RoundsResumed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_more_random_fault_schedules(block: int) -> None:
    first = SLOW_SEEDS + block * 80
    sweep(range(first, first + 80)).require(RoundsResumed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(10))
def test_five_thousand_random_fault_schedules(block: int) -> None:
    first = SOAK_SEEDS + block * 500
    sweep(range(first, first + 500)).require(RoundsResumed)


@pytest.mark.parametrize("seeds", [range(2000, 2003), pytest.param(range(2003, 2008), marks=pytest.mark.slow)], ids=str)
def test_rare_checkpoints_resume_from_the_last_one(seeds: range) -> None:
    sweep(seeds, checkpoint_every=3)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", [{}, {"ring": True}, {"overlap": True}], ids=["star", "ring", "overlap"])
def test_an_epoch_ends_the_run_however_many_workers_come(nodes: int, mode: dict[str, bool]) -> None:
    """Three are expected. Every lease of the epoch is trained once, and none of the next one."""
    training = small_training(rounds=100, workers=WORKERS, inner_steps=25, max_epochs=1, checkpoint_every=50, **mode)
    cluster = SimCluster(0, training, nodes)
    assert cluster.run(LIMIT_S)
    check(cluster)
    leases = training.prepared.data.order(training.config).per_epoch
    state = cluster.controller.state
    assert state.ledger.trained == leases == 22
    assert state.round == -(-leases // nodes)
    assert state.durable_round == state.round
    end = cluster.journal[-1]
    assert isinstance(end, RunFinished)
    reason = end.reason.partition("; the held-out loss ended at")[0]  # with overlap it rises
    assert reason == f"data.max_epochs is reached: all 22 leases of data are trained, in {state.round} rounds"
    assert isinstance(cluster.journal[0], RunStarted)
    assert cluster.journal[0].rounds == 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"ring": True}, {"overlap": True}], ids=["star", "ring", "overlap"])
def test_an_epoch_ends_the_run_whatever_goes_wrong(mode: dict[str, bool]) -> None:
    sweep(range(3000, 3012), checkpoint_every=4, one_epoch=True, **mode)


@pytest.mark.slow
def test_more_runs_with_rare_checkpoints() -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 60), checkpoint_every=3).records[RoundsResumed] > 20


@pytest.mark.parametrize(
    ("mode", "operations"),
    [
        ({}, range(0, 290, 58)),
        *(
            pytest.param(mode, operations, marks=pytest.mark.slow)
            for mode, operations in (
                ({}, range(29, 300, 58)),
                ({"ring": True}, range(0, 300, 29)),
                ({"overlap": True}, range(0, 300, 29)),
            )
        ),
    ],
    ids=["star", "star-rest", "ring", "overlap"],
)
def test_no_finished_round_is_lost(mode: dict[str, bool], operations: range) -> None:
    """The gateway is killed before every few of its operations on the disk: between no two of them a round is lost."""
    training = small_training(rounds=ROUNDS, workers=WORKERS, **mode)
    deaths = 0
    for operation in operations:
        cluster = SimCluster(operation, training, WORKERS)
        cluster.disk.dies_after = operation
        assert cluster.run(LIMIT_S)
        check(cluster)
        deaths += "kill_gateway_writing" in cluster.struck
    assert deaths > 0.7 * len(operations)


@pytest.mark.parametrize(
    "operations", [range(0, 40, 2), pytest.param(range(1, 40, 2), marks=pytest.mark.slow)], ids=str
)
def test_failed_start_leaves_a_folder_for_the_next_one(operations: range) -> None:
    """Wherever the gateway dies, its folder has a journal with a record, or a new run takes it."""
    left: set[str] = set()
    for operation in operations:
        cluster = SimCluster(0, small_training(rounds=1, workers=1), 1)
        cluster.disk.dies_after = operation
        given = {"run": {"dir": str(cluster.folder), "name": cluster.run_folder.name}}

        def look(cluster: SimCluster = cluster, given: dict[str, dict[str, str]] = given) -> None:
            folder = cluster.run_folder
            if cluster.struck and cluster.gateway is None and folder.exists() and not has_run(folder):
                left.update(entry.name for entry in folder.iterdir())
                (folder / LOCK).write_text("")  # the process is dead, and the test's own is not
                assert new_run(given, [], None)[1] == folder

        assert cluster.run(LIMIT_S, look)
    assert {LOCK, CONFIG, STEP, EVENTS} <= left


def test_a_length_that_is_not_fitted_is_said_to_be_the_rounds() -> None:
    """The workers are not this machine's, so that there is nothing that the time could be measured on."""
    config = small_training(rounds=2, workers=1).config
    timed = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, target_minutes=5.0))
    cluster = SimCluster(0, SmallTraining(timed), 1)
    assert cluster.run(LIMIT_S)
    assert cluster.gateway is not None
    first = " ".join(str(number * 40_503 % 251) for number in range(20))
    assert cluster.gateway.notes == [
        f"{config.data.source}: 0.012 MB of raw 16-bit tokens; the first begins '{first}'",
        "train.target_minutes = 5 has no effect: the workers may be on other machines; the run has 2 rounds",
    ]
    assert load_config(cluster.run_folder / CONFIG).train.target_minutes == 0


def test_same_seed_same_story() -> None:
    for seed in (3, 17):
        first, second = run_schedule(seed), run_schedule(seed)
        assert encode_story(first.journal) == encode_story(second.journal)
        assert first.struck == second.struck


def test_calm_run_has_no_losses() -> None:
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)
    assert cluster.run(LIMIT_S)
    check(cluster)
    assert not [r for r in cluster.journal if isinstance(r, WorkerLost | DeltaRejected)]
    assert cluster.gateway is not None
    assert cluster.controller.state.ledger.trained == ROUNDS * WORKERS


def test_killed_workers_lease_is_trained_again_after_its_restart() -> None:
    faults = [Fault(at_s=5.5, kind="kill_worker", worker=1, seconds=0.0)]  # in the first round
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS, faults)
    assert cluster.run(LIMIT_S)
    check(cluster)
    journal = cluster.journal
    lost = next(i for i, r in enumerate(journal) if isinstance(r, WorkerLost))
    assert journal[lost].worker == "node-1/0"
    lease = next(r.lease for r in reversed(journal[:lost]) if isinstance(r, LeaseAssigned) and r.worker == "node-1/0")
    again = next(r for r in journal[lost:] if isinstance(r, LeaseAssigned) and r.lease == lease)
    assert again.worker == "node-1/0"
    assert again.pid == 2


def test_poisoned_results_are_rejected_and_name_the_worker() -> None:
    faults = [Fault(at_s=6.0, kind="poison_worker", worker=2, seconds=0.0)]
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS, faults)
    assert cluster.run(LIMIT_S)
    check(cluster)
    rejected = [r for r in cluster.journal if isinstance(r, DeltaRejected)]
    assert [r.worker for r in rejected] == ["node-2/0"]
    assert "NaN" in rejected[0].reason


def test_a_run_without_workers_fails_with_a_reason() -> None:
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), 0)
    assert cluster.run(LIMIT_S)
    end = cluster.journal[-1]
    assert isinstance(end, RunFinished)
    assert not end.ok
    assert "no worker was connected for 120 s" in end.reason
