"""The ring topology, also with overlap, under random fault schedules, in simulated time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, part_two, run_schedule, sweep
from small_training import encode_story, small_training

from planetary.fleet.protocol.records import WorkerLost
from planetary.runs.rounds.controller.ring import Ring
from planetary.runs.rounds.records import (
    DeltaWithdrawn,
    DigestsDiffered,
    ReduceRetried,
    RolledBack,
    RoundClosed,
    RoundsResumed,
    TopologyReplaced,
)
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from random_schedules import SLOW_SEEDS, SOAK_SEEDS

# "overlap": of a ring, too
WAYS: dict[str, dict[str, Any]] = {"ring": {"ring": True}, "overlap": {"overlap": True}}
QUANTISED = ("sync.ring_compression=int8", "sync.precision=f32")  # without it sums this small go through the master


def blocks(**counts: int) -> pytest.MarkDecorator:
    """Return the parameters of a sweep in so many blocks."""
    return pytest.mark.parametrize(
        ("way", "block"), [(way, block) for way, count in counts.items() for block in range(count)]
    )


@pytest.mark.parametrize(
    ("seeds", "kinds"),
    [(range(7, 14), False), pytest.param([*range(7), *range(14, 80)], True, marks=pytest.mark.slow)],
    ids=["some", "rest"],
)
@pytest.mark.parametrize("way", ["ring", pytest.param("overlap", marks=pytest.mark.slow)])
def test_random_fault_schedules(way: str, seeds: Iterable[int], kinds: bool) -> None:
    sweep(seeds, **WAYS[way]).require(DeltaWithdrawn, ReduceRetried, kinds=kinds)


@pytest.mark.slow
@blocks(ring=1, overlap=2)
def test_more_random_fault_schedules(way: str, block: int) -> None:
    first = SLOW_SEEDS + block * 80
    sweep(range(first, first + 80), **WAYS[way]).require(DeltaWithdrawn, ReduceRetried)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@blocks(ring=6, overlap=4)
def test_thousands_of_random_fault_schedules(way: str, block: int) -> None:
    first = SOAK_SEEDS + block * 500
    sweep(range(first, first + 500), **WAYS[way]).require(DeltaWithdrawn, ReduceRetried)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_rare_checkpoints(way: str) -> None:
    """The gateway gets the parameters rarely: newcomers and rolled back runs find those of a worker, or older ones.

    With overlap the next reduction waits for a newcomer's state.
    """
    assert sweep(range(2000, 2020), checkpoint_every=3, **WAYS[way]).records[RoundsResumed] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_more_runs_with_rare_checkpoints(way: str) -> None:
    seeds = range(SLOW_SEEDS, SLOW_SEEDS + 60)
    assert sweep(seeds, checkpoint_every=3, **WAYS[way]).records[RoundsResumed] > 20


@pytest.mark.parametrize("seed", [3, pytest.param(17, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["ring", pytest.param("overlap", marks=pytest.mark.slow)])
def test_same_seed_same_story(way: str, seed: int) -> None:
    first, second = run_schedule(seed, **WAYS[way]), run_schedule(seed, **WAYS[way])
    assert encode_story(first.journal) == encode_story(second.journal)


def test_a_calm_run_reduces_once_a_round_in_one_group() -> None:
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS, ring=True), WORKERS)
    assert cluster.run(LIMIT_S)
    check(cluster)
    assert not [r for r in cluster.journal if isinstance(r, DeltaWithdrawn | ReduceRetried | DigestsDiffered)]
    assert cluster.gateway is not None
    ring = cluster.controller.topology
    assert isinstance(ring, Ring)
    assert (ring.attempts, ring.groups) == (ROUNDS, 1)


def test_unkept_unevaluated_round_is_followed_by_the_next() -> None:
    """A round that is neither kept nor evaluated is followed by the next."""
    training = small_training(rounds=ROUNDS, workers=WORKERS, checkpoint_every=ROUNDS, eval_every=2 * ROUNDS, ring=True)
    cluster = SimCluster(0, training, WORKERS)
    assert cluster.run(30.0)  # nothing else happens that would wake anybody


def test_loss_of_everyone_goes_back_to_the_gateways_state() -> None:
    """Everybody lost between checkpoints goes back to what the gateway has."""
    plan = [Fault(at_s=at, kind="kill_worker", worker=w, seconds=0.0) for at in (8.0, 8.001) for w in range(WORKERS)]
    cluster = SimCluster(
        0, small_training(rounds=ROUNDS, workers=WORKERS, checkpoint_every=3, ring=True), WORKERS, plan
    )
    assert cluster.run(LIMIT_S)
    check(cluster)
    back = [r for r in cluster.journal if isinstance(r, RolledBack)]
    assert len(back) == 1
    assert back[0].mark.round in (0, 3)


def test_differing_outer_state_is_named_and_replaced() -> None:
    plan = [Fault(at_s=8.0, kind="flip_bit", worker=1, seconds=0.0)]
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS, ring=True), WORKERS, plan)
    assert cluster.run(LIMIT_S)
    check(cluster)
    differed = [r for r in cluster.journal if isinstance(r, DigestsDiffered)]
    assert [r.workers for r in differed] == [("node-1/0",)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_report_before_its_result_is_not_reduced(way: str) -> None:
    """A forging worker reported a lease while it trained it: the journal had a result that the ring did not add."""
    cluster = run_schedule(3000, checkpoint_every=4, one_epoch=True, forger=True, **WAYS[way])
    lost = [record.reason for record in cluster.journal if isinstance(record, WorkerLost)]
    assert [reason for reason in lost if "a false report: it has no result of task" in reason], lost


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_workers_that_do_not_reach_each_other_go_on_in_a_star(way: str) -> None:
    """As behind a router that translates addresses. The third worker reaches both; no round is lost."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS, given=QUANTISED, **WAYS[way]), WORKERS)
    part_two(cluster)
    assert cluster.run(LIMIT_S)
    check(cluster)
    (replaced,) = [record for record in cluster.journal if isinstance(record, TopologyReplaced)]
    assert replaced.round == 0
    assert "8 times in a row" in replaced.why
    assert {record.peers for record in cluster.journal if isinstance(record, RoundClosed)} == {0}
    assert cluster.gateway is not None
    assert any("goes on in a star" in note for note in cluster.gateway.status().notes)


