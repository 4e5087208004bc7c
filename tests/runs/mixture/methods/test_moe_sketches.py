"""Activation sketches and surrogate fitting."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from planetary.core.errors import NumericsError, TrustError, UserError
from planetary.runs.mixture.cost import cost
from planetary.runs.mixture.methods import recent_rows, surrogate
from planetary.runs.mixture.methods.sketch import Sketch, decode, dense_gates, encode, sketch_from_gates, subsample
from planetary.runs.mixture.methods.surrogate import (
    FitOptions,
    expert_outputs,
    fit_surrogates,
    initial_surrogates,
    surrogate_outputs,
)

RNG = np.random.default_rng(0)


def outputs(u: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return expert_outputs({"up": up, "down": down}, u)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def routed(tokens: int, experts: int, active: int) -> np.ndarray:
    gates = np.zeros((tokens, experts), np.float32)
    for row in gates:
        row[RNG.permutation(experts)[:active]] = RNG.dirichlet(np.ones(active))
    return gates


def some_sketch(tokens: int = 50) -> Sketch:
    return sketch_from_gates((3, 7, 1), normal(tokens, 32), normal(tokens, 32) * 1e-5, routed(tokens, 8, 2), 2)


def test_gates_survive_and_one_row_serves_a_tokens_experts() -> None:
    """Gates survive the sketch and one row serves all experts of a token."""
    gates = routed(50, 8, 2)
    sketch = sketch_from_gates((0, 0, 0), normal(50, 32), normal(50, 32), gates, 2)
    assert (dense_gates(sketch, 8) == gates).all()
    assert sketch.ids.shape == (50, 2)
    assert len(sketch.inputs) == 50


def test_uncompressed_sketch_is_exact_and_compressed_is_near() -> None:
    """An uncompressed sketch comes back bit for bit and a compressed one nearly."""
    sketch = some_sketch()
    same = decode(encode(sketch, "f32"))
    for field in ("inputs", "output_gradients", "ids", "gates"):
        assert (getattr(same, field) == getattr(sketch, field)).all()
    close = decode(encode(sketch, "4bit"))
    for field in ("inputs", "output_gradients"):
        error = getattr(close, field) - getattr(sketch, field)
        assert np.linalg.norm(error) < 0.15 * np.linalg.norm(getattr(sketch, field))
    assert (close.ids == sketch.ids).all()


def test_the_bytes_are_those_of_the_cost_model() -> None:
    shape = cost.MoeShape("x", 1, 8, 2, 32, 64, 8, 1e6)
    assert encode(some_sketch(50), "4bit").nbytes == cost.sketch_bytes(shape, 50)[1]


def test_a_damaged_sketch_is_not_used() -> None:
    stored = encode(some_sketch(), "f32")
    broken = np.array(stored.inputs)
    broken[0, 0] += 1
    with pytest.raises(TrustError, match="layer 3, step 7 is damaged"):
        decode(replace(stored, inputs=broken))
    with pytest.raises(TrustError, match="damaged"):
        decode(replace(stored, step=8))
    bad = some_sketch()
    bad.output_gradients[0, 0] = np.nan
    with pytest.raises(NumericsError, match="gradients"):
        encode(bad)


def test_subsampling_is_unbiased_and_repeatable() -> None:
    sketch = some_sketch(200)
    part = subsample(sketch, 0.25, seed=0)
    assert len(part.ids) == len(part.inputs) == 50
    assert (subsample(sketch, 0.25, seed=0).inputs == part.inputs).all()
    assert subsample(sketch, 1.0, seed=0) is sketch
    whole = sketch.inputs.T @ sketch.output_gradients
    draws = [subsample(sketch, 0.25, seed) for seed in range(400)]
    mean = np.mean([d.inputs.T @ d.output_gradients for d in draws], axis=0)
    assert np.linalg.norm(mean - whole) < 0.15 * np.linalg.norm(whole)
    with pytest.raises(UserError, match="fraction"):
        subsample(sketch, 0.0, seed=0)


def test_the_ring_buffer_keeps_the_latest_rows() -> None:
    rows = recent_rows.no_rows(4, 1, 2)
    for value in range(6):
        gates = np.array([[value % 2, 1 - value % 2]], np.float32)
        rows = recent_rows.remember(rows, np.array([[value]], np.float32), gates)
    assert sorted(rows.inputs[:, 0]) == [2, 3, 4, 5]
    inputs, weights = recent_rows.calibration_rows(rows, np.array([0, 1, -1]), 3)
    assert inputs[:, :, 0].tolist() == [[5, 3, 0], [4, 2, 0], [0, 0, 0]]
    assert weights.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    many = recent_rows.remember(rows, np.arange(10, dtype=np.float32)[:, None], np.ones((10, 2), np.float32))
    assert sorted(many.inputs[:, 0]) == [6, 7, 8, 9]


def fit_case(rank: int, form: str, **options: object) -> tuple[surrogate.Fitted, np.ndarray]:
    """Two experts of width 32 in 8 dimensions; returns the fit and the out-of-sample errors."""
    rng = np.random.default_rng(3)
    shapes = {"up": (2, 8, 32), "down": (2, 32, 8), **({"gate": (2, 8, 32)} if form == "swiglu" else {})}
    experts = {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    u, fresh = (rng.standard_normal((2, 400, 8)).astype(np.float32) for _ in range(2))
    weights = rng.random((2, 400)).astype(np.float32)
    a, b = initial_surrogates(experts, rank)
    given = FitOptions(**options)  # pyright: ignore[reportArgumentType]
    fitted = fit_surrogates(u, weights, expert_outputs(experts, u), a=a, b=b, options=given)
    wanted = expert_outputs(experts, fresh)
    error = np.linalg.norm(surrogate_outputs(fitted.a, fitted.b, fresh) - wanted, axis=(1, 2))
    return fitted, error / np.linalg.norm(wanted, axis=(1, 2))


FORMS = pytest.mark.parametrize("form", ["relu2", "swiglu"])


@FORMS
def test_a_surrogate_as_wide_as_its_expert_is_an_exact_copy(form: str) -> None:
    fitted, error = fit_case(32, form, steps=0, ridge=1e-9)
    assert error.max() < 1e-3
    gated = {"gate": normal(2, 8, 5), "up": normal(2, 8, 5), "down": normal(2, 5, 8)}
    u = normal(2, 5, 8)
    for rank in (5, 7):
        copies = initial_surrogates(gated, rank)
        np.testing.assert_allclose(surrogate_outputs(*copies, u), expert_outputs(gated, u), rtol=1e-4, atol=1e-5)
    up, down = normal(2, 8, 32), normal(2, 32, 8)
    a, b = initial_surrogates({"up": up, "down": down}, 32)
    assert (a == up).all()
    assert (b == down).all()
    wider = initial_surrogates({"up": up, "down": down}, 40)
    np.testing.assert_allclose(
        outputs(u, *wider),
        outputs(u, up, down),
        rtol=1e-4,
        atol=1e-4,
    )
    assert fitted.a.shape == (2, 8, 32 if form == "relu2" else 64)


@FORMS
def test_searching_a_beats_solving_for_b_alone_and_rank_helps(form: str) -> None:
    _, only_b = fit_case(8, form, steps=0)
    _, searched = fit_case(8, form, steps=60)
    _, wider = fit_case(16, form, steps=60)
    assert (searched < 0.9 * only_b).all()
    assert (wider < searched).all()


def test_an_expert_without_rows_keeps_its_surrogate() -> None:
    a, b = normal(2, 8, 4), normal(2, 4, 8)
    u, targets = normal(2, 30, 8), normal(2, 30, 8)
    weights = np.ones((2, 30), np.float32)
    weights[1] = 0
    fitted = fit_surrogates(u, weights, targets, a=a, b=b, options=FitOptions(steps=3))
    assert (fitted.a[1] == a[1]).all()
    assert (fitted.b[1] == b[1]).all()
    assert fitted.error[1] == 0
    assert (fitted.b[0] != b[0]).any()
    with pytest.raises(NumericsError, match="NaN"):
        fit_surrogates(u * np.nan, weights, targets, a=a, b=b, options=FitOptions())


def test_only_newer_versions_from_the_owner_are_installed() -> None:
    message = surrogate.surrogate_message(1, 5, owner=2, version=4, a=normal(8, 4), b=normal(4, 8))
    assert surrogate.newer_surrogate(3, message, owner=2)
    assert not surrogate.newer_surrogate(4, message, owner=2)
    with pytest.raises(TrustError, match="composer 1 owns"):
        surrogate.newer_surrogate(3, message, owner=1)
    with pytest.raises(TrustError, match="damaged"):
        surrogate.newer_surrogate(3, replace(message, version=5), owner=2)
