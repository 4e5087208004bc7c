"""Contractions in 16 bits around float32 parameters, stochastic rounding and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from step_runs import Run, close, mlp_batch, mlp_model, mlp_params

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model, export_loss
from planetary.compiler.rewrites.precision import LossScale, round_stochastically
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.schedules import Schedule

LOW = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def _module(build: Callable[[list], Sequence], *kinds: tuple[tuple[int, ...], str]) -> str:
    """A module whose `main` takes arguments of (shape, "f32" or "i32") and returns what `build` emits."""
    with ir.new_context():
        module = ir.empty_module()
        types = [ir.tensor(shape, {"f32": ir.f32, "i32": ir.i32}[dtype]()) for shape, dtype in kinds]
        with ir.new_function(module, "main", types) as (arguments, finish):
            finish(list(build(arguments)))
        return ir.to_text(module)


# --- contractions -------------------------------------------------------------------------------------------


def _two_layers(factor: float = 1.0) -> Model:
    rng = np.random.default_rng(1)
    params = {"a": rng.standard_normal((5, 9), np.float32), "b": rng.standard_normal((9, 4), np.float32)}

    def loss(p: dict, x: Any, y: Any) -> Any:
        return factor * jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)

    return export_loss(loss, params, (np.zeros((16, 5), np.float32), np.zeros((16, 4), np.float32)))


def _by_hand(params: dict, batch: Sequence[np.ndarray], low: Any) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients of `_two_layers` with the factors of every product rounded to `low`."""

    def rounded(value: np.ndarray) -> np.ndarray:
        return value.astype(low).astype(np.float32)

    x, y = batch
    hidden = np.tanh(rounded(x) @ rounded(params["a"]))
    error = rounded(hidden) @ rounded(params["b"]) - y
    ct = np.float32(2 / error.size) * error
    by_b = rounded(hidden).T @ rounded(ct)
    by_a = rounded(x).T @ rounded((rounded(ct) @ rounded(params["b"]).T) * (1 - hidden**2))
    return float(np.mean(error**2)), by_a, by_b


def _sgd(**changes: Any) -> StepOptions:
    base = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    return StepOptions(**(base | changes))


def _at(rate: float) -> Schedule:
    return Schedule(kind="constant", peak=rate)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_factors_are_rounded_and_sums_are_not(precision: str) -> None:
    model = _two_layers()
    params = model.initial("param")
    rng = np.random.default_rng(2)
    batch = [rng.standard_normal((16, 5), np.float32), rng.standard_normal((16, 4), np.float32)]
    step = build_train_step(model, _sgd(precision=precision))
    run = Run(step, params, _at(1.0))
    loss, norm = run(0, batch)
    want_loss, by_a, by_b = _by_hand(params, batch, LOW[precision])
    assert loss == pytest.approx(want_loss, rel=1e-6)
    tolerance = 2e-4  # float32 sums in another order may round to another neighbour
    close(params["a"] - run.params[0], by_a, tolerance)
    close(params["b"] - run.params[1], by_b, tolerance)
    assert norm == pytest.approx(np.sqrt(np.sum(by_a**2) + np.sum(by_b**2)), rel=tolerance)
    full = _by_hand(params, batch, np.float32)
    assert np.max(np.abs(full[1] - by_a)) > 5 * tolerance * np.max(np.abs(by_a))  # the rounding is visible
    assert [spec.dtype for spec in step.spec.params] == ["f32", "f32"]
    evaluated = run_reference(step.portable, "eval_step", [*params.values(), *batch], ["f32"])[0]
    assert float(evaluated) == pytest.approx(want_loss, rel=1e-6)


def test_float32_parameters_keep_updates_that_bf16_would_lose() -> None:
    model = _two_layers()
    params = model.initial("param")
    run = Run(build_train_step(model, _sgd(precision="bf16")), params, _at(1e-5))
    batch = [np.ones((16, 5), np.float32), np.ones((16, 4), np.float32)]
    run(0, batch)
    moved = np.abs(run.params[1] - params["b"])
    assert np.median(moved) > 0
    spacing = np.abs(params["b"]) * 2.0**-8
    assert np.mean(moved < spacing / 4) > 0.9


