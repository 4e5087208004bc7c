"""Whole runs of reinforcement learning in their production shells under random faults, and workers that lie."""

from __future__ import annotations

import msgspec
import pytest
from policy_cluster import PolicyCluster
from policy_schedules import LIMIT_S, MODES, NODES, ROUNDS, SCHEDULES
from small_policy import small_policy

from planetary.fleet.protocol.records import WorkerBanned, WorkerLost
from planetary.runs.rl.records import GroupDropped, GroupSampled, GroupsLearned, HeldOutJudged, RolloutsRefused
from planetary.runs.rounds.records import (
    CheckpointFailed,
    CheckpointWritten,
    RoundFinished,
    RoundStarted,
    RunPaused,
    TrainingResumed,
)
from planetary.simulation.faults import Fault
from planetary.simulation.lies import ROLLOUT_LIES, RolloutLie
from random_schedules import SLOW_SEEDS, SOAK_SEEDS

LIAR = "node-1/0"
REASONS = {
    "logprobs": "log-probability was sent as",
    "copied_rollouts": "not drawn with the seed",
    "other_weights": "log-probability was sent as",
}


def test_random_fault_schedules() -> None:
    seen = SCHEDULES.sweep_modes(range(len(MODES)), MODES)
    assert all(seen.records[kind] for kind in (TrainingResumed, WorkerLost, GroupSampled, GroupsLearned, HeldOutJudged))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1))
def test_more_random_fault_schedules(block: int) -> None:
    first = SLOW_SEEDS + block * 60
    SCHEDULES.sweep_modes(range(first, first + 40), MODES).require(TrainingResumed, WorkerLost, GroupDropped)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(6))
def test_three_thousand_random_fault_schedules(block: int) -> None:
    first = SOAK_SEEDS + block * 500
    SCHEDULES.sweep_modes(range(first, first + 500), MODES).require(TrainingResumed, WorkerLost, GroupDropped)


@pytest.mark.slow
def test_no_checkpoint_is_lost_wherever_the_gateway_dies() -> None:
    """The gateway is killed before every few of its operations on the disk."""
    deaths = 0
    for operation in range(0, 240, 17):
        cluster = PolicyCluster(operation, small_policy(rounds=ROUNDS), NODES)
        cluster.disk.dies_after = operation
        assert cluster.run(LIMIT_S)
        SCHEDULES.check(cluster)
        deaths += "kill_gateway_writing" in cluster.struck
    assert deaths > 8


def test_one_seed_tells_one_story() -> None:
    stories = []
    for _ in range(2):
        cluster = SCHEDULES.run(3, mode="apart")
        assert len(cluster.struck) > 2
        stories.append(b"\n".join(map(msgspec.json.encode, cluster.journal)))
    assert stories[0] == stories[1]


def test_a_calm_run_loses_no_worker_and_no_text() -> None:
    cluster = PolicyCluster(0, small_policy(rounds=2 * ROUNDS, verified=1.0, objective="dapo"), NODES)
    assert cluster.run(LIMIT_S)
    SCHEDULES.check(cluster)
    assert not [one for one in cluster.journal if isinstance(one, WorkerLost | RolloutsRefused)]
    rewards = [line.own.held_out_reward for line in cluster.metrics.values() if line.own]
    known = [reward for reward in rewards if reward is not None]
    assert known[-1] > known[0]


@pytest.mark.parametrize("mode", ["turns", "ahead", "apart"])
def test_run_pauses_when_the_next_checkpoint_fails_too(mode: str) -> None:
    """It begins no round as long as the disk is full, loses no version, and goes on by itself when there is room."""
    settings, roles = MODES[mode]
    nodes = max(NODES, len(roles))
    settings = {**settings, "checkpoint_every": 1}
    cluster = PolicyCluster(0, small_policy(rounds=ROUNDS, workers=nodes, **settings), nodes, roles=roles)
    stalls, begun, paused_s = set[str](), list[int](), 120.0

    def follow() -> None:
        gateway = cluster.gateway
        if gateway is None or gateway.controller is None or not cluster.disk.full:
            return
        if any("pauses until there is room" in note for note in gateway.notes):
            stalls.add(gateway.status().message)
            if not begun:
                begun.append(sum(isinstance(one, RoundStarted) for one in cluster.journal))
                cluster.world.after(paused_s, lambda: setattr(cluster.disk, "full", 0))

    cluster.disk.full = 10**9
    assert cluster.run(LIMIT_S, follow), cluster.waits_for
    SCHEDULES.check(cluster)
    journal = cluster.journal
    assert [one.round for one in journal if isinstance(one, CheckpointFailed)] == [1, 2]
    [paused] = [at for at, one in enumerate(journal) if isinstance(one, RunPaused)]
    [written, *_] = [at for at, one in enumerate(journal) if isinstance(one, CheckpointWritten)]
    assert journal[written].t > journal[paused].t + paused_s
    assert not [one for one in journal[paused:written] if isinstance(one, RoundStarted)]
    kept = [one.round for one in journal if isinstance(one, CheckpointWritten)]
    assert kept[0] == begun[0]  # the round that was under way is in it
    assert kept[-1] == ROUNDS
    assert any(text.startswith("the run waits until its checkpoint can be written: ") for text in stalls)
    assert cluster.gateway is not None
    assert f"checkpoints are written again, beginning with that of round {kept[0]}" in cluster.gateway.notes


@pytest.mark.parametrize("lie", ROLLOUT_LIES)
def test_a_worker_whose_texts_are_forged_is_found_and_banned(lie: RolloutLie) -> None:
    """Its messages are of the real protocol, and well formed. Others sample its groups; no forged text is trained."""
    plan = [Fault(at_s=0.0, kind="lie", worker=1, seconds=LIMIT_S, rollout_lie=lie)]
    cluster = PolicyCluster(0, small_policy(rounds=ROUNDS, verified=1.0, imitated=0), NODES, plan)
    assert cluster.run(LIMIT_S)
    SCHEDULES.check(cluster)
    refused = [one for one in cluster.journal if isinstance(one, RolloutsRefused)]
    assert {one.worker for one in refused} == {LIAR}
    assert REASONS[lie] in refused[0].reason
    assert [one.worker for one in cluster.journal if isinstance(one, WorkerBanned)] == [LIAR]
    sampled = [one for one in cluster.journal if isinstance(one, GroupSampled)]
    assert LIAR not in {one.worker for one in sampled}
    again = {group for one in refused for group in one.groups if not one.held_out}
    assert again
    assert again <= {one.group for one in sampled}


def test_banned_worker_stays_banned_after_a_resume() -> None:
    plan = [Fault(at_s=0.0, kind="lie", worker=1, seconds=LIMIT_S, rollout_lie="logprobs")]
    cluster = PolicyCluster(0, small_policy(rounds=ROUNDS, verified=1.0, imitated=0), NODES, plan)
    banned = []

    def kill_once() -> None:
        if not banned and any(isinstance(one, WorkerBanned) for one in cluster.journal[-30:]):
            banned.append(len(cluster.journal))
            assert cluster.kill_gateway()

    assert cluster.run(LIMIT_S, kill_once)
    SCHEDULES.check(cluster)
    after = cluster.journal[banned[0] :]
    assert any(isinstance(one, TrainingResumed) for one in after)
    assert [one for one in after if isinstance(one, RoundFinished)]
    assert LIAR not in {one.worker for one in after if isinstance(one, GroupSampled | GroupsLearned)}
