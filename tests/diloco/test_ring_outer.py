"""What the workers compute together in the ring, against the gateway's outer step."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import NumericsError
from planetary.core.tensors import TensorSpec
from planetary.diloco.mean import Contribution
from planetary.diloco.outer import OuterState, initial_state, outer_step
from planetary.diloco.ring import (
    Precision,
    check_state,
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


def reduced(own: list[list[Contribution]], precision: Precision) -> OuterState:
    """What every one of `len(own)` workers gets."""
    state, form = before(), form_of(precision, len(own))
    tokens = sum(part.tokens for parts in own for part in parts)
    summed = share(SPECS, state, own[0], tokens, form)
    for parts in own[1:]:
        summed = summed + share(SPECS, state, parts, tokens, form)
    return outer_step_of_sum(SPECS, state, (summed, form), RATE, MOMENTUM).state


def assert_same_bits(found: OuterState, expected: OuterState) -> None:
    for spec in SPECS:
        np.testing.assert_array_equal(found.params[spec.name], expected.params[spec.name], err_msg=spec.name)
        np.testing.assert_array_equal(found.velocity[spec.name], expected.velocity[spec.name], err_msg=spec.name)


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_alone_it_is_the_gateways_step(precision: Precision) -> None:
    parts = ends(2)
    assert_same_bits(reduced([parts[::-1]], precision), outer_step(SPECS, before(), parts, RATE, MOMENTUM).state)


def test_two_workers_get_the_gateways_bits_in_either_order() -> None:
    first, second = ends(2)
    expected = outer_step(SPECS, before(), [first, second], RATE, MOMENTUM).state
    assert_same_bits(reduced([[first], [second]], "f64"), expected)
    assert_same_bits(reduced([[second], [first]], "f64"), expected)


def test_float32_deltas_round_once_per_worker() -> None:
    parts = ends(3)
    expected = outer_step(SPECS, before(), parts, RATE, MOMENTUM).state
    found = reduced([[parts[0]], [], [parts[1], parts[2]]], "f32")
    for spec in SPECS:
        moved = np.abs(expected.params[spec.name] - before().params[spec.name]).max()
        assert moved > 0
        error = np.abs(found.params[spec.name].astype(np.float64) - expected.params[spec.name]).max()
        assert error <= 4e-7 * np.abs(expected.params[spec.name]).max()


def test_who_contributes_nothing_adds_zero() -> None:
    assert form_of("f32", 2) == "delta"
    nothing = share(SPECS, before(), [], 100, "delta")
    assert nothing.dtype == np.float32
    assert nothing.shape == (15000 + 7 + 1,)
    assert not nothing.any()


def test_a_result_that_is_not_finite_names_the_tensor() -> None:
    summed = np.zeros(15008, np.float32)
    summed[15003] = np.inf
    with pytest.raises(NumericsError, match="'b'"):
        outer_step_of_sum(SPECS, before(), (summed, "delta"), RATE, MOMENTUM)


def test_an_outer_state_travels_and_is_checked() -> None:
    state = before()
    digest = state_digest(SPECS, state)
    travelled = {spec.name: state_tensors(state)[spec.name].copy() for spec in state_specs(SPECS)}
    assert check_state(SPECS, travelled, digest) == ""
    assert_same_bits(state_of(SPECS, travelled), state)
    travelled["velocity:b"][3] += 1
    assert "digest" in check_state(SPECS, travelled, digest)
    travelled["velocity:b"] = travelled["velocity:b"].astype(np.float64)
    assert "velocity:b" in check_state(SPECS, travelled, digest)
    del travelled["a"]
    assert "found 5" in check_state(SPECS, travelled, digest)