@pytest.mark.slow
def test_micro_batches_and_low_precision_go_together() -> None:
    whole = Run(build_train_step(mlp_model(8), StepOptions(precision="bf16")), mlp_params())
    parts = Run(build_train_step(mlp_model(2), StepOptions(precision="bf16", micro_batches=4)), mlp_params())
    for index in range(2):
        found, expected = parts(index, mlp_batch(index)), whole(index, mlp_batch(index))
        assert found == pytest.approx(expected, rel=5e-3)


def test_an_option_that_changes_nothing_is_noted_or_refused() -> None:
    params = {"scale": np.ones(3, np.float32)}
    model = export_loss(
        lambda p, x, y: jnp.mean((x * p["scale"] - y) ** 2), params, (np.zeros((2, 3), np.float32),) * 2
    )
    notes = build_train_step(model, StepOptions(precision="bf16")).notes
    assert [note for note in notes if "precision bf16 changes nothing" in note and "no contraction" in note] != []
    with pytest.raises(UserError, match="stochastic rounding would change nothing"):
        build_train_step(model, StepOptions(rounding="stochastic"))


# --- stochastic rounding ------------------------------------------------------------------------------------


def _rounded(values: np.ndarray, precision: str, step: int = 5, salt: int = 1) -> np.ndarray:
    def build(arguments: list) -> list:
        element = {"bf16": ir.bf16, "f16": ir.f16}[precision]()
        return [round_stochastically(arguments[0], element, arguments[1], salt)]

    text = _module(build, (values.shape, "f32"), ((), "i32"))
    found = run_reference(text, "main", [values, np.array(step, np.int32)], [precision])[0]
    return found.view(LOW[precision]).astype(np.float64)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize("exponent", [0, 6, -12, -15, -20])
