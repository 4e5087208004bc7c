"""How far a compiled step may be from the reference, where rounding decides more than the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_runs import mlp_model, mlp_params

from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check import verify as verification
from planetary.compiler.check.reference import run_reference
from planetary.compiler.check.verify import (
    compare,
    doubled,
    make_trial,
    rounds_between_operations,
    run_expected,
    verify_artifact,
    widened,
)
from planetary.compiler.frontend.export import export_model, load_model
from planetary.compiler.rewrites.precision import coarsest_factor
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.ranges import Factors
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import CompileError
from planetary.core.tensors import to_host_dtype
from planetary.core.trials.deviations import ROUNDING, as_float, errors_of, noise_between


def _results(options: StepOptions) -> tuple:
    step = build_train_step(mlp_model(), options)
    trial = make_trial(step.spec, mlp_params(), {})
    return step, trial, run_expected(step, trial)


def test_a_sign_may_flip_in_few_places_and_its_momentum_in_none() -> None:
    step, trial, good = _results(StepOptions(optimizer="lion"))
    rounding = ROUNDING["bf16"]  # accepts 1.5% of the elements, which of 196 are 3
    for flips, accepted in ((3, True), (4, False)):
        flipped = good["cube"].copy()
        flipped.reshape(-1)[:flips] += 2 * 2.0**-7
        error = compare(step.spec, trial, good, good | {"cube": flipped}, rounding)[1]
        assert (error <= 1) is accepted
    assert compare(step.spec, trial, good, good | {"cube": flipped})[1] > 1
    mean = good["lion.mean.cube"].copy()
    mean.reshape(-1)[0] *= 2
    assert compare(step.spec, trial, good, good | {"lion.mean.cube": mean}, rounding)[0] == "lion.mean.cube"
    broken = good["cube"].copy()
    broken.reshape(-1)[0] = np.nan
    assert compare(step.spec, trial, good, good | {"cube": broken}, rounding) == ("cube", np.inf)


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.slow
def test_tolerance_follows_the_factors(precision: Factors) -> None:
    step, trial, good = _results(StepOptions(precision=precision))
    assert coarsest_factor(step.portable) == precision
    off = good | {"grad_norm": good["grad_norm"] * np.float32(1.01)}
    error = compare(step.spec, trial, good, off, ROUNDING[precision])[1]
    assert (error <= 1) is (precision == "bf16")


# --- 16-bit arithmetic between contractions ---------------------------------------------------------------------

ACTIVATIONS = Path(__file__).parents[1] / "torch_exports" / "nanogpt_bf16.mlir"


def test_only_arithmetic_between_contractions_counts_as_noise() -> None:
    model = load_model(ACTIVATIONS)
    assert rounds_between_operations(build_train_step(model).portable)
    assert not rounds_between_operations(build_train_step(mlp_model(), StepOptions(precision="bf16")).portable)
    assert not rounds_between_operations(build_train_step(mlp_model(dtype="bfloat16")).portable)


@pytest.mark.slow
def test_the_noise_of_bf16_activations_is_measured_and_bounded() -> None:
    model = load_model(ACTIVATIONS)
    step = build_train_step(model)
    trial = make_trial(step.spec, model.initial("param"), {})
    rounded = run_expected(step, trial)
    strict, wide = (
        run_expected(step, trial, lambda source, *rest, r=r: run_reference(widened(source, rounding=r), *rest))
        for r in (True, False)
    )
    noise = noise_between(step.spec, strict, wide)
    assert all(amount < 0.02 * abs(float(rounded[name])) for name, amount in noise.items() if "loss" in name)
    square = "adam.square.arg15"
    change = float(np.abs(rounded[square] - trial.before[square]).max())
    assert 1e-3 < noise[square] / change < 0.05

    def error(shift: float, **given: Any) -> float:
        found = rounded | {square: rounded[square] + np.float32(shift)}
        return errors_of(step.spec, trial.before, rounded, found, ROUNDING["bf16"], **given)[square]

    assert error(0.06 * change) > 1
    assert error(0.06 * change, noise={square: 0.02 * change}) < 1
    # Noise as large as the change itself does not make a wrong gradient right.
    assert error(0.5 * change, noise={square: change}) > 1


def test_a_widened_module_keeps_its_signature() -> None:
    text = """
    func.func @main(%x: tensor<4xbf16>) -> tensor<4xbf16> {
      %c = stablehlo.constant dense<[1.0, 2.0, 3.0, 4.0]> : tensor<4xbf16>
      %third = stablehlo.constant dense<0.333984375> : tensor<4xbf16>
      %0 = stablehlo.multiply %x, %third : tensor<4xbf16>
      %1 = stablehlo.add %0, %c : tensor<4xbf16>
      %2 = stablehlo.subtract %1, %c : tensor<4xbf16>
      return %2 : tensor<4xbf16>
    }
    """
    x = to_host_dtype(np.array([1, 1, 1, 1], np.float32), "bf16")
    (narrow,) = run_reference(text, "main", [x], ["bf16"])
    (wide,) = run_reference(widened(text, rounding=False), "main", [x], ["bf16"])
    (strict,) = run_reference(widened(text, rounding=True), "main", [x], ["bf16"])
    np.testing.assert_array_equal(strict, narrow)
    np.testing.assert_array_equal(as_float(wide, "bf16"), np.full(4, 0.333984375, np.float32))
    assert not np.array_equal(narrow, wide)


# --- float32 ----------------------------------------------------------------------------------------------------

LOSSY = """
import jax.numpy as jnp
import numpy as np

