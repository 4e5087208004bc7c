"""The ring topology under random fault schedules, in simulated time."""

from __future__ import annotations

import collections

import msgspec
import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, run_schedule

from planetary.fabric.protocol.records import (
    DeltaWithdrawn,
    DigestsDiffered,
    ReduceRetried,
    RolledBack,
    RunResumed,
)
from planetary.simulation.cluster import SimCluster, policy
from planetary.simulation.faults import KINDS, Fault
from planetary.simulation.small_training import encode_story

SCHEDULES = 200


@pytest.mark.parametrize("block", range(4))
def test_random_fault_schedules(block: int) -> None:
    struck: collections.Counter[str] = collections.Counter()
    seen: collections.Counter[type] = collections.Counter()
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        cluster = run_schedule(seed, ring=True)
        check(cluster, seed)
        struck.update(cluster.struck)
        seen.update(type(record) for record in cluster.disk.journal)
    for kind in KINDS:
        assert struck[kind] > 0, f"no schedule of this block had a {kind} that hit anything"
    assert seen[DeltaWithdrawn] > 0
    assert seen[ReduceRetried] > 0


def test_rare_checkpoints() -> None:
    """The gateway gets the parameters rarely: newcomers and rolled back runs find those of a worker, or older ones."""
    seen: collections.Counter[type] = collections.Counter()
    for seed in range(2000, 2060):
        cluster = run_schedule(seed, checkpoint_every=3, ring=True)
        check(cluster, seed)
        seen.update(type(record) for record in cluster.disk.journal)
    assert seen[RunResumed] > 0


def test_same_seed_same_story() -> None:
    for seed in (3, 17, 91):
        first, second = run_schedule(seed, ring=True), run_schedule(seed, ring=True)
        assert encode_story(first.disk.journal) == encode_story(second.disk.journal)


def test_a_calm_run_reduces_once_a_round_in_one_group() -> None:
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS, ring=True), WORKERS)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    assert not [r for r in cluster.disk.journal if isinstance(r, DeltaWithdrawn | ReduceRetried | DigestsDiffered)]
    assert cluster.gateway is not None
    ring = cluster.gateway.controller.topology
    assert ring is not None
    assert (ring._attempts, ring._groups) == (ROUNDS, 1)


def test_a_round_that_is_neither_kept_nor_evaluated_is_followed_by_the_next() -> None:
    limits = policy(rounds=ROUNDS, workers=WORKERS, checkpoint_every=ROUNDS, ring=True)
    cluster = SimCluster(0, msgspec.structs.replace(limits, held_out=()), WORKERS)
    assert cluster.run(30.0)  # nothing else happens that would wake anybody


def test_everybody_lost_between_checkpoints_goes_back_to_what_the_gateway_has() -> None:
    plan = [Fault(at_s=at, kind="kill_worker", worker=w, seconds=0.0) for at in (8.0, 8.001) for w in range(WORKERS)]
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS, checkpoint_every=3, ring=True), WORKERS, plan)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    back = [r for r in cluster.disk.journal if isinstance(r, RolledBack)]
    assert len(back) == 1
    assert back[0].mark.round in (0, 3)


def test_another_outer_state_than_everybodys_is_named_and_replaced() -> None:
    plan = [Fault(at_s=8.0, kind="flip_bit", worker=1, seconds=0.0)]
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS, ring=True), WORKERS, plan)
    assert cluster.run(LIMIT_S)
    check(cluster, 0)
    differed = [r for r in cluster.disk.journal if isinstance(r, DigestsDiffered)]
    assert [r.workers for r in differed] == [("node-1/0",)]
