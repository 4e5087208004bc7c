"""Random fault schedules of whole simulated runs of reinforcement learning; see `random_schedules`."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from policy_cluster import PolicyCluster
from small_policy import small_policy

from planetary.core.configuration.schema import OuterConfig
from planetary.machine.journal import replay
from planetary.runs.rl.records import (
    GroupDropped,
    GroupSampled,
    GroupsLearned,
    ReinforcementState,
)
from planetary.runs.rounds.records import CheckpointWritten, TrainingResumed
from planetary.simulation.faults import KINDS, draw_plan
from random_schedules import Schedules, check_ended_well, forging, journal_of, surviving, untimed

ROUNDS, NODES = 7, 3
LIMIT_S = 2000.0
MOST_FAULTS = 10
ACTOR, LEARNER = ("actor",), ("learner",)
ADAM = OuterConfig(optimizer="adam", learning_rate=0.2)

MODES: Mapping[str, tuple[Mapping[str, Any], tuple[tuple[str, ...], ...]]] = {
    "turns": ({}, ()),
    "ahead": ({"ahead": 1, "imitated": 0}, ()),
    "apart": ({"ahead": 2, "checkpoint_every": 3, "objective": "topr"}, (ACTOR, LEARNER, ACTOR, LEARNER)),
    "verified": ({"verified": 1.0, "lag": 0}, ()),
    "several steps": ({"inner_steps": 2, "objective": "dapo", "outer": ADAM}, (ACTOR, LEARNER, LEARNER)),
    "compared": ({"kl": 0.05, "imitated": 5, "imitation_goal": 0.01}, ()),
    "taught": ({"objective": "distillation", "imitated": 0}, ()),
}
"""Settings of the run, and roles of its nodes, under which schedules run."""


@contextlib.contextmanager
def faulty_policy(seed: int, mode: str = "turns", *, forger: bool | None = None) -> Iterator[PolicyCluster]:
    """Make the run of a seed.

    `forger`: whether the last worker forges messages; None: in every fourth schedule.
    """
    settings, roles = MODES[mode]
    nodes = max(NODES, len(roles))
    plan = draw_plan(seed, workers=nodes, horizon_s=25.0, most=MOST_FAULTS)
    cluster = PolicyCluster(seed, small_policy(rounds=ROUNDS, workers=nodes, **settings), nodes, plan, roles=roles)
    forger = seed % 4 == 0 if forger is None else forger
    with forging(cluster, nodes - 1, punished=seed % 8 > 0) if forger else contextlib.nullcontext():
        yield cluster


def check_every_group_counts_once(cluster: PolicyCluster) -> None:
    """A group is trained once or dropped, within the lag, from the rewards that the journal has of it."""
    policy, history, imitated = cluster.controller.desk.policy, surviving(cluster.journal), imitated_rounds(cluster)
    learned = [record for record in history if isinstance(record, GroupsLearned)]
    trained = collections.Counter(group for record in learned for group in record.groups)
    assert max(trained.values()) == 1
    dropped = {record.group for record in history if isinstance(record, GroupDropped)}
    assert not dropped & set(trained)
    sampled = {record.group: record for record in history if isinstance(record, GroupSampled)}
    tokens = collections.Counter[int]()
    for record in learned:
        assert record.version == record.round - 1
        tokens[record.round] += record.tokens
        if record.round <= imitated:
            continue
        for group, version in zip(record.groups, record.sampled, strict=True):
            assert sampled[group].version == version
            assert 0 <= record.version - version <= policy.lag
            assert len(sampled[group].rewards) == policy.completions
    for number in range(1, policy.rounds + 1):
        mine = [record for record in learned if record.round == number]
        most = policy.groups * (policy.completions if number <= imitated else 1)
        assert 0 < sum(len(record.groups) for record in mine) <= most
    assert cluster.controller.desk.state.tokens_total == sum(tokens.values())


def check_no_kept_round_was_lost(cluster: PolicyCluster) -> None:
    """A resumed run begins at or after the newest checkpoint that the journal names."""
    kept = 0
    for record in cluster.journal:
        if isinstance(record, CheckpointWritten):
            kept = max(kept, record.round)
        if isinstance(record, TrainingResumed):
            assert record.mark.round >= kept, f"round {kept} was lost"


def check_the_journal_replays(cluster: PolicyCluster) -> None:
    """The journal folds to the live state, and gives the parameters of the run bit for bit: which texts of which
    version became which change.
    """
    live = cluster.controller.desk.state
    assert untimed(replay(cluster.journal, ReinforcementState())) == untimed(live)
    found = cluster.parameters.state.params["table"]
    np.testing.assert_array_equal(found, cluster.training.replay(cluster.journal)[live.round])


def check_each_round_has_its_metrics(cluster: PolicyCluster) -> None:
    """One line for each round, with the reward of its texts unless it trained on answers."""
    metrics, policy, imitated = cluster.metrics, cluster.controller.desk.policy, imitated_rounds(cluster)
    assert sorted(metrics) == list(range(1, policy.rounds + 1))
    for number, line in metrics.items():
        assert line.own is not None
        assert line.own.imitates == (number <= imitated) == (line.own.reward is None)
    last = metrics[policy.rounds].own
    assert last is not None
    judged = cluster.controller.desk.state.held_out[policy.rounds]
    assert (last.held_out_reward, last.held_out_sampled) == judged


def imitated_rounds(cluster: PolicyCluster) -> int:
    """The rounds at the start that trained on answers."""
    desk = cluster.controller.desk
    return desk.policy.imitated if desk.state.imitation_ended is None else desk.state.imitation_ended


SCHEDULES = Schedules(
    kind="policy",
    build=faulty_policy,
    faults=[kind for kind in KINDS if kind != "repeat_result"],
    invariants=(
        check_ended_well,
        check_every_group_counts_once,
        check_no_kept_round_was_lost,
        check_the_journal_replays,
        check_each_round_has_its_metrics,
    ),
    limit_s=LIMIT_S,
    journals=journal_of,
    options={"--mode": {"choices": MODES, "default": "turns"}},
)