def build(scale=1.0):
    def loss(params, x, y):
        return jnp.mean((jnp.sin(scale * (x @ params["w"])) - y) ** 2)  # an angle of many turns has few digits left
    batch = np.zeros((8, 3), np.float32), np.zeros((8, 1), np.float32)
    return loss, {"w": np.ones((3, 1), np.float32)}, batch
"""


@pytest.mark.parametrize(
    ("scale", "shift", "right"), [(1, 0, True), (1, 0.01, False), (3e4, 0, True), (3e4, 0.05, False)]
)
def test_the_rounding_of_float32_is_measured_where_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, shift: float, right: bool
) -> None:
    """A device that rounds otherwise, here not at all, is right; one that is off by more (of a change) is wrong."""
    (tmp_path / "lossy.py").write_text(LOSSY)
    model = export_model(f"{tmp_path}/lossy.py:build", {"scale": float(scale)})
    step = build_train_step(model)
    asked: list[object] = []

    def found(spec: Any, runner: Any, trial: Any) -> dict[str, np.ndarray]:
        exact = run_expected(step, trial, lambda source, *rest: run_reference(doubled(source), *rest))
        wrong = {
            name: exact[name] + np.float32(shift * np.abs(exact[name] - trial.before[name]).max())
            for name in (tensor.name for tensor in spec.params)
        }
        return exact | wrong

    measured = verification._noise_of_float32
    monkeypatch.setattr(verification, "run_found", found)
    monkeypatch.setattr(verification, "_noise_of_float32", lambda *given: asked.append(0) or measured(*given))
    monkeypatch.setattr(verification.interpreter, "LARGEST_COST", 0)  # as of a large step

    def verify() -> Any:
        return verify_artifact(
            step,
            compile_artifact(step, Target("pjrt:cpu", "stablehlo")),
            lambda artifact, spec: None,  # type: ignore[arg-type, return-value]
            params=model.initial("param"),
            buffers={},
            local=Target("cpu", "host", "here"),
        )

    if right:
        assert verify().worst_error <= 1
        assert bool(asked) is (scale > 1)
    else:
        with pytest.raises(CompileError, match="times the accepted error"):
            verify()


def test_a_doubled_module_keeps_its_signature_and_bits() -> None:
    text = """
    func.func @main(%x: tensor<3xf32>) -> (tensor<3xf32>, tensor<3xui32>) {
      %c = stablehlo.constant dense<1.0e-20> : tensor<3xf32>
      %0 = stablehlo.exponential %x : tensor<3xf32>
      %1 = stablehlo.multiply %0, %c : tensor<3xf32>
      %2 = stablehlo.bitcast_convert %1 : (tensor<3xf32>) -> tensor<3xui32>
      %3 = stablehlo.bitcast_convert %2 : (tensor<3xui32>) -> tensor<3xf32>
      return %3, %2 : tensor<3xf32>, tensor<3xui32>
    }
    """
    x = np.array([1, 50, 100], np.float32)
    exact, bits = run_reference(doubled(text), "main", [x], ["f32", "ui32"])
    np.testing.assert_allclose(exact, np.exp(x.astype(np.float64)) * 1e-20, rtol=1e-6)
    np.testing.assert_array_equal(bits, exact.view(np.uint32))
    assert run_reference(text, "main", [x], ["f32", "ui32"])[0][2] == np.inf


def test_what_has_no_double_form_is_a_compile_error() -> None:
    text = """
    func.func @main(%x: tensor<3xcomplex<f32>>) -> tensor<3xf32> {
      %0 = stablehlo.real %x : (tensor<3xcomplex<f32>>) -> tensor<3xf32>
      return %0 : tensor<3xf32>
    }
    """
    with pytest.raises(CompileError):
        doubled(text)
