"""Whole mixtures in their production shells under random fault schedules, in simulated time."""

from __future__ import annotations

import msgspec
import pytest
from mixture_schedules import LIMIT_S, MODES, NODES, ROUNDS, SCHEDULES
from small_mixture import small_mixture

from planetary.fleet.gateway.run_files import EVENTS
from planetary.fleet.protocol.records import WorkerLeft, WorkerLost
from planetary.machine.task_times import TaskTimes
from planetary.runs.mixture.records import (
    ExpertsAdvanced,
    FragmentAdvanced,
    MixtureStarted,
    ShardGranted,
    SurrogatesRefreshed,
)
from planetary.runs.rounds.records import CheckpointFailed, TrainingResumed, TrainingStarted
from planetary.simulation.faults import Fault
from planetary.simulation.mixtures.mixture_cluster import MixtureCluster
from random_schedules import SLOW_SEEDS, SOAK_SEEDS

SAME_SEED = 10_084  # without a full disk: the error names the folder and the free space


def test_random_fault_schedules() -> None:
    seen = SCHEDULES.sweep_modes(range(len(MODES)), MODES)
    assert seen.records[TrainingResumed] > 0
    assert all(seen.records[kind] for kind in (ShardGranted, FragmentAdvanced, SurrogatesRefreshed, ExpertsAdvanced))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1))
def test_more_random_fault_schedules(block: int) -> None:
    first = SLOW_SEEDS + block * 60
    SCHEDULES.sweep_modes(range(first, first + 38), MODES).require(TrainingResumed, ExpertsAdvanced)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(6))
def test_three_thousand_random_fault_schedules(block: int) -> None:
    first = SOAK_SEEDS + block * 500
    SCHEDULES.sweep_modes(range(first, first + 500), MODES).require(TrainingResumed, ExpertsAdvanced)


def test_same_seed_same_story() -> None:
    stories = []
    for _ in range(2):
        cluster = SCHEDULES.run(SAME_SEED, mode="offloaded")
        assert len(cluster.struck) > 5
        stories.append(b"\n".join(map(msgspec.json.encode, cluster.journal)))
    assert stories[0] == stories[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "offloaded"])
def test_no_finished_round_is_lost(mode: str) -> None:
    """The gateway is killed before every few of its operations on the disk: between no two of them a round is lost."""
    training, deaths = small_mixture(rounds=ROUNDS, **MODES[mode]), 0
    for operation in range(0, 800, 41):
        cluster = MixtureCluster(operation, training, NODES)
        cluster.disk.dies_after = operation
        assert cluster.run(LIMIT_S)
        SCHEDULES.check(cluster)
        deaths += "kill_gateway_writing" in cluster.struck
    assert deaths > 15


def test_gateway_killed_between_its_first_records_goes_on() -> None:
    cluster = MixtureCluster(0, small_mixture(rounds=1, inner_steps=2), 2)
    events = cluster.run_folder / EVENTS
    assert cluster.advance(lambda: has_begun(cluster), LIMIT_S)
    cluster.process.kill()
    events.write_bytes(events.read_bytes().splitlines(keepends=True)[0])
    assert list(map(type, cluster.journal)) == [TrainingStarted]
    assert cluster.run(LIMIT_S)
    assert list(map(type, cluster.journal[:3])) == [TrainingStarted, MixtureStarted, TrainingResumed]
    check_ended(cluster, 1)


def test_shard_has_one_composer_an_epoch_after_a_power_cut() -> None:
    cluster = MixtureCluster(0, small_mixture(rounds=ROUNDS), NODES)
    assert cluster.advance(
        lambda: has_begun(cluster) and all(shard.epoch for shard in cluster.controller.state.shards), LIMIT_S
    )
    before = [record for record in cluster.journal if isinstance(record, ShardGranted)]
    cluster.disk.cut_power(cluster.process)
    assert [record for record in cluster.journal if isinstance(record, ShardGranted)] == before
    assert cluster.run(LIMIT_S)
    SCHEDULES.check(cluster)


@pytest.mark.slow
def test_a_composer_that_hangs_with_its_last_state_is_restarted() -> None:
    cluster = MixtureCluster(0, small_mixture(rounds=2), NODES)

    def last_state_is_due() -> bool:
        if not has_begun(cluster):
            return False
        cluster.controller.board.times = TaskTimes(5.0, 100.0, apart=False)
        return sum(cluster.controller.syncing.steps()) >= cluster.controller.policy.plan.most_steps - 1

    assert cluster.advance(last_state_is_due, LIMIT_S)
    for node in cluster.nodes:
        node.health.is_hung = True
    assert cluster.run(LIMIT_S)
    lost = [record.reason for record in cluster.journal if isinstance(record, WorkerLost)]
    assert any(reason.startswith("it did not send the last state of its shard for") for reason in lost)
    check_ended(cluster, 2)


@pytest.mark.parametrize("pace", ["free", "lockstep"])
def test_a_composer_that_is_let_go_ends_no_run(pace: str) -> None:
    """At a free pace another takes its shard at once; in lock step it stays as long as the others need it."""
    cluster = MixtureCluster(0, small_mixture(rounds=2, pace=pace), NODES if pace == "free" else 2)

    def composes() -> bool:
        return has_begun(cluster) and bool(cluster.controller.composing)

    assert cluster.advance(composes, LIMIT_S)
    assert cluster.gateway is not None
    first = next(iter(cluster.controller.composing))
    name = cluster.controller.desk.workers[first].worker
    cluster.gateway.let_go(name, "the operator needs it", "drained")
    assert cluster.run(LIMIT_S)
    check_ended(cluster, 2)
    left = [(one.worker, one.kind) for one in cluster.journal if isinstance(one, WorkerLeft)]
    assert left[:1] == ([(name, "drained")] if pace == "free" else [])
    assert not [one for one in cluster.journal if isinstance(one, WorkerLost)]


def test_last_model_is_assembled_again_after_a_full_disk() -> None:
    cluster = MixtureCluster(0, small_mixture(rounds=2), 2, [Fault(0.0, "full_disk"), Fault(0.0, "full_disk")])
    assert cluster.run(LIMIT_S)
    failed = [record for record in cluster.journal if isinstance(record, CheckpointFailed)]
    assert [record.round for record in failed] == [2, 2]
    check_ended(cluster, 2)


def has_begun(cluster: MixtureCluster) -> bool:
    """Whether there is a gateway whose journal is begun."""
    return cluster.gateway is not None and cluster.gateway.controller is not None


def check_ended(cluster: MixtureCluster, rounds: int) -> None:
    """The run has ended well, after so many rounds."""
    assert cluster.finished is not None
    assert cluster.finished.ok
    assert sorted(cluster.metrics) == list(range(1, rounds + 1))
    assert cluster.metrics[rounds].eval_loss is not None
