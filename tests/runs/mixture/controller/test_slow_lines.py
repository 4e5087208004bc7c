"""Composers on slow lines: queues stay short, none is restarted as stuck, and the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixture_checks import check_steps, check_streams, of_kind
from mixture_stage import MixtureStage, Worker, make_plan
from msgspec.structs import replace

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import Stalled
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.records import ShardGranted, ShardKept, SurrogatesRefreshed


def waiting(worker: Worker, *kinds: type[m.Message]) -> int:
    return worker.waiting(*kinds)


@pytest.mark.slow
def test_slow_line_carries_one_state_and_one_set_of_surrogates(tmp_path: Path) -> None:
    """A composer on a slow line has one state and one set of surrogates on its way."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=48), seed=31)
    cluster.controller.policy = replace(cluster.policy, stuck_after_s=6.0)  # less than a state is under way
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 2)
    a.slow(up_s=10.0)
    most = 0

    def look() -> bool:
        nonlocal most
        assert waiting(a, mm.SaveShard) <= 1
        assert waiting(a, mm.PublishSurrogates) <= 1
        assert waiting(a, mm.ViewModel) <= 1
        assert waiting(a, mm.PublishFragment) <= len(cluster.controller.state.fragments)
        most = max(most, waiting(a, mm.SaveShard, mm.PublishSurrogates, mm.PublishFragment))
        return cluster.finished is not None

    cluster.until(look)
    assert most >= 3  # it was slow
    assert cluster.finish().ok
    check_steps(cluster)
    check_streams(cluster)
    assert sorted(grant.worker for grant in of_kind(cluster, ShardGranted)) == ["a", "b"]
    shard = a.machine.shard
    kept = [record.step for record in of_kind(cluster, ShardKept) if record.shard == shard]
    others = [record.step for record in of_kind(cluster, ShardKept) if record.shard != shard]
    assert len(others) > 2 * len(kept) > 2
    assert kept == sorted(kept)
    assert b.machine.done + a.machine.done >= 96
    told = [record.why for record in of_kind(cluster, Stalled)]
    assert f"all steps are taken; waiting for the last state of shard {shard} (a)" in told
    refreshed = [record.step for record in of_kind(cluster, SurrogatesRefreshed) if record.shard == shard]
    assert 0 < len(refreshed) < 24


@pytest.mark.slow
def test_composer_receiving_its_state_slowly_is_not_restarted(tmp_path: Path) -> None:
    """A composer that gets its state on a slow line is not restarted meanwhile."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=120), seed=32)
    cluster.start("a")
    b = cluster.start("b")
    cluster.until(lambda: b.machine.done >= 4)
    cluster.kill(b)
    cluster.controller.policy = replace(cluster.policy, stuck_after_s=6.0)
    b = cluster.start("b")
    b.slow(down_s=20.0)
    began = cluster.now
    cluster.until(lambda: b.machine.composes)
    # Longer than it may take no step.
    assert cluster.now - began > 6.0
    b.slow()
    assert cluster.finish().ok
    granted = [grant.worker for grant in of_kind(cluster, ShardGranted)]
    assert (sorted(granted[:2]), granted[2:]) == (["a", "b"], ["b"])
    check_steps(cluster)
    check_streams(cluster)


def test_idle_composer_with_its_state_is_restarted(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24), seed=33)
    cluster.start("a")
    b = cluster.start("b")
    b.hang()  # as one that hangs
    cluster.controller.policy = replace(cluster.policy, stuck_after_s=6.0)
    cluster.until(lambda: cluster.controller.membership.banned or len(of_kind(cluster, ShardGranted)) >= 3)
    again = of_kind(cluster, ShardGranted)[2]
    assert (again.worker, again.shard) == next(
        (grant.worker, grant.shard) for grant in of_kind(cluster, ShardGranted) if grant.worker == "b"
    )


@pytest.mark.slow
def test_slow_line_gets_the_newest_state_and_no_queue(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=60, delta_rank=1)
    cluster = MixtureStage(tmp_path, plan, seed=34)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: b.machine.composes and a.machine.done >= 2)
    b.slow(down_s=8.0)
    subjects = len(cluster.controller.state.fragments) + 1
    most = 0

    def look() -> bool:
        nonlocal most
        waits = sum(isinstance(s, mm.FragmentMerged | mm.SurrogatesReady) for s in b.untold)
        most = max(most, waits)
        assert waits <= subjects
        return cluster.finished is not None

    cluster.until(look)
    assert most >= 2  # it was slow
    assert cluster.finish().ok
    check_steps(cluster)
    check_streams(cluster)
    made = [record.step for record in of_kind(cluster, SurrogatesRefreshed) if record.shard == a.machine.shard]
    held = b.machine.versions[a.machine.shard]
    assert held in made
    assert made.index(held) > len(made) // 2  # it had not all of them, but those that it has are new


@pytest.mark.slow
def test_slow_composer_offers_a_sketch_when_the_last_has_left(tmp_path: Path) -> None:
    """A composer on a slow line offers a sketch of a layer when the last has left."""
    plan = make_plan(tmp_path, steps=60, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=35)
    a, _, _ = (cluster.start(name) for name in ("a", "b", "w"))
    cluster.until(lambda: a.machine.done >= 2)
    a.slow(up_s=10.0)

    def look() -> bool:
        assert waiting(a, mm.OfferSketches) <= plan.model.n_layer
        return cluster.finished is not None

    cluster.until(look)
    assert cluster.finish().ok
    check_streams(cluster)
    updates = [sum(line.own.updates.values()) for line in cluster.lines if line.own]
    assert sum(updates) > 0


def test_round_views_are_kept_until_the_slowest_state_is_saved(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=8), seed=36)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 2)
    a.slow(up_s=100.0)
    ended = cluster.now
    cluster.until(lambda: cluster.controller.stalls.why != "")
    cluster.until(lambda: cluster.now > ended + 80.0 or cluster.finished is not None)
    assert cluster.finished is None
    a.slow()
    assert cluster.finish().ok
    last = cluster.lines[-1].own
    assert all(shard.mixed_loss is not None for shard in last.shards)
    assert last.routing_overlap is not None
