"""Thousands of fault schedules; what must hold is checked inside `sim_ring` after every event."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator

import pytest
from sim_ring import SimGroup, scenario


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """The collector would look through all that is loaded several times in a schedule: a third of the time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@rare_collections()
def run_many(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        if seed % 100 == 0:
            gc.collect()
        try:
            group = scenario(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen.update(group.story.struck)
        seen["succeeded"] += group.story.succeeded
        seen["small"] += group.story.small
        seen["aborted"] += group.story.aborted
        seen["restarts"] += group.story.restarts
        seen["finished"] += sum(peer.finished == "done" for peer in group.peers)
        if not group.story.struck:
            assert all(peer.finished == "done" for peer in group.peers)
    return seen


def run_on_two_cores(seeds: range) -> Counter[str]:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(run_many, [seeds[part : part + 250] for part in range(0, len(seeds), 250)], chunksize=1)
    return sum(found, Counter[str]())


@pytest.mark.processes
@pytest.mark.timeout(600)  # a quarter of a minute on idle cores
def test_five_thousand_fault_schedules() -> None:
    seen = run_on_two_cores(range(5000))
    assert min(seen[kind] for kind in ("kill", "freeze", "link", "join", "master")) > 200
    assert seen["aborted"] > 3000
    assert seen["succeeded"] > 50_000
    assert seen["small"] > 5000
    assert seen["restarts"] > 10
    assert seen["finished"] > 10_000


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_fifty_thousand_fault_schedules() -> None:
    seen = run_on_two_cores(range(10_000, 60_000))
    assert min(seen[kind] for kind in ("kill", "freeze", "link", "join", "master")) > 2000


def test_one_seed_tells_one_story() -> None:
    stories = [scenario(7) for _ in range(2)]
    assert stories[0].story.outcomes
    assert list(stories[0].story.outcomes.values()) == list(stories[1].story.outcomes.values())
    assert stories[0].world.now == stories[1].world.now


def test_a_restarted_master_costs_nobody_its_membership() -> None:
    for seed in range(8):
        group = SimGroup(seed, 4, restarts=True, min_world=4)
        assert group.world.run(lambda group=group, seed=seed: group.story.succeeded > seed, 120.0)
        group.strike("master")
        assert group.run(300.0)
        assert group.story.struck == ["master"]
        assert [peer.finished for peer in group.peers] == ["done"] * 4, seed
