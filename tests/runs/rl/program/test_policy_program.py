"""The training step of a policy: one formula, exact values of it, and gradients against `jax.grad`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_model import DECODE, LENGTH, PARAMS, ROWS, SPECS, VOCABULARY, program

from planetary.core.tensors import Tensors
from planetary.models.initial import flat_names
from planetary.runs.rl.objectives.terms import LossTerms
from planetary.runs.rl.program.program import loss_of, policy_loss, token_logprobs
from planetary.runs.rl.program.shape import LOGPROBS, SCORE, TOKENS, TRAIN
from planetary.runtime.device_program import DeviceProgram, open_on_xla

ALL = LossTerms(surrogate=1.0, likelihood=0.3, clip_low=0.2, clip_high=0.28, mask_gap=0.02, drift=0.05, reference=0.04)
TERMS = {
    "importance": LossTerms(surrogate=1.0, mask_gap=0.02, drift=1e-3),
    "clipped": LossTerms(surrogate=1.0, clip_low=0.2, clip_high=0.28),
    "imitation": LossTerms(likelihood=1.0),
    "all terms": ALL,
}


def data(terms: LossTerms, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    weights = np.where(rng.random(shape) < 0.6, 1 / 17, 0).astype(np.float32)
    return {
        "tokens": rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32),
        "weights": weights,
        "advantages": rng.normal(size=shape).astype(np.float32),
        "sampled": (np.log(1 / VOCABULARY) + 0.4 * rng.normal(size=shape)).astype(np.float32),
        "reference": (np.log(1 / VOCABULARY) + 0.4 * rng.normal(size=shape)).astype(np.float32),
        "terms": np.tile(terms.row(), (ROWS, 1)),
    }


def in_numpy(logprobs: np.ndarray, given: Tensors, terms: LossTerms) -> float:
    """The loss token by token, as the module writes it."""
    total = 0.0
    for place in np.ndindex(ROWS, LENGTH):
        weight, a, mu = given["weights"][place], given["advantages"][place], given["sampled"][place]
        if not weight:
            continue
        log_pi = float(logprobs[place])
        ratio = np.exp(log_pi - mu)
        surrogate = min(ratio * a, np.clip(ratio, 1 - terms.clip_low, 1 + terms.clip_high) * a)
        if np.sign(a) * (np.exp(log_pi) - np.exp(mu)) > terms.mask_gap:
            surrogate = 0.0
        away = given["reference"][place] - log_pi
        total += weight * (
            -terms.surrogate * surrogate
            - terms.likelihood * a * log_pi
            + terms.drift * (log_pi - mu) ** 2
            + terms.reference * (np.exp(away) - away - 1)
        )
    return total


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_the_loss_is_the_sum_of_its_terms_over_own_tokens(terms: LossTerms) -> None:
    given = data(terms)
    logprobs = np.asarray(token_logprobs(DECODE, PARAMS, given["tokens"])[0], np.float64)
    found = policy_loss(jnp.asarray(logprobs, jnp.float32), *(given[name] for name in list(given)[1:]))
    assert float(found) == pytest.approx(in_numpy(logprobs, given, terms), rel=1e-4)


@pytest.mark.slow
def test_every_bound_is_met_by_some_token() -> None:
    given = data(ALL)
    logprobs = np.asarray(token_logprobs(DECODE, PARAMS, given["tokens"])[0])
    ratio, own = np.exp(logprobs - given["sampled"]), given["weights"] > 0
    moved = np.sign(given["advantages"]) * (np.exp(logprobs) - np.exp(given["sampled"]))
    for met in (ratio < 1 - ALL.clip_low, ratio > 1 + ALL.clip_high, moved > ALL.mask_gap):
        assert 0 < np.count_nonzero(met & own) < np.count_nonzero(own)


def gradient_of_step(given: Tensors, micro_batches: int = 1) -> tuple[float, dict[str, np.ndarray]]:
    """A step of plain gradient descent of rate 1 moves parameters by their gradient."""
    _, state = program(micro_batches)
    values = {name: np.asarray(value, np.float32) for name, value in flat_names(PARAMS).items()}
    extra = {"step": np.array(0, np.int32), "rate": np.array(1.0, np.float32), **{s.name: s.zeros() for s in state}}
    found = runner(micro_batches)(TRAIN, {**values, **extra, **given})
    return float(found["loss"]), {spec.name: values[spec.name] - found[spec.name] for spec in SPECS}


@functools.cache
def runner(micro_batches: int) -> DeviceProgram:
    return open_on_xla(program(micro_batches)[0], optimise=False)


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_the_compiled_step_has_jax_s_gradient(terms: LossTerms) -> None:
    given = data(terms, seed=1)
    loss, found = gradient_of_step(given)
    expected_loss, expected = jax.value_and_grad(loss_of(DECODE))(PARAMS, *given.values())
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    for name, value in flat_names(expected).items():
        assert np.abs(found[name] - value).max() <= 1e-5 * max(1.0, float(np.abs(value).max())), name


@pytest.mark.slow
def test_imitation_has_the_gradient_of_the_mean_cross_entropy() -> None:
    given = data(LossTerms(likelihood=1.0), seed=2)
    given["advantages"] = np.ones_like(given["advantages"])

    def cross_entropy(params: object) -> jax.Array:
        logprobs, _ = token_logprobs(DECODE, params, given["tokens"])
        return -jnp.sum(jnp.where(given["weights"] > 0, logprobs, 0)) / 17

    expected = flat_names(jax.grad(cross_entropy)(PARAMS))
    _, found = gradient_of_step(given)
    assert all(np.abs(found[name] - value).max() < 1e-5 for name, value in expected.items())


@pytest.mark.slow
def test_on_policy_the_surrogate_is_the_policy_gradient_exactly() -> None:
    """With ρ = 1 every objective's surrogate has the gradient of -A log π."""
    given = data(LossTerms(surrogate=1.0, clip_low=0.2, clip_high=0.2), seed=3)
    given["sampled"] = np.asarray(token_logprobs(DECODE, PARAMS, given["tokens"])[0])
    _, clipped = gradient_of_step(given)
    given["terms"] = np.tile(LossTerms(likelihood=1.0).row(), (ROWS, 1))
    _, plain = gradient_of_step(given)
    assert all(np.abs(clipped[name] - plain[name]).max() < 1e-6 for name in plain)


@pytest.mark.slow
def test_micro_batches_change_nothing_but_rounding() -> None:
    given = data(ALL, seed=4)
    loss, whole = gradient_of_step(given)
    parts_loss, parts = gradient_of_step({**given, "weights": given["weights"] * 2}, micro_batches=2)
    assert parts_loss == pytest.approx(loss, rel=1e-5)
    assert all(np.abs(whole[name] - parts[name]).max() < 1e-5 for name in whole)


@pytest.mark.slow
def test_score_returns_log_probabilities() -> None:
    given = data(ALL)
    values = {name: np.asarray(value, np.float32) for name, value in flat_names(PARAMS).items()}
    found = runner(1)(SCORE, {**values, TOKENS: given["tokens"]})
    assert np.allclose(found[LOGPROBS], token_logprobs(DECODE, PARAMS, given["tokens"])[0], atol=1e-5)
