"""A hub and its sites under random schedules of faults: every job ends once, and no two live sites have it."""

from __future__ import annotations

import collections

import pytest
from placement_schedules import run_schedule


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (3, 6))])
def test_no_job_is_lost_or_doubled_whatever_fails(first: int) -> None:
    struck, attempts, states = collections.Counter[str](), 0, collections.Counter[str]()
    for seed in range(first, first + 3):
        world = run_schedule(seed)
        struck.update(world.struck)
        assert world.hub is not None
        attempts = max(attempts, *(job.attempts for job in world.hub.book.jobs.values()))
        states.update(job.state.value for job in world.hub.book.jobs.values())
    assert sum(struck[kind] for kind in ("kill_hub", "die_hub", "power_hub", "tear_hub")) > 0
    assert sum(struck[kind] for kind in ("kill_site", "die_site", "power_site", "tear_site")) > 0
    assert struck["mute"] + struck["deafen"] + struck["cut_off"] > 0
    assert attempts > 1  # a job was placed elsewhere
    assert states["finished"] > 5
