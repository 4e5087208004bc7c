"""What the workers compute together in the ring, against the gateway's outer step."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from planetary.core.errors import NumericsError
from planetary.core.tensors import TensorSpec
from planetary.sync.contributions import Contribution
from planetary.sync.outer import initial_state, outer_step
from planetary.sync.outer_optimizers import Adam, Nesterov, OuterOptimizer, OuterState
from planetary.sync.ring import (
    HeldContribution,
    Precision,
    check_state,
    eager_start,
    form_of,
    outer_step_of_sum,
    share,
    state_digest,
    state_of,
    state_specs,
    state_tensors,
)

SPECS = (TensorSpec("a", "f32", (3, 5000)), TensorSpec("b", "bf16", (7,)), TensorSpec("c", "f16", ()))
RATE, MOMENTUM = 0.7, 0.9
NESTEROV, ADAM = Nesterov(RATE, MOMENTUM), Adam(0.1)


def tensors(seed: int, near: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)
    found = {}
    for spec in SPECS:
        values = source.standard_normal(spec.shape).astype(np.float32) * np.float32(0.01 if near else 1)
        if spec.dtype == "bf16":
            found[spec.name] = ((values + 1).view(np.uint32) >> 16).astype(np.uint16)
        else:
            start = near[spec.name].astype(np.float32) if near else np.float32(0)
            found[spec.name] = np.asarray(start + values, np.float32 if spec.dtype == "f32" else np.float16)
    return found


def before() -> OuterState:
    state = initial_state(SPECS, tensors(0))
    velocity = {name: array * np.float32(0.125) for name, array in state.params.items()}
    return OuterState(state.params, velocity)


def ends(count: int) -> list[Contribution]:
    return [Contribution(task, 100 * task, tensors(task, tensors(0))) for task in range(1, count + 1)]


def before_of(optimizer: OuterOptimizer) -> OuterState:
    moments = {s.name: np.full(s.shape, 3.0, np.float32) for s in optimizer.moment_specs(SPECS)}
    return replace(before(), moments=moments)


def reduced(own: list[list[Contribution]], precision: Precision, optimizer: OuterOptimizer = NESTEROV) -> OuterState:
    """What every one of `len(own)` workers gets."""
    state, form = before_of(optimizer), form_of(precision, len(own))
    tokens = sum(part.tokens for parts in own for part in parts)
    summed = None
    for parts in own:
        piece = share(SPECS, [HeldContribution(part, state.params) for part in parts], tokens, form)
        summed = piece if summed is None else summed + piece
    assert summed is not None
    return outer_step_of_sum(SPECS, state, (summed, form), optimizer).state


def assert_same_bits(found: OuterState, expected: OuterState) -> None:
    for spec in SPECS:
        np.testing.assert_array_equal(found.params[spec.name], expected.params[spec.name], err_msg=spec.name)
        np.testing.assert_array_equal(found.velocity[spec.name], expected.velocity[spec.name], err_msg=spec.name)
    assert found.moments.keys() == expected.moments.keys()
    for name, values in expected.moments.items():
        np.testing.assert_array_equal(found.moments[name], values, err_msg=name)


@pytest.mark.parametrize("optimizer", [NESTEROV, ADAM])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_alone_it_is_the_gateways_step(precision: Precision, optimizer: OuterOptimizer) -> None:
    parts = ends(2)
    expected = outer_step(SPECS, before_of(optimizer), parts, optimizer).state
    assert_same_bits(reduced([parts[::-1]], precision, optimizer), expected)


@pytest.mark.parametrize("optimizer", [NESTEROV, ADAM])
def test_two_workers_get_the_gateways_bits_in_either_order(optimizer: OuterOptimizer) -> None:
    first, second = ends(2)
    expected = outer_step(SPECS, before_of(optimizer), [first, second], optimizer).state
    assert_same_bits(reduced([[first], [second]], "f64", optimizer), expected)
    assert_same_bits(reduced([[second], [first]], "f64", optimizer), expected)


def test_float32_deltas_round_once_per_worker() -> None:
    parts = ends(3)
    expected = outer_step(SPECS, before(), parts, NESTEROV).state
    found = reduced([[parts[0]], [], [parts[1], parts[2]]], "f32")
    for spec in SPECS:
        moved = np.abs(expected.params[spec.name] - before().params[spec.name]).max()
        assert moved > 0
        error = np.abs(found.params[spec.name].astype(np.float64) - expected.params[spec.name]).max()
        assert error <= 4e-7 * np.abs(expected.params[spec.name]).max()


def test_who_contributes_nothing_adds_zero() -> None:
    assert form_of("f32", 2) == "delta"
    nothing = share(SPECS, [], 100, "delta")
    assert nothing.dtype == np.float32
    assert nothing.shape == (15000 + 7 + 1,)
    assert not nothing.any()


def test_a_result_that_is_not_finite_names_the_tensor() -> None:
    summed = np.zeros(15008, np.float32)
    summed[15003] = np.inf
    with pytest.raises(NumericsError, match="'b'"):
        outer_step_of_sum(SPECS, before(), (summed, "delta"), NESTEROV)


def test_an_outer_state_travels_and_is_checked() -> None:
    state = before()
    digest = state_digest(SPECS, state)
    travelled = {spec.name: state_tensors(state)[spec.name].copy() for spec in state_specs(SPECS, NESTEROV)}
    assert check_state(SPECS, travelled, digest, NESTEROV) == ""
    assert_same_bits(state_of(SPECS, travelled), state)
    travelled["velocity:b"][3] += 1
    assert "digest" in check_state(SPECS, travelled, digest, NESTEROV)
    travelled["velocity:b"] = travelled["velocity:b"].astype(np.float64)
    assert "velocity:b" in check_state(SPECS, travelled, digest, NESTEROV)
    del travelled["a"]
    assert "found 5" in check_state(SPECS, travelled, digest, NESTEROV)


def test_moments_travel_and_are_checked() -> None:
    state = before_of(ADAM)
    digest, travelled = state_digest(SPECS, state), state_tensors(state)
    assert {spec.name for spec in state_specs(SPECS, ADAM)} == travelled.keys()
    assert check_state(SPECS, travelled, digest, ADAM) == ""
    assert_same_bits(state_of(SPECS, travelled), state)
    other = {**travelled, "steps:b": travelled["steps:b"] + 1}
    assert "digest" in check_state(SPECS, other, digest, ADAM)
    assert "expected 6 tensors of an outer state, found 12" in check_state(SPECS, travelled, digest, NESTEROV)
    assert "expected 12 tensors of an outer state, found 6" in check_state(SPECS, state_tensors(before()), digest, ADAM)


@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_the_delayed_step_is_that_of_the_plain_loop(momentum: float) -> None:
    """One-step-delayed DiLoCo over five rounds and two workers, against a loop that is written down plainly."""
    specs = (TensorSpec("w", "f32", (3, 700)),)

    def trained(start: np.ndarray, round_: int, worker: int) -> np.ndarray:
        goal = np.random.default_rng((round_, worker)).standard_normal(start.shape).astype(np.float32)
        return (start - np.float32(0.3) * (start - goal)).astype(np.float32)

    first = np.random.default_rng(0).standard_normal((3, 700)).astype(np.float32)
    tokens = (100, 300)

    # The plain loop: round r starts from what is there while the result of round r - 1 is on its way.
    theta, velocity = [first], np.zeros_like(first)
    for round_ in range(1, 6):
        start = theta[max(0, round_ - 2)]
        total = np.zeros_like(first)
        for worker in (0, 1):
            delta = start.astype(np.float64) - trained(start, round_, worker)
            total += (delta * (tokens[worker] / sum(tokens))).astype(np.float32)
        step = total.astype(np.float64)
        velocity = (step + momentum * velocity.astype(np.float64) if momentum else step).astype(np.float32)
        newest = theta[-1].astype(np.float64)
        after = RATE * (newest - total.astype(np.float64)) + (1.0 - RATE) * newest
        if momentum:
            after -= (RATE * momentum) * velocity.astype(np.float64)
        theta.append(after.astype(np.float32))

    # What the workers do: hold each result with what it was trained from, and step from the newest state.
    state = initial_state(specs, {"w": first})
    older = state.params
    form = form_of("f32", 1, overlap=True)
    assert form == "delta"
    for round_ in range(1, 6):
        ends = [Contribution(w + 1, tokens[w], {"w": trained(older["w"], round_, w)}) for w in (0, 1)]
        shares = [share(specs, [HeldContribution(end, older)], sum(tokens), form) for end in ends]
        older = state.params
        state = outer_step_of_sum(specs, state, (shares[0] + shares[1], form), Nesterov(RATE, momentum)).state
        np.testing.assert_array_equal(state.params["w"], theta[round_], err_msg=f"round {round_}")
    np.testing.assert_array_equal(state.velocity["w"], velocity)


def test_eager_start_is_the_telescoped_sum_of_updates() -> None:
    """Fed with Δ(t−1) + (Δₘ(t) − Δₘ(t−1)) / M, outer SGD leads where the shared parameters and the own part lead."""
    spec, random, workers, rate = (TensorSpec("w", "f32", (50,)),), np.random.default_rng(5), 4, 0.7
    shared = local = np.zeros(50)
    mean_before, own_before = np.zeros(50), np.zeros(50)
    for _ in range(6):
        deltas = random.standard_normal((workers, 50))
        local = local - rate * (mean_before + (deltas[0] - own_before) / workers)
        params = {"w": shared.astype(np.float32)}
        ends = {"w": (-deltas[0]).astype(np.float32)}
        held = HeldContribution(Contribution(1, 10, ends), {"w": np.zeros(50, np.float32)})
        np.testing.assert_allclose(eager_start(spec, params, [held], 40, rate)["w"], local, atol=1e-5)
        shared = shared - rate * deltas.mean(axis=0)
        mean_before, own_before = deltas.mean(axis=0), deltas[0]


def test_worker_without_contribution_begins_at_the_shared() -> None:
    state = before()
    found = eager_start(SPECS, state.params, [], 100, RATE)
    assert all(found[name].tobytes() == state.params[name].tobytes() for name in found)
