from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from planetary.core.configuration.schema import OuterConfig
from planetary.core.errors import UserError
from planetary.core.extension_points import MERGE_RULES
from planetary.core.tensors import TensorSpec
from planetary.sync.contributions import Contribution
from planetary.sync.deltas import Table
from planetary.sync.merge import CentredClipping, Mean, Median, MergeRule, TrimmedMean, rule_of
from planetary.sync.outer import initial_state, outer_step
from planetary.sync.outer_optimizers import AVERAGING

RULES = [rule_of(MERGE_RULES.chosen(name, OuterConfig())) for name in MERGE_RULES.built_in]
vectors = hnp.arrays(np.float64, 5, elements=st.floats(-1e6, 1e6))


def merged(rule: MergeRule, deltas: list[np.ndarray], shares: list[float] | None = None) -> np.ndarray:
    """What a rule makes of deltas, which are end parameters where the start is zero."""
    gram = [[float(left @ right) for right in deltas] for left in deltas]
    table = Table(tuple(range(len(deltas))), tuple(map(tuple, gram)), 0.0, deltas[0].size)
    weights = rule.weights(lambda: table, shares or [1 / len(deltas)] * len(deltas))
    assert sum(weights) == pytest.approx(1.0)
    products = np.array(table.products)
    coefficients = rule.coefficients("w", lambda: products, weights)
    return rule.merge([delta.copy() for delta in deltas], coefficients, np.zeros_like(deltas[0]))


@given(only=vectors)
def test_every_rule_returns_a_single_contribution_bit_for_bit(only: np.ndarray) -> None:
    for rule in RULES:
        assert merged(rule, [only]).tobytes() == only.tobytes()


def test_the_mean_weights_by_tokens() -> None:
    found = merged(Mean(), [np.array([1.0, 2.0]), np.array([5.0, -2.0])], [0.75, 0.25])
    assert found.tolist() == [2.0, 1.0]


def test_the_median_is_that_of_each_coordinate() -> None:
    found = merged(Median(), [np.array([1.0, 9.0]), np.array([2.0, -8.0]), np.array([700.0, 3.0])])
    assert found.tolist() == [2.0, 3.0]


def test_trimmed_mean_leaves_out_extremes_by_coordinate() -> None:
    columns = np.array([[1.0, 50.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [-99.0, 4.0]])
    assert merged(TrimmedMean(0.2), list(columns)).tolist() == [2.0, 3.0]
    assert merged(TrimmedMean(0.0), list(columns)).tolist() == pytest.approx([-17.8, 12.0])
    assert merged(TrimmedMean(0.4), list(columns)).tolist() == [2.0, 3.0]


def test_a_trimmed_mean_of_half_or_more_is_refused() -> None:
    with pytest.raises(UserError, match=r"less than 0\.5"):
        TrimmedMean(0.5)


def test_centred_clipping_is_the_mean_of_deltas_that_are_alike() -> None:
    """Deltas at the same distance from their mean are all at the radius, or within it."""
    deltas = list(10 + np.eye(6))
    np.testing.assert_allclose(merged(CentredClipping(), deltas), np.mean(deltas, axis=0), atol=0.05)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), CentredClipping()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("factor", [-1.0, -10.0, 1e6, 1e30])
def test_three_liars_of_ten_are_bounded_by_honest_spread(rule: MergeRule, factor: float) -> None:
    """Three liars of ten move a robust rule by no more than the honest differ."""
    random = np.random.default_rng(1)
    honest = [1 + 0.5 * random.standard_normal(200) for _ in range(7)]
    truth, spread = np.mean(honest, axis=0), float(np.median([np.linalg.norm(d - 1) for d in honest]))
    lies = [factor * np.ones(200)] * 3
    moved = float(np.linalg.norm(merged(rule, [*lies, *honest]) - truth))
    assert moved < 1.5 * spread
    assert float(np.linalg.norm(merged(Mean(), [*lies, *honest]) - truth)) > min(moved, 2 * spread)


def test_an_outer_step_takes_the_rule_that_it_is_given() -> None:
    spec = (TensorSpec("x", "f32", (2,)),)
    state = initial_state(spec, {"x": np.zeros(2, np.float32)})
    parts = [
        Contribution(task, 10, {"x": np.array(end, np.float32)})
        for task, end in enumerate([[1, 1], [2, 3], [1e6, 1e6]])
    ]
    assert outer_step(spec, state, parts, AVERAGING, rule=Median()).state.params["x"].tolist() == [2.0, 3.0]
    for rule in RULES[2:]:
        again = outer_step(spec, state, parts[::-1], AVERAGING, rule=rule)
        assert (
            again.state.params["x"].tobytes()
            == outer_step(spec, state, parts, AVERAGING, rule=rule).state.params["x"].tobytes()
        )  # the order of arrival does not matter
