"""Every learning-rate schedule against optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

from planetary.core.errors import UserError
from planetary.core.schedules import Schedule


def _warm_then(after: Callable[[Any], Any], warmup: int, peak: float) -> Callable[[int], float]:
    """optax's own join of a linear rise, whose first step moves, with what comes after it."""
    rise = optax.schedules.linear_schedule(peak / warmup, peak, warmup - 1)
    return lambda i: float(optax.schedules.join_schedules([rise, after], [warmup])(i))


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({"kind": "constant"}, optax.schedules.constant_schedule(0.1)),
        ({"kind": "linear"}, optax.schedules.linear_schedule(0.1, 0.02, 16)),
        ({"kind": "cosine"}, optax.schedules.cosine_decay_schedule(0.1, 16, 0.2)),
        (
            {"kind": "wsd"},
            optax.schedules.join_schedules(
                [optax.schedules.constant_schedule(0.1), optax.schedules.linear_schedule(0.1, 0.02, 4)], [12]
            ),
        ),
        ({"kind": "inverse-sqrt"}, lambda i: 0.1 * np.sqrt(4 / (i + 5))),
    ],
    ids=["constant", "linear", "cosine", "wsd", "inverse-sqrt"],
)
def test_schedules_are_those_of_optax_after_a_warm_up(options: dict[str, Any], after: Callable[[Any], Any]) -> None:
    schedule = Schedule(peak=0.1, warmup_steps=4, total_steps=20, final_fraction=0.2, **options)
    expected = _warm_then(after, 4, 0.1)
    found = [schedule.rate(i) for i in range(24)]
    np.testing.assert_allclose(found, [expected(i) for i in range(24)], rtol=2e-6)
    assert found == [float(np.float32(rate)) for rate in found]  # what the step is given, to the bit


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    for kind in ("constant", "linear", "cosine", "wsd", "inverse-sqrt"):
        assert Schedule(kind=kind, peak=0.25).rate(0) == 0.25


def test_a_longer_run_stretches_what_follows_the_warm_up() -> None:
    short, long = (Schedule(peak=1.0, warmup_steps=2, total_steps=n) for n in (10, 100))
    assert [short.rate(i) for i in range(2)] == [long.rate(i) for i in range(2)] == [0.5, 1.0]
    assert short.rate(9) < 0.2
    assert long.rate(9) > 0.9
    assert short.rate(10) == short.rate(1000) == long.rate(100) == float(np.float32(0.1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"peak": 0.0}, "peak: expected a finite number > 0"),
        ({"peak": float("nan")}, "peak"),
        ({"final_fraction": 1.5}, "final_fraction"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"total_steps": 0}, "total_steps"),
        ({"warmup_steps": 10, "total_steps": 5}, "warmup_steps <= total_steps"),
        ({"kind": "wsd", "warmup_steps": 17, "total_steps": 20}, "warm-up and cool-down"),
    ],
)
def test_schedules_that_cannot_be_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Schedule(**wrong)
