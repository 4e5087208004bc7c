"""The rules and modes of synchronisation under random fault schedules; `fault_schedules.check` says what must hold."""

from __future__ import annotations

import pytest
from fault_schedules import SLOW_SEEDS, run_schedule, sweep

from planetary.fabric.protocol.records import RoundFinished, RunResumed

RADIAL = ("outer.merge=rda", "sync.precision=f32")


@pytest.mark.parametrize("ring", [False, True], ids=["star", "ring"])
def test_radial_averaging_survives_random_faults(ring: bool) -> None:
    assert sweep(range(4000, 4006), ring=ring, given=RADIAL).records[RunResumed] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True], ids=["star", "ring"])
def test_radial_averaging_survives_more_random_faults(ring: bool) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 60), ring=ring, given=RADIAL).records[RunResumed] > 0


def test_the_merged_delta_is_measured_in_every_round_of_the_star() -> None:
    cluster = run_schedule(4000)
    ends = [r.merged for r in cluster.journal if isinstance(r, RoundFinished)]
    assert all(merged is not None and merged.radial_ratio is not None for merged in ends)
    assert any(merged.autocorrelation is not None and merged.effective_rate is not None for merged in ends if merged)
    assert all(merged.radial_ratio <= 1 + 1e-9 for merged in ends if merged is not None and merged.radial_ratio)