@pytest.mark.slow
def test_broken_ring_goes_on_as_a_star_from_its_newest_round() -> None:
    """The gateway has no checkpoint of that round, and gets it from a worker."""
    training = small_training(rounds=8, workers=WORKERS, checkpoint_every=8, ring=True, given=QUANTISED)
    cluster = SimCluster(0, training, WORKERS)
    network = cluster.world.network

    def part() -> None:
        if not network.is_cut("node-0", "node-1") and cluster.gateway is not None and len(cluster.gateway.metrics) == 3:
            part_two(cluster)

    assert cluster.run(LIMIT_S, part)
    check(cluster)
    (replaced,) = [record for record in cluster.journal if isinstance(record, TopologyReplaced)]
    (back,) = [record for record in cluster.journal if isinstance(record, RolledBack)]
    assert 3 <= replaced.round == back.mark.round < 8
    assert {r.round: r.peers for r in cluster.journal if isinstance(r, RoundClosed)}[replaced.round] == WORKERS


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(2), range(2, 16)], ids=["first", "rest"])
@pytest.mark.parametrize("way", ["ring", "overlap"])
def test_rings_that_cannot_be_closed_survive_random_faults(way: str, seeds: range) -> None:
    assert sweep(seeds, checkpoint_every=3, apart=True, given=QUANTISED, **WAYS[way]).records[TopologyReplaced] >= len(
        seeds
    )
