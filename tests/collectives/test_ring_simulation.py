"""Thousands of fault schedules; what must hold is checked inside `sim_ring` after every event."""

from __future__ import annotations

from collections import Counter

import pytest
from sim_ring import SimGroup, scenario


def run_many(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            group = scenario(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen.update(group.story.struck)
        seen["succeeded"] += group.story.succeeded
        seen["aborted"] += group.story.aborted
        seen["finished"] += sum(peer.finished == "done" for peer in group.peers)
        if not group.story.struck:
            assert all(peer.finished == "done" for peer in group.peers)
    return seen


def test_hundreds_of_fault_schedules() -> None:
    seen = run_many(range(80))
    assert min(seen[kind] for kind in ("kill", "freeze", "link", "join", "master")) > 2
    assert seen["aborted"] > 50
    assert seen["succeeded"] > 1000
    assert seen["finished"] > 200


@pytest.mark.soak
@pytest.mark.timeout(1800)  # three minutes on idle cores
def test_five_thousand_fault_schedules() -> None:
    seen = run_many(range(1000, 6000))
    assert min(seen[kind] for kind in ("kill", "freeze", "link", "join", "master")) > 200


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
