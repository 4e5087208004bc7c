"""The weights of tokens that older versions have drawn."""

from __future__ import annotations

import numpy as np

from planetary.runs.rl.objectives.staleness import TAPERED, StalenessBounds

EVERY = np.array([2.0, 2.0, -2.0, -2.0, 0.0], np.float32)
RATIO = np.array([4.0, 0.25, 4.0, 0.25, 0.25])


def weighed(bounds: StalenessBounds, ratio: np.ndarray = RATIO) -> list[float]:
    sampled = np.full(5, -1.0, np.float32)
    return bounds.weigh(EVERY, (sampled + np.log(ratio)).astype(np.float32), sampled).round(6).tolist()


def test_tapered_weights_are_one_above_zero_and_bounded_below() -> None:
    assert weighed(TAPERED) == [2.0, 2.0, -2.0, -0.5, 0.0]


def test_each_sign_has_bounds_of_its_own() -> None:
    assert weighed(StalenessBounds(0.5, 3.0, 0.0, 2.0)) == [6.0, 1.0, -4.0, -0.5, 0.0]


def test_without_a_lag_nothing_changes() -> None:
    assert weighed(TAPERED, np.ones(5)) == EVERY.tolist()


def test_a_ratio_beyond_float32_is_bounded() -> None:
    found = TAPERED.weigh(EVERY, np.zeros(5, np.float32), np.full(5, -1000.0, np.float32))
    assert found.tolist() == EVERY.tolist()
    assert found.dtype == np.float32
