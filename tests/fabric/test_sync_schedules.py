"""The rules and modes of synchronisation under random fault schedules; `fault_schedules.check` says what must hold."""

from __future__ import annotations

from typing import Any

import pytest
from fault_schedules import SLOW_SEEDS, run_schedule, sweep

from planetary.fabric.protocol.records import LeaseAssigned, RoundFinished, RunResumed

RADIAL = ("outer.merge=rda", "sync.precision=f32")


@pytest.mark.parametrize("ring", [False, True], ids=["star", "ring"])
def test_radial_averaging_survives_random_faults(ring: bool) -> None:
    assert sweep(range(4000, 4003), ring=ring, given=RADIAL).records[RoundFinished] >= 3 * 6


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True], ids=["star", "ring"])
def test_radial_averaging_survives_more_random_faults(ring: bool) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 25), ring=ring, given=RADIAL).records[RunResumed] > 0


def coded(up: str, down: str, merge: str = "mean") -> tuple[str, ...]:
    # With one of eight numbers a round, or eight of one size, Nesterov's velocity overshoots; SparseLoCo takes plain
    # steps of SGD.
    plain = ("outer.momentum=0",) if up in ("sparse", "sign") else ()
    return (f"sync.compression={up}", f"sync.broadcast_compression={down}", f"outer.merge={merge}", *plain)


@pytest.mark.parametrize("given", [coded("int4", "int8"), coded("sparse", "fp4", "senders")], ids="-".join)
def test_compressed_updates_survive_random_faults(given: tuple[str, ...]) -> None:
    assert sweep(range(4100, 4103), given=given).records[RoundFinished] >= 3 * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        coded("int4", "int4"),
        coded("sparse", "sparse", "senders"),
        coded("sign", "sign", "rda"),
        coded("bf16", "none"),
        coded("float32", "int8"),
    ],
    ids="-".join,
)
def test_compressed_updates_survive_more_random_faults(given: tuple[str, ...]) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 15), given=given).records[RunResumed] > 0


EAGER = ("sync.overlap=eager",)


def test_eager_overlap_survives_random_faults() -> None:
    assert sweep(range(4200, 4204), overlap=True, given=EAGER).records[RoundFinished] >= 4 * 6


@pytest.mark.slow
def test_eager_overlap_survives_more_random_faults() -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 25), overlap=True, given=EAGER).records[RunResumed] > 0


def test_eager_rounds_begin_with_the_workers_own_part_of_the_one_before() -> None:
    cluster = run_schedule(4203, overlap=True, given=EAGER)
    assigned = [r for r in cluster.journal if isinstance(r, LeaseAssigned)]
    ahead = [r for r in assigned if r.ahead]
    assert ahead
    owners = {r.task: r.worker for r in assigned}
    assert all(owners[task] == r.worker for r in ahead for task in r.ahead)


def test_the_merged_delta_is_measured_in_every_round_of_the_star() -> None:
    cluster = run_schedule(4000)
    ends = [r.merged for r in cluster.journal if isinstance(r, RoundFinished)]
    assert all(merged is not None and merged.radial_ratio is not None for merged in ends)
    assert any(merged.autocorrelation is not None and merged.effective_rate is not None for merged in ends if merged)
    assert all(merged.radial_ratio <= 1 + 1e-9 for merged in ends if merged is not None and merged.radial_ratio)


QUANTISED = ("sync.precision=f32", "outer.merge=mean", "sync.ring_compression=int8", "sync.ring_order=measured")


@pytest.mark.parametrize("more", [{}, {"overlap": True, "given": (*QUANTISED, *EAGER)}], ids=["ring", "eager"])
def test_a_measured_and_quantised_ring_survives_random_faults(more: dict[str, Any]) -> None:
    seen = sweep(range(4400, 4402), **{"ring": True, "given": QUANTISED, **more})
    assert seen.records[RoundFinished] >= 2 * 6
