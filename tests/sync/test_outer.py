from __future__ import annotations

from fractions import Fraction

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.quantisers import to_bfloat16
from planetary.core.tensors import TensorSpec
from planetary.sync import contributions as blocks_module
from planetary.sync.contributions import Contribution, check_contribution
from planetary.sync.outer import initial_state, outer_step, published_params
from planetary.sync.outer_optimizers import AVERAGING, Adam, Nesterov, OuterState

SPECS = (TensorSpec("w", "f32", (3, 5)), TensorSpec("b", "f32", (7,)))


def draw(seed: int, specs: tuple[TensorSpec, ...] = SPECS, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {s.name: (scale * rng.standard_normal(s.shape)).astype(np.float32) for s in specs}


def same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(left[k].tobytes() == right[k].tobytes() for k in left)


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


def mean_of(contributions: list[Contribution]) -> dict[str, np.ndarray]:
    """The mean by tokens of `VECTOR`, folded in task order in float64."""
    tokens = sum(one.tokens for one in contributions)
    terms = [one.tensors["x"].astype(np.float64) * (one.tokens / tokens) for one in contributions]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return {"x": total.astype(np.float32)}


vectors = hnp.arrays(np.float32, 6, elements=finite32)
VECTOR = (TensorSpec("x", "f32", (6,)),)


@given(start=vectors, velocity=vectors, end=vectors)
def test_lone_worker_at_rate_one_ends_where_it_ended(start: np.ndarray, velocity: np.ndarray, end: np.ndarray) -> None:
    """One worker at rate one without momentum ends bit for bit where it ended."""
    state = OuterState({"x": start}, {"x": velocity})
    step = outer_step(VECTOR, state, [Contribution(7, 123, {"x": end})], AVERAGING)
    assert step.state.params["x"].tobytes() == end.tobytes()


@given(start=vectors, ends=st.lists(st.tuples(vectors, st.integers(1, 10**9)), min_size=1, max_size=4))
def test_rate_one_without_momentum_is_the_mean_bit_for_bit(
    start: np.ndarray, ends: list[tuple[np.ndarray, int]]
) -> None:
    contributions = [Contribution(n, tokens, {"x": end}) for n, (end, tokens) in enumerate(ends)]
    step = outer_step(VECTOR, OuterState({"x": start}, {"x": np.zeros_like(start)}), contributions, AVERAGING)
    assert same_bits(step.state.params, mean_of(contributions))


@given(end=vectors, tokens=st.lists(st.integers(1, 10**12), min_size=1, max_size=9))
def test_the_mean_of_equal_parameters_is_these_parameters(end: np.ndarray, tokens: list[int]) -> None:
    contributions = [Contribution(n, count, {"x": end}) for n, count in enumerate(tokens)]
    np.testing.assert_array_equal(mean_of(contributions)["x"], end)


@given(
    ends=st.lists(st.tuples(vectors, st.integers(1, 10**9)), min_size=2, max_size=5),
    shuffled=st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_does_not_change_a_bit(ends: list[tuple[np.ndarray, int]], shuffled) -> None:
    contributions = [Contribution(n, tokens, {"x": end}) for n, (end, tokens) in enumerate(ends)]
    state = OuterState({"x": ends[0][0]}, {"x": ends[1][0]})
    before = outer_step(VECTOR, state, contributions, Nesterov(0.7, 0.9))
    shuffled.shuffle(contributions)
    after = outer_step(VECTOR, state, contributions, Nesterov(0.7, 0.9))
    assert same_bits(before.state.params, after.state.params)
    assert same_bits(before.state.velocity, after.state.velocity)


def exact(value: float) -> Fraction:
    return Fraction(float(value))


@settings(max_examples=50)
@given(
    start=vectors,
    velocity=vectors,
    ends=st.lists(st.tuples(vectors, st.integers(1, 99)), min_size=1, max_size=3),
)
def test_the_result_is_the_exact_formula_rounded_once(
    start: np.ndarray, velocity: np.ndarray, ends: list[tuple[np.ndarray, int]]
) -> None:
    rate, momentum = 0.7, 0.9
    contributions = [Contribution(n, tokens, {"x": end}) for n, (end, tokens) in enumerate(ends)]
    step = outer_step(VECTOR, OuterState({"x": start}, {"x": velocity}), contributions, Nesterov(rate, momentum))
    total = sum(tokens for _, tokens in ends)
    for i in range(start.size):
        mean = sum(exact(end[i]) * tokens for end, tokens in ends) / total
        delta = exact(start[i]) - mean
        new = exact(momentum) * exact(velocity[i]) + delta
        got_v, got_x = step.state.velocity["x"][i], step.state.params["x"][i]
        size = max(abs(float(start[i])), abs(float(velocity[i])), *(abs(float(end[i])) for end, _ in ends))
        slack = Fraction(size) * Fraction(1, 2**48)  # of the float64 arithmetic
        half_ulp = Fraction(float(np.spacing(np.abs(got_v)))) / 2
        assert abs(exact(got_v) - new) <= half_ulp + slack
        end_exact = exact(start[i]) - exact(rate) * (delta + exact(momentum) * exact(got_v))
        half_ulp = Fraction(float(np.spacing(np.abs(got_x)))) / 2
        assert abs(exact(got_x) - end_exact) <= half_ulp + slack


def test_it_is_nesterov_as_optax_knows_it() -> None:
    specs = (TensorSpec("x", "f32", (50,)),)
    state = initial_state(specs, draw(0, specs))
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    weight = state.params["x"]
    memory = optimizer.init(weight)
    for round_ in range(5):
        end = (state.params["x"] - 0.1 * draw(round_ + 1, specs)["x"]).astype(np.float32)
        change, memory = optimizer.update(weight - end, memory)
        weight = weight + np.asarray(change)
        state = outer_step(specs, state, [Contribution(round_, 1, {"x": end})], Nesterov(0.7, 0.9)).state
        np.testing.assert_allclose(state.params["x"], weight, rtol=1e-5, atol=1e-6)


def test_the_printed_sign_of_pcp_would_climb_and_ours_descends() -> None:
    specs = (TensorSpec("x", "f32", (4,)),)
    state = initial_state(specs, {"x": np.full(4, 8.0, np.float32)})
    norms = []
    for round_ in range(60):
        end = (0.8 * state.params["x"]).astype(np.float32)  # inner steps on |x|²/2 move towards 0
        state = outer_step(specs, state, [Contribution(round_, 1, {"x": end})], Nesterov(0.7, 0.9)).state
        norms.append(float(np.abs(state.params["x"]).max()))
    assert norms[-1] < 0.05
    wrong = 8.0
    velocity = 0.0
    for _ in range(60):
        delta = wrong - 0.8 * wrong
        velocity = 0.9 * velocity + delta
        wrong += 0.7 * (delta + 0.9 * velocity)
    assert wrong > 1e6


def test_weights_are_tokens() -> None:
    ends = [np.full(6, 1.0, np.float32), np.full(6, 4.0, np.float32)]
    contributions = [Contribution(1, 100, {"x": ends[0]}), Contribution(2, 200, {"x": ends[1]})]
    np.testing.assert_array_equal(mean_of(contributions)["x"], np.full(6, 3.0, np.float32))


def test_the_state_is_not_changed_and_the_delta_is_measured() -> None:
    state = initial_state(SPECS, draw(1))
    kept = {name: array.copy() for name, array in state.params.items()}
    ends = {name: array - np.float32(0.5) for name, array in state.params.items()}
    step = outer_step(SPECS, state, [Contribution(1, 10, ends)], Nesterov(0.7, 0.9))
    assert same_bits(state.params, kept)
    assert not any(array.any() for array in state.velocity.values())
    assert step.delta_norm == pytest.approx(0.5 * 22**0.5, rel=1e-6)
    assert {array.dtype for array in step.state.params.values()} == {np.dtype(np.float32)}
    assert step.state.params["w"].shape == (3, 5)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    state = OuterState(draw(1), draw(2))
    contributions = [Contribution(n, n, draw(n + 10)) for n in (1, 2, 3)]
    whole = outer_step(SPECS, state, contributions, Nesterov(0.7, 0.9))
    monkeypatch.setattr(blocks_module, "BLOCK", 4)
    assert len(list(blocks_module.blocks(7))) == 2
    parts = outer_step(SPECS, state, contributions, Nesterov(0.7, 0.9))
    assert same_bits(whole.state.params, parts.state.params)
    assert same_bits(whole.state.velocity, parts.state.velocity)


def test_scalars_and_empty_tensors_pass_through() -> None:
    specs = (TensorSpec("s", "f32", ()), TensorSpec("e", "f32", (0, 3)))
    start = {"s": np.float32(2.0) * np.ones((), np.float32), "e": np.zeros((0, 3), np.float32)}
    end = {"s": np.ones((), np.float32), "e": np.zeros((0, 3), np.float32)}
    step = outer_step(specs, initial_state(specs, start), [Contribution(1, 1, end)], AVERAGING)
    assert step.state.params["s"].shape == ()
    assert step.state.params["s"] == 1.0
    assert step.state.params["e"].shape == (0, 3)


def test_bfloat16_parameters_keep_a_float32_master() -> None:
    specs = (TensorSpec("w", "bf16", (64,)),)
    start = to_bfloat16(draw(3, (TensorSpec("w", "f32", (64,)),))["w"])
    state = initial_state(specs, {"w": start})
    assert published_params(specs, state.params)["w"].tobytes() == start.tobytes()
    end = to_bfloat16(draw(4, (TensorSpec("w", "f32", (64,)),))["w"])
    exact_step = outer_step(specs, state, [Contribution(1, 5, {"w": end})], AVERAGING)
    assert published_params(specs, exact_step.state.params)["w"].tobytes() == end.tobytes()
    blended = outer_step(specs, state, [Contribution(1, 5, {"w": end})], Nesterov(0.7, 0.9))
    assert blended.state.params["w"].dtype == np.float32
    assert (blended.state.params["w"].view(np.uint32) & 0xFFFF).any()  # finer than any bfloat16


def test_overflow_is_an_error_that_names_the_tensor() -> None:
    huge = {"x": np.full(6, 3e38, np.float32)}
    state = OuterState({"x": -huge["x"]}, {"x": np.zeros(6, np.float32)})
    with pytest.raises(NumericsError, match="'x' NaN or infinite"):
        outer_step(VECTOR, state, [Contribution(1, 1, huge)], Nesterov(0.7, 0.9))


def test_impossible_sets_of_contributions_are_refused() -> None:
    one = Contribution(1, 1, draw(1))
    for contributions, words in (
        ([], "no contributions"),
        ([one, one], "task 1 contributed twice"),
        ([Contribution(2, 0, draw(1))], "task 2 contributed 0 tokens"),
    ):
        with pytest.raises(LocalProtocolError, match=words):
            outer_step(SPECS, OuterState(draw(1), draw(2)), contributions, AVERAGING)
    narrow = OuterState({k: v.astype(np.float16) for k, v in draw(1).items()}, draw(2))
    with pytest.raises(LocalProtocolError, match="outer state of 'w'"):
        outer_step(SPECS, narrow, [one], AVERAGING)


# --- Adam ---------------------------------------------------------------------------------------------------


ADAM = Adam(0.3, 0.9, 0.95, 0.01)


def adam_rounds(
    optimizer: Adam, deltas: list[np.ndarray], start: np.ndarray
) -> tuple[list[OuterState], list[np.ndarray]]:
    """Return the states after outer steps of one worker that moves by `deltas`, and the exact float64 deltas."""
    state, states, moved = initial_state(VECTOR, {"x": start}, optimizer), [], []
    for round_, delta in enumerate(deltas):
        end = (state.params["x"] - delta).astype(np.float32)
        moved.append(state.params["x"].astype(np.float64) - end.astype(np.float64))
        state = outer_step(VECTOR, state, [Contribution(round_, 1, {"x": end})], optimizer).state
        states.append(state)
    return states, moved


small = hnp.arrays(np.float32, 6, elements=st.floats(-8.0, 8.0, width=32))


@settings(max_examples=50)
@given(start=small, deltas=st.lists(small, min_size=1, max_size=6))
def test_adam_is_the_algorithm_of_its_paper_in_float64(start: np.ndarray, deltas: list[np.ndarray]) -> None:
    """Moments as they are written in the paper, from zero and corrected in each step, against the states."""
    states, moved = adam_rounds(ADAM, deltas, start)
    first = second = np.zeros(6)
    before = start.astype(np.float64)
    for number, (state, delta) in enumerate(zip(states, moved, strict=True), start=1):
        first = ADAM.momentum * first + (1 - ADAM.momentum) * delta
        second = ADAM.beta2 * second + (1 - ADAM.beta2) * delta**2
        mean, square = first / (1 - ADAM.momentum**number), second / (1 - ADAM.beta2**number)
        np.testing.assert_allclose(state.velocity["x"], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.moments["second:x"], square, rtol=1e-5, atol=1e-9)
        stored = (state.velocity["x"].astype(np.float64), state.moments["second:x"].astype(np.float64))
        end = before - ADAM.learning_rate * stored[0] / (np.sqrt(stored[1]) + ADAM.epsilon)
        np.testing.assert_array_equal(state.params["x"], end.astype(np.float32))
        assert state.moments["steps:x"] == number
        before = state.params["x"].astype(np.float64)


def test_it_is_adam_as_optax_knows_it() -> None:
    specs = (TensorSpec("x", "f32", (50,)),)
    state = initial_state(specs, draw(0, specs), ADAM)
    optimizer = optax.adam(ADAM.learning_rate, ADAM.momentum, ADAM.beta2, ADAM.epsilon)
    weight = state.params["x"]
    memory = optimizer.init(weight)
    for round_ in range(8):
        end = (state.params["x"] - 0.1 * draw(round_ + 1, specs)["x"]).astype(np.float32)
        change, memory = optimizer.update(state.params["x"] - end, memory)
        weight = weight + np.asarray(change)
        state = outer_step(specs, state, [Contribution(round_, 1, {"x": end})], ADAM).state
        np.testing.assert_allclose(state.params["x"], weight, rtol=1e-5, atol=1e-5)


@given(deltas=st.lists(small, min_size=1, max_size=3), constant=st.booleans())
def test_unaveraged_moments_are_the_delta_and_its_square(deltas: list[np.ndarray], constant: bool) -> None:
    """In the first step, while the delta stays as it is, and in every step where both β are 0."""
    optimizer = ADAM if constant else Adam(0.3, 0.0, 0.0, 0.01)
    state = initial_state(VECTOR, {"x": np.zeros(6, np.float32)}, optimizer)
    for delta in deltas[:1] * 4 if constant else deltas:
        parts = [Contribution(1, 1, {"x": delta}, form="deltas")]
        state = outer_step(VECTOR, state, parts, optimizer).state
        np.testing.assert_array_equal(state.velocity["x"], delta)
        np.testing.assert_array_equal(state.moments["second:x"], np.square(delta, dtype=np.float64).astype(np.float32))
        exact = 0.3 * delta.astype(np.float64) / (np.abs(delta.astype(np.float64)) + 0.01)
        np.testing.assert_allclose(state.params["x"], -exact, rtol=1e-6, atol=1e-12)
        state = replace(state, params={"x": np.zeros(6, np.float32)})  # from which the next delta is exact


@given(start=small)
def test_parameters_that_never_moved_keep_their_bits(start: np.ndarray) -> None:
    states, _ = adam_rounds(ADAM, [np.zeros(6, np.float32)] * 3, start)
    assert all(state.params["x"].tobytes() == start.tobytes() for state in states)


def test_adam_ignores_blocks_and_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    state = outer_step(SPECS, initial_state(SPECS, draw(1), ADAM), [Contribution(1, 1, draw(2))], ADAM).state
    contributions = [Contribution(n, n, draw(n + 10)) for n in (1, 2, 3)]
    whole = outer_step(SPECS, state, contributions, ADAM).state
    monkeypatch.setattr(blocks_module, "BLOCK", 4)
    parts = outer_step(SPECS, state, contributions[::-1], ADAM).state
    for left, right in zip(tables(whole), tables(parts), strict=True):
        assert same_bits(left, right)


def tables(state: OuterState) -> tuple[dict[str, np.ndarray], ...]:
    return state.params, state.velocity, state.moments


def test_each_fragment_counts_its_own_steps() -> None:
    """A step of one tensor leaves the others' state as it is, and is the step that a run of it alone would take."""
    state = initial_state(SPECS, draw(1), ADAM)
    for _ in range(2):
        state = state.updated(outer_step(SPECS[:1], state, [Contribution(1, 1, draw(2))], ADAM).state)
    state = state.updated(outer_step(SPECS[1:], state, [Contribution(1, 1, draw(2))], ADAM).state)
    assert (state.moments["steps:w"], state.moments["steps:b"]) == (2, 1)
    alone = outer_step(SPECS[1:], initial_state(SPECS[1:], draw(1), ADAM), [Contribution(1, 1, draw(2))], ADAM).state
    assert all(state.moments[name].tobytes() == alone.moments[name].tobytes() for name in alone.moments)
    assert state.params["b"].tobytes() == alone.params["b"].tobytes()


def test_state_without_moments_or_with_overflow_is_refused() -> None:
    one = [Contribution(1, 1, {"x": np.full(6, -1e20, np.float32)})]
    with pytest.raises(LocalProtocolError, match="outer state of 'x'"):
        outer_step(VECTOR, initial_state(VECTOR, {"x": np.zeros(6, np.float32)}), one, ADAM)
    with pytest.raises(NumericsError, match="second:x of 'x' NaN or infinite"):
        outer_step(VECTOR, initial_state(VECTOR, {"x": np.zeros(6, np.float32)}, ADAM), one, ADAM)


# --- checking what a worker sent ----------------------------------------------------------------------------


def test_good_parameters_pass() -> None:
    assert check_contribution(SPECS, draw(1)) == ""
    assert check_contribution((TensorSpec("w", "bf16", (3,)),), {"w": np.array([0, 0x3F80, 0xFF7F], np.uint16)}) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("b"), "tensor 'b' is missing (1 of 2 are)"),
        (lambda t: t.update(extra=t["b"]), "tensor 'extra' is no parameter"),
        (lambda t: t.update(w=t["w"].T.copy()), "tensor 'w': expected shape [3, 5], found [5, 3]"),
        (lambda t: t.update(b=t["b"].astype(np.float64)), "tensor 'b': expected element type f32"),
        (lambda t: t["b"].__setitem__(6, np.nan), "tensor 'b' contains NaN or infinite"),
        (lambda t: t["w"].__setitem__((0, 0), -np.inf), "tensor 'w' contains NaN or infinite"),
    ],
)
def test_bad_parameters_are_named(change, words: str) -> None:
    tensors = draw(1)
    change(tensors)
    assert words in check_contribution(SPECS, tensors)


def test_bad_bfloat16_bits_and_integers_are_named() -> None:
    spec = (TensorSpec("w", "bf16", (2,)),)
    for bits in (0x7F80, 0xFF80, 0x7FC0):  # infinity, minus infinity, NaN
        assert "'w' contains NaN" in check_contribution(spec, {"w": np.array([0, bits], np.uint16)})
    reason = check_contribution((TensorSpec("i", "i32", (1,)),), {"i": np.zeros(1, np.int32)})
    assert "i32 cannot be averaged" in reason
