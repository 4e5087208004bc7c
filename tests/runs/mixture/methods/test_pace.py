"""The pace of a mixture and the place of its experts' optimizer: each decision, without a run."""

from __future__ import annotations

import msgspec
import pytest
from moe_support import BASE

from planetary.core.errors import UserError
from planetary.runs.mixture.methods.pace import PACES, AnyPace
from planetary.runs.mixture.methods.sketch_pools import (
    OfferedSketch,
    OwnSketches,
    RecentSketches,
    SketchBatch,
    StepSketches,
)
from planetary.runs.mixture.methods.tiers import Cadence

FREE, LOCKSTEP = PACES["free"], PACES["lockstep"]


@pytest.mark.parametrize("name", PACES)
def test_a_pace_travels_as_its_name(name: str) -> None:
    data = msgspec.json.encode(PACES[name])
    assert msgspec.json.decode(data) == {"type": name}
    assert msgspec.json.decode(data, type=AnyPace) == PACES[name]


def test_only_lock_step_waits_for_the_first_missing() -> None:
    """Only lock step waits and asks no further than for the first missing."""

    def missing() -> object:
        yield "the merge"
        raise AssertionError("asked for more")

    assert LOCKSTEP.blocked_by(missing()) == "the merge"  # type: ignore[arg-type]
    assert LOCKSTEP.blocked_by(iter(())) == ""
    assert FREE.blocked_by(missing()) == ""  # type: ignore[arg-type]


def test_progress_is_the_mean_of_all_shards() -> None:
    assert FREE.run_steps(6, 4 + 3, 3) == 4
    assert FREE.run_steps(0, 9, 3) == 3  # of a composer without a shard
    assert LOCKSTEP.run_steps(6, 4 + 3, 3) == 6
    assert not FREE.may_finish(False)
    assert FREE.may_finish(True)
    assert LOCKSTEP.may_finish(False)


def test_merges_are_adopted_before_a_free_publication() -> None:
    assert FREE.exchange(lambda: ["adopt"], lambda: ["publish"]) == ["adopt", "publish"]
    assert LOCKSTEP.exchange(lambda: ["adopt"], lambda: ["publish"]) == ["publish", "adopt"]
    assert not any(FREE.fits_after_merges(replicas) for replicas in (1, 2))
    assert [LOCKSTEP.fits_after_merges(replicas) for replicas in (1, 2)] == [False, True]


def test_uploads_and_sketches_are_left_out_at_a_free_pace_only() -> None:
    assert [FREE.skips_upload(n) for n in (0, 1, 2)] == [False, True, True]
    assert not any(LOCKSTEP.skips_upload(n) for n in (0, 1, 2))
    assert [FREE.may_offer(room) for room in (True, False)] == [True, False]
    assert all(LOCKSTEP.may_offer(room) for room in (True, False))


def test_versions_and_surrogates_of_other_steps_fit_one_pace() -> None:
    assert (FREE.made_with(7, 3), LOCKSTEP.made_with(7, 3)) == (3, 7)
    assert not FREE.holds_back(fitted=9, done=8)
    assert LOCKSTEP.holds_back(fitted=9, done=8)
    assert not LOCKSTEP.holds_back(fitted=8, done=8)


def test_lock_step_cannot_go_on_without_a_composer() -> None:
    assert (FREE.quorum(4, 2), LOCKSTEP.quorum(4, 2)) == (2, 4)
    assert FREE.end_without_work("the experts of shard 1") == FREE.end_without_composer("n/0", "cut") == ""
    assert "improve the experts of shard 1 in any attempt" in LOCKSTEP.end_without_work("the experts of shard 1")
    assert "composer n/0 was lost (cut)" in LOCKSTEP.end_without_composer("n/0", "cut")
    FREE.check_resumable()
    with pytest.raises(UserError, match="cannot go on"):
        LOCKSTEP.check_resumable()
    FREE.check_cadence(Cadence(router=1))
    LOCKSTEP.check_cadence(Cadence(router=2, latent=2))
    with pytest.raises(UserError, match="router_every = 1 in lock step"):
        LOCKSTEP.check_cadence(Cadence(router=1))


def sketch(shard: int, step: int, *, version: int = 0, layer: int = 0) -> OfferedSketch:
    return OfferedSketch(shard, layer, step, step, version, f"{shard}@{step}/{layer}")


def test_a_sketch_alone_is_its_own_composers_work() -> None:
    assert OwnSketches().add(sketch(1, 5, version=3)) == [SketchBatch(1, 3, ("1@5/0",))]


def test_sketches_become_work_when_the_last_has_arrived() -> None:
    """Sketches of a step become work of all shards when the last has arrived."""
    pool = LOCKSTEP.pool(2, refresh=5)
    assert isinstance(pool, StepSketches)
    assert pool.add(sketch(1, 5, version=3)) == pool.add(sketch(0, 5, layer=1)) == pool.add(sketch(1, 6)) == []
    assert pool.add(sketch(0, 5, version=4)) == [
        SketchBatch(0, 4, ("0@5/0", "1@5/0")),
        SketchBatch(1, 3, ("0@5/0", "1@5/0")),
    ]
    assert pool.add(sketch(0, 5)) == []  # of a composer that went back


def test_free_pace_sketch_takes_the_newest_near_ones() -> None:
    """At a free pace a sketch takes the newest of the others that are near."""
    pool = FREE.pool(3, refresh=2)
    assert isinstance(pool, RecentSketches)
    pool.add(sketch(1, 1))
    assert pool.add(sketch(0, 3)) == [SketchBatch(0, 0, ("0@3/0", "1@1/0"))]
    assert pool.add(sketch(2, 5)) == [SketchBatch(2, 0, ("0@3/0", "2@5/0"))]
    assert pool.add(sketch(1, 5, layer=1)) == [SketchBatch(1, 0, ("1@5/1",))]


def test_experts_are_part_of_a_shard_where_their_optimizer_is() -> None:
    resident = BASE.expert_optimizer
    offloaded = msgspec.structs.replace(BASE, sketches="owner").expert_optimizer
    assert (resident.in_step, offloaded.in_step) == (True, False)
    assert (list(resident.streamed_layers(3)), list(offloaded.streamed_layers(3))) == ([], [0, 1, 2])
    assert (resident.in_shard({"experts": 1}), offloaded.in_shard({"experts": 1})) == ({"experts": 1}, {})
    assert set(resident.functions) < set(offloaded.functions)
