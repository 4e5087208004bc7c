"""A hub and its sites under random schedules of faults: every job ends once, and no two live sites have it."""

from __future__ import annotations

import pytest
from placement_schedules import SCHEDULES


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (3, 6))])
def test_no_job_is_lost_or_doubled_whatever_fails(first: int) -> None:
    found = SCHEDULES.sweep(range(first, first + 3))
    struck, seen = found.struck, found.seen
    assert sum(struck[kind] for kind in ("kill_hub", "die_hub", "power_hub", "tear_hub")) > 0
    assert sum(struck[kind] for kind in ("kill_site", "die_site", "power_site", "tear_site")) > 0
    assert struck["mute"] + struck["deafen"] + struck["cut_off"] > 0
    assert seen["placed again"] > 0
    assert seen["finished"] > 5
