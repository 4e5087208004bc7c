"""Statistics in an outer step: the mean by tokens, whatever is done to the parameters."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.configuration.schema import OuterConfig
from planetary.core.extension_points import MERGE_RULES
from planetary.core.tensors import TensorSpec
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.sync.contributions import Contribution
from planetary.sync.merge import rule_of
from planetary.sync.outer import initial_state, outer_step
from planetary.sync.outer_optimizers import Adam, Nesterov, OuterOptimizer
from planetary.sync.ring import (
    Form,
    HeldContribution,
    check_state,
    outer_step_of_sum,
    share,
    state_digest,
    state_tensors,
)

SPECS = (TensorSpec("w", "f32", (3, 5)), TensorSpec("mean", "f32", (4,)))
TRAINED = SPECS[:1]


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in SPECS}


ENDS = [Contribution(task, tokens, draw(task)) for task, tokens in ((1, 100), (2, 300))]


@pytest.mark.parametrize("optimizer", [Nesterov(0.7, 0.9), Adam(0.3, 0.9, 0.99, 1e-8)], ids=["nesterov", "adam"])
@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_statistics_are_the_mean_by_tokens(optimizer: OuterOptimizer, rule: str) -> None:
    state = initial_state(SPECS, draw(0), optimizer)
    merge = rule_of(MERGE_RULES.chosen(rule, OuterConfig(trimmed=0.0)))
    for _ in range(2):  # the second step has a velocity
        step = outer_step(SPECS, state, ENDS, optimizer, rule=merge, statistics=("mean",))
        alone = outer_step(TRAINED, state, ENDS, optimizer, rule=merge)
        means = [one.tensors["mean"].astype(np.float64) for one in ENDS]
        expected = 0.25 * means[0] + 0.75 * means[1]
        np.testing.assert_array_equal(step.state.params["mean"], expected.astype(np.float32))
        np.testing.assert_array_equal(step.state.params["w"], alone.state.params["w"])
        assert "mean" not in step.state.velocity  # stays as it was
        assert (step.delta_norm, set(step.delta)) == (alone.delta_norm, {"w"})
        state = state.updated(step.state)
        assert not state.velocity["mean"].any()


def test_few_liars_cannot_move_a_statistic() -> None:
    """A rule that is chosen against liars holds for statistics, too."""
    lie = Contribution(3, 100, {**draw(3), "mean": np.full(4, 1e30, np.float32)})
    for name in ("median", "trimmed_mean"):
        rule = rule_of(MERGE_RULES.chosen(name, OuterConfig(trimmed=0.34)))
        step = outer_step(
            SPECS, initial_state(SPECS, draw(0)), [*ENDS, lie], Nesterov(), rule=rule, statistics=("mean",)
        )
        assert np.abs(step.state.params["mean"]).max() < 10


@pytest.mark.parametrize("form", ["mean", "delta", "directions"])
def test_a_ring_gives_the_star_s_statistics(form: Form) -> None:
    optimizer = Adam(0.3, 0.9, 0.99, 1e-8)
    state = initial_state(SPECS, draw(0), optimizer)
    held = [HeldContribution(one, state.params) for one in ENDS]
    summed = sum(share(SPECS, [one], 400, form, ("mean",)) for one in held)
    step = outer_step_of_sum(SPECS, state, (np.asarray(summed), form), optimizer, ("mean",))
    rule = rule_of(MERGE_RULES.chosen("rda" if form == "directions" else "mean", OuterConfig(trimmed=0.0)))
    star = state.updated(outer_step(SPECS, state, ENDS, optimizer, rule=rule, statistics=("mean",)).state)
    for name in ("w", "mean"):
        np.testing.assert_allclose(step.state.params[name], star.params[name], rtol=1e-4, atol=1e-6)
    assert check_state(SPECS, state_tensors(step.state), state_digest(SPECS, step.state), optimizer) == ""
    assert not step.state.velocity["mean"].any()


def test_a_statistic_of_one_worker_is_its_own() -> None:
    state = initial_state(SPECS, draw(0), Nesterov(0.7, 0.9))
    step = outer_step(SPECS, state, ENDS[:1], Nesterov(0.7, 0.9), statistics=("mean",))
    np.testing.assert_array_equal(step.state.params["mean"], ENDS[0].tensors["mean"])


def test_statistics_are_not_judged() -> None:
    """A worker whose running variance grew a thousandfold has trained nothing wrong."""
    versions = ParameterVersions(SPECS, initial_state(SPECS, draw(0)), 0, statistics=("mean",))
    plain = ParameterVersions(TRAINED, initial_state(TRAINED, draw(0)), 0)
    ends = {**draw(1), "mean": np.full(4, 1e6, np.float32)}
    tables = [v.measure(1, [(1, v.attach(ends))]) for v in (versions, plain)]
    assert tables[0] == tables[1]
    step = versions.take_outer_step(1, [(1, 10, 1)], rule_of(MERGE_RULES.chosen(OuterConfig().merge, OuterConfig())))
    np.testing.assert_array_equal(versions.of_version(1)["mean"], ends["mean"])
    assert set(step.delta) == {"w"}
