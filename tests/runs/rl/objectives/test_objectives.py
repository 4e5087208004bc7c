"""Advantages and weights as the papers write them."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.runs.rl.objectives.objective import (
    IMITATION,
    OBJECTIVES,
    advantages_of,
    per_longest,
    per_rollout,
    per_token,
)
from planetary.runs.rl.objectives.staleness import TAPERED
from planetary.runs.rl.objectives.terms import NEVER, TERMS, LossTerms

REWARDS = np.array([1.0, 0.0, 0.5, 0.5])


def test_only_grpo_and_dapo_divide_by_the_deviation() -> None:
    centred = REWARDS - 0.5
    for name in ("importance", "dr-grpo"):
        assert np.array_equal(advantages_of(OBJECTIVES[name], REWARDS), centred)
    for name in ("grpo", "dapo", "topr"):
        found = advantages_of(OBJECTIVES[name], REWARDS)
        assert found == pytest.approx(centred / np.sqrt(np.mean(centred**2)), rel=1e-5)


def test_equal_rewards_have_no_advantage() -> None:
    for name in OBJECTIVES:
        assert not advantages_of(OBJECTIVES[name], np.full(4, 0.25)).any()


def test_a_completion_without_a_reward_moves_no_other_advantage() -> None:
    found = advantages_of(OBJECTIVES["importance"], np.array([1.0, np.nan, 0.0]))
    assert found.tolist() == [0.5, 0.0, -0.5]
    assert not advantages_of(OBJECTIVES["grpo"], np.array([np.nan, np.nan])).any()


def test_weights_sum_to_one_as_each_objective_counts() -> None:
    lengths = np.array([4, 1, 3])
    assert per_token(lengths, 10).tolist() == [0.125] * 3
    assert (per_rollout(lengths, 10) * lengths).tolist() == pytest.approx([1 / 3] * 3)
    assert per_longest(lengths, 10).tolist() == pytest.approx([1 / 30] * 3)


def test_a_coefficient_of_zero_is_the_objectives_own() -> None:
    found = OBJECTIVES["dapo"].with_terms(clip_low=0.1, clip_high=0.0, reference=0.04).terms
    assert found == LossTerms(surrogate=1.0, clip_low=0.1, clip_high=0.28, reference=0.04)


def test_topr_is_dapo_but_for_old_tokens() -> None:
    topr, dapo = OBJECTIVES["topr"], OBJECTIVES["dapo"]
    assert (topr.terms, topr.equal, topr.weights) == (dapo.terms, dapo.equal, dapo.weights)
    assert topr.with_terms(clip_low=0.1).staleness is TAPERED
    assert dapo.staleness is None


def test_terms_are_a_row_in_their_own_order() -> None:
    row = LossTerms(surrogate=1.0, likelihood=2.0, drift=3.0).row()
    assert row.dtype == np.float32
    assert row.tolist() == [1.0, 2.0, NEVER, NEVER, NEVER, 3.0, 0.0]
    assert len(row) == TERMS
    assert IMITATION.terms.row()[:2].tolist() == [0.0, 1.0]