def test_rounding_takes_neighbours_with_the_right_expectation(precision: str, exponent: int) -> None:
    digits = 7 if precision == "bf16" else 10
    spacing = 2.0 ** max(exponent - digits, -133 if precision == "bf16" else -24)
    low = 2.0**exponent + 3 * spacing
    for sign in (1, -1):
        values = np.full(40_000, sign * (low + 0.3125 * spacing), np.float32)
        found = _rounded(values, precision)
        assert set(np.unique(found)) == {sign * low, sign * (low + spacing)}
        assert np.mean(found) == pytest.approx(float(values[0]), abs=0.012 * spacing)  # 5 standard deviations


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_what_needs_no_rounding_stays(precision: str) -> None:
    numbers = np.array([0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-24, 384.0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_rounded(numbers, precision), numbers)


def test_bits_depend_on_step_salt_and_place() -> None:
    values = np.full(4096, 1 + 0.5 * 2.0**-7, np.float32)
    first = _rounded(values, "bf16")
    np.testing.assert_array_equal(first, _rounded(values, "bf16"))
    for other in (_rounded(values, "bf16", step=6), _rounded(values, "bf16", salt=2)):
        assert 0.45 < np.mean(first != other) < 0.55
    assert 0.45 < np.mean(first[1:] != first[:-1]) < 0.55
    assert 0.45 < np.mean(first[: 1 << 11] != first[1 << 11 :]) < 0.55


def test_bf16_parameters_move_on_average_by_random_rounding() -> None:
    """Every update is far below the spacing of the parameters."""
    params = {"w": np.ones((64, 32), ml_dtypes.bfloat16)}

    def loss(p: dict, x: Any, y: Any) -> Any:
        return jnp.sum(p["w"].astype(jnp.float32) * x[0, 0]) + 0 * y[0, 0]

    model = export_loss(loss, params, (np.ones((1, 1), np.float32),) * 2)
    batch = [np.ones((1, 1), np.float32)] * 2
    for rounding, expected in (("nearest", 1.0), ("stochastic", 1 - 20 * 2.0**-12)):
        options = _sgd(rounding=rounding)
        run = Run(build_train_step(model, options), {"w": params["w"].view(np.uint16)}, _at(2.0**-12))
        for index in range(20):
            run(index, batch)
        mean = np.mean(run.params[0].view(ml_dtypes.bfloat16).astype(np.float64))
        assert mean == pytest.approx(expected, abs=2e-4)


def test_weights_are_rounded_at_random_for_the_model_alone() -> None:
    model = _two_layers()
    params = model.initial("param")
    run = Run(build_train_step(model, _sgd(precision="bf16", rounding="stochastic")), params, _at(1e-6))
    batch = [np.ones((16, 5), np.float32), np.ones((16, 4), np.float32)]
    losses = {run(index, batch)[0] for index in range(4)}
    assert len(losses) == 4  # the weights hardly move, their roundings do
    nearest = _by_hand(params, batch, ml_dtypes.bfloat16)[0]
    assert max(losses) == pytest.approx(nearest, rel=0.05)
    close(run.params[0], params["a"], 1e-4)


# --- loss scaling -------------------------------------------------------------------------------------------


def test_a_step_that_overflows_is_skipped_until_the_scale_fits() -> None:
    model = _two_layers(factor=400.0)
    params = model.initial("param")
    rng = np.random.default_rng(2)
    batch = [rng.standard_normal((16, 5), np.float32), rng.standard_normal((16, 4), np.float32)]
    run = Run(build_train_step(model, _sgd(precision="f16", optimizer="adamw")), params, _at(1e-3))
    skipped = 0
    while run(skipped, batch)[1] == 0.0:
        skipped += 1
        state = run.named()
        assert int(state["loss_scale.halvings"]) == skipped
        assert int(state["loss_scale.good_steps"]) == int(state["adam.count"]) == 0
        for name, before in params.items():
            np.testing.assert_array_equal(state[name], before)
    assert 1 <= skipped < 16
    state = run.named()
    assert (int(state["loss_scale.halvings"]), int(state["loss_scale.good_steps"])) == (skipped, 1)
    assert int(state["adam.count"]) == 1
    assert not np.array_equal(state["a"], params["a"])


def test_at_a_scale_of_one_a_bad_gradient_is_reported() -> None:
    model = _two_layers()
    run = Run(build_train_step(model, _sgd(precision="f16")), model.initial("param"), _at(1.0))
    batch = [np.full((16, 5), np.nan, np.float32), np.ones((16, 4), np.float32)]
    norms = []
    for index in range(17):
        loss, norm = run(index, batch)
        assert np.isnan(loss)
        norms.append(norm)
    assert norms[:16] == [0.0] * 16
    assert np.isnan(norms[16])


def test_the_scale_halves_and_doubles_within_its_limits() -> None:
    def build(arguments: list) -> list:
        scale = LossScale(arguments[0], arguments[1], patience=3)
        skipped = scale.overflowed(arguments[2])
        return [*scale.advanced(skipped), scale.factor, scale.inverse]

    text = _module(build, ((), "i32"), ((), "i32"), ((), "f32"))

    def after(halvings: int, good: int, norm: float) -> tuple[int, int]:
        inputs = [np.array(halvings, np.int32), np.array(good, np.int32), np.array(norm, np.float32)]
        found = run_reference(text, "main", inputs, ["i32", "i32", "f32", "f32"])
        assert float(found[2]) == 2.0 ** (16 - halvings)
        assert float(found[3]) == 2.0 ** (halvings - 16)
        return int(found[0]), int(found[1])

    assert after(0, 0, 1.0) == (0, 1)
    assert after(0, 2, 1.0) == (-1, 0)
    assert after(5, 2, np.inf) == (6, 0)
    assert after(5, 2, np.nan) == (6, 0)
    assert after(-8, 2, 1.0) == (-8, 0)
    assert after(16, 1, np.nan) == (16, 2)
