"""Radial-directional averaging: exact where it has to be, and the same in the star, in the ring and in a mixture."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.tensors import TensorSpec
from planetary.sync.contributions import Contribution
from planetary.sync.merge import Mean, Radial
from planetary.sync.outer import initial_state, outer_step
from planetary.sync.outer_optimizers import AVERAGING, Nesterov, OuterState
from planetary.sync.radial import inner_products, radial_average, radial_coefficients
from planetary.sync.ring import HeldContribution, form_of, outer_step_of_sum, share

SPECS = (TensorSpec("h.w", "f32", (40, 900)), TensorSpec("wte", "f32", (30,)), TensorSpec("h.b", "bf16", (7,)))


def start() -> OuterState:
    random = np.random.default_rng(0)
    params: dict[str, np.ndarray] = {s.name: random.standard_normal(s.shape).astype(np.float32) for s in SPECS}
    params["h.b"] = (params["h.b"].view(np.uint32) >> 16).astype(np.uint16)
    return initial_state(SPECS, params)


def contribution(task: int, tokens: int = 10, steps: int = 1) -> Contribution:
    random, state = np.random.default_rng(task), start()
    ends = {}
    for spec in SPECS:
        values = state.params[spec.name] + np.float32(0.01 * task) * random.standard_normal(spec.shape).astype(
            np.float32
        )
        ends[spec.name] = values if spec.dtype == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    return Contribution(task, tokens, ends, steps)


def test_orthogonal_deltas_keep_their_length() -> None:
    """The mean of M orthogonal deltas of length R has length R / √M; RDA has R."""
    deltas = [3.0 * row for row in np.eye(4)]
    assert np.linalg.norm(np.mean(deltas, axis=0)) == pytest.approx(1.5)
    assert np.linalg.norm(radial_average(deltas, [1.0] * 4)) == pytest.approx(3.0)


def test_one_delta_has_coefficient_one() -> None:
    assert radial_coefficients(np.array([[0.3]]), [7.0]) == (1.0,)


def test_coefficients_of_parallel_deltas_give_their_mean() -> None:
    delta = np.arange(5.0)
    np.testing.assert_allclose(radial_average([delta, 3 * delta], [1.0, 1.0]), 2 * delta)


def test_inner_products_of_long_arrays_are_those_of_numpy() -> None:
    deltas = list(np.random.default_rng(3).standard_normal((3, 70_000)))
    np.testing.assert_allclose(inner_products(deltas), np.array(deltas) @ np.array(deltas).T)


def test_a_single_contribution_is_plain_training_bit_for_bit() -> None:
    """One worker at rate 1: with a bfloat16 and a plainly averaged tensor, in both topologies."""
    only = contribution(1)
    step = outer_step(SPECS, start(), [only], AVERAGING, rule=Radial()).state
    form = form_of("f32", 2, radial=True, contributions=1)
    summed = share(SPECS, [HeldContribution(only, start().params)], 10, form) + share(SPECS, [], 10, form)
    ring = outer_step_of_sum(SPECS, start(), (summed, form), AVERAGING).state
    for found in (step, ring):
        assert found.params["h.w"].tobytes() == only.tensors["h.w"].tobytes()
        assert (found.params["h.b"].view(np.uint32) >> 16).astype(np.uint16).tobytes() == only.tensors["h.b"].tobytes()


def test_the_star_and_the_ring_agree_to_rounding() -> None:
    parts = [contribution(1), contribution(2, 30), contribution(3)]
    star = outer_step(SPECS, start(), parts, Nesterov(0.7, 0.9), rule=Radial()).state
    form = form_of("f32", 3, radial=True, contributions=3)
    shares = [share(SPECS, [HeldContribution(part, start().params)], 50, form) for part in parts]
    ring = outer_step_of_sum(SPECS, start(), (shares[0] + shares[1] + shares[2], form), Nesterov(0.7, 0.9)).state
    for spec in SPECS:
        np.testing.assert_allclose(ring.velocity[spec.name], star.velocity[spec.name], rtol=1e-4, atol=1e-6)


def test_an_embedding_takes_the_mean() -> None:
    parts = [contribution(1), contribution(2)]
    radial = outer_step(SPECS, start(), parts, AVERAGING, rule=Radial())
    mean = outer_step(SPECS, start(), parts, AVERAGING, rule=Mean())
    np.testing.assert_allclose(radial.state.params["wte"], mean.state.params["wte"], rtol=1e-6)
    assert np.linalg.norm(radial.delta["h.w"]) > 1.1 * np.linalg.norm(mean.delta["h.w"])


def test_cancelling_directions_stay_finite_in_star_and_ring() -> None:
    """Directions that cancel take the mean in the star and stay finite in the ring."""
    spec, zero = (TensorSpec("w", "f32", (3,)),), {"w": np.zeros(3, np.float32)}
    ends = [Contribution(n, 1, {"w": np.array([sign, 0, 0], np.float32)}) for n, sign in ((1, 1.0), (2, -1.0))]
    state = initial_state(spec, zero)
    assert outer_step(spec, state, ends, AVERAGING, rule=Radial()).state.params["w"].tolist() == [0, 0, 0]
    form = form_of("f32", 2, radial=True, contributions=2)
    summed = share(spec, [HeldContribution(end, zero) for end in ends], 2, form)
    assert outer_step_of_sum(spec, state, (summed, form), AVERAGING).state.params["w"].tolist() == [0, 0, 0]


def test_squared_token_weights_favour_larger_batches() -> None:
    spec = (TensorSpec("w", "f32", (1,)),)
    state = OuterState({"w": np.zeros(1, np.float32)}, {"w": np.zeros(1, np.float32)})
    parts = [
        Contribution(1, 10, {"w": np.ones(1, np.float32)}, 10),
        Contribution(2, 20, {"w": -np.ones(1, np.float32)}, 10),
    ]
    by_tokens = outer_step(spec, state, parts, AVERAGING).state.params["w"][0]
    squared = outer_step(spec, state, parts, AVERAGING, weighting="tokens_squared").state.params["w"][0]
    assert by_tokens == pytest.approx((10 - 20) / 30)
    assert squared == pytest.approx((10 - 40) / 50)


def test_the_autocorrelation_is_that_of_two_merged_deltas() -> None:
    first = outer_step(SPECS, start(), [contribution(1)], Nesterov(0.7, 0.9))
    assert first.autocorrelation is None
    again = outer_step(SPECS, start(), [contribution(1)], Nesterov(0.7, 0.9), before=first.delta)
    other = outer_step(SPECS, start(), [contribution(2)], Nesterov(0.7, 0.9), before=first.delta)
    assert again.autocorrelation == pytest.approx(1.0, abs=1e-6)
    assert other.autocorrelation is not None
    assert abs(other.autocorrelation) < 0.05


def test_the_effective_rate_is_where_repeated_deltas_lead() -> None:
    """With ρ = 1 all deltas are equal, and Nesterov's step converges to η (1 + μ / (1 − μ)) of them."""
    spec = (TensorSpec("w", "f32", (1,)),)
    state = OuterState({"w": np.zeros(1, np.float32)}, {"w": np.zeros(1, np.float32)})
    moved = 0.0
    for task in range(200):
        before = float(state.params["w"][0])
        state = outer_step(spec, state, [Contribution(task, 1, {"w": state.params["w"] - 1})], Nesterov(0.7, 0.5)).state
        moved = before - float(state.params["w"][0])
    assert moved == pytest.approx(Nesterov(0.7, 0.5).effective_rate(1.0), rel=1e-3)
    assert Nesterov(0.7, 0.9).effective_rate(0.56) == pytest.approx(1.97, abs=0.01)
    assert AVERAGING.effective_rate(0.3) == 1.0
