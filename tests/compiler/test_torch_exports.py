"""Small models exactly as torch-mlir exports them (examples/pcp/export_models.py makes the files), against PyTorch's
own loss and gradients.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from step_runs import Run, scalars

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.artifact_manifest import read_manifest
from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target, parse_target
from planetary.compiler.check.reference import run_reference
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import Model, load_model
from planetary.compiler.step.train_step import TrainStep, build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import CompileError, UserError
from planetary.core.tensors import to_host_dtype
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features

FILES = Path(__file__).parent / "torch_exports"
NAMES = sorted(path.stem for path in FILES.glob("*.mlir"))
QUICK = ("nanogpt_f32", "qwen")
"""Models whose gradients `make test` compares."""
VOCABULARY = 32


def model_of(name: str) -> Model:
    return load_model(FILES / f"{name}.mlir")


def numbers(model: Model) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """The weights and data that the gradients beside the models were taken at."""
    rng = np.random.default_rng(0)
    params = {}
    for spec in model.manifest.of_role("param"):
        drawn = rng.standard_normal(spec.shape).astype(np.float32) * np.float32(0.3)
        params[spec.name] = to_host_dtype(drawn, spec.dtype)
    parts = model.manifest.of_role("input", "target")
    return params, [rng.integers(0, VOCABULARY, spec.shape).astype(np.int32) for spec in parts]


def test_there_is_a_model_of_every_family() -> None:
    assert {name.partition("_")[0] for name in NAMES} == {"nanogpt", "nanochat", "rope", "qwen"}
    assert all((FILES / f"{name}.mlir").stat().st_size < 100_000 for name in NAMES)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_loss_and_gradients_are_pytorchs(name: str) -> None:
    model, expected = model_of(name), np.load(FILES / f"{name}.npz")
    params, batch = numbers(model)
    # The momentum of the first step is the gradient, in float32.
    options = StepOptions(optimizer="sgd", momentum=0.5, clip_norm=0, weight_decay=0)
    step = build_train_step(model, options)
    assert "f64" not in step.stablehlo
    assert "stablehlo.scatter" not in step.stablehlo
    loss, gradients = _first_step(step, [*params.values(), *model.initial("buffer").values()], batch)
    low = "bf16" in name
    assert loss == pytest.approx(float(expected["loss"]), rel=5e-3 if low else 2e-6)
    for name_of_weight, found in zip(params, gradients, strict=True):
        wanted = expected[name_of_weight]
        error = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert error < (0.05 if low else 2e-5), (name_of_weight, error)


def _first_step(step: TrainStep, weights: list[np.ndarray], batch: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """Run one step of SGD from a state of zeros with XLA; return the loss and the new state."""
    params, state = step.spec.params, step.spec.opt_state
    dtypes = [tensor.dtype for tensor in (*params, *state)] + ["f32", "f32"]
    arguments = [*weights, *(tensor.zeros() for tensor in state), *scalars(0), *batch]
    results = run_reference(step.portable, "train_step", arguments, dtypes)
    return float(results[-2]), results[len(params) : -2]


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "backend"), [("qwen", "vulkan"), ("nanogpt_f32", "metal")])
def test_models_of_float32_compile_for_shaders(name: str, backend: str) -> None:
    """Tokens of i64 and a flattened loss need two rewrites there; the CPU's tests would not see them fail."""
    assert compile_artifact(build_train_step(model_of(name)), parse_target(backend, host_features())).data


# --- float64 ------------------------------------------------------------------------------------------------


def test_demotion_of_float64_is_a_note_of_the_step() -> None:
    (note,) = build_train_step(model_of("nanochat_d1_f64")).notes
    assert note.startswith("54 float64 operations of the model (12 × multiply, ")
    assert "computed in float32" in note


def test_float64_constants_are_folded_without_a_note() -> None:
    model = load_model(Path(__file__).parents[2] / "examples" / "pcp" / "model.mlir")
    assert "f64" in model.text
    assert build_train_step(model).notes == ()


def test_an_argument_of_float64_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "wide.mlir"
    file.write_text(
        """func.func @main(%w: tensor<2xf64>, %x: tensor<2xf64>, %y: tensor<2xf64>) -> tensor<f64> {
  %0 = stablehlo.dot_general %w, %x, contracting_dims = [0] x [0] : (tensor<2xf64>, tensor<2xf64>) -> tensor<f64>
  return %0 : tensor<f64>
}
"""
    )
    with pytest.raises(CompileError, match=r"argument 0 of main has the type tensor<2xf64>.*model.float\(\)"):
        build_train_step(load_model(file))


def test_constants_beyond_float32_stay_finite_and_above_zero(tmp_path: Path) -> None:
    """A loss of f64 whose constants float32 does not have: log(w² + 1e-300) at 0, and a clamp at 1e300."""
    file = tmp_path / "small.mlir"
    file.write_text(
        """func.func @main(%w: tensor<2xf32>, %x: tensor<2xf32>, %y: tensor<2xf32>) -> tensor<f64> {
  %tiny = stablehlo.constant dense<[1.0e-300, 1.0e-301]> : tensor<2xf64>
  %huge = stablehlo.constant dense<1.0e300> : tensor<f64>
  %zero = stablehlo.constant dense<0.0> : tensor<f64>
  %0 = stablehlo.multiply %w, %x : tensor<2xf32>
  %1 = stablehlo.convert %0 : (tensor<2xf32>) -> tensor<2xf64>
  %2 = stablehlo.add %1, %tiny : tensor<2xf64>
  %3 = stablehlo.log %2 : tensor<2xf64>
  %4 = stablehlo.reduce(%3 init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<2xf64>, tensor<f64>) -> tensor<f64>
  %5 = stablehlo.minimum %4, %huge : tensor<f64>
  return %5 : tensor<f64>
}
"""
    )
    model = load_model(file)
    step = build_train_step(model)
    zeros = np.zeros(2, np.float32)
    run = Run(step, {"arg0": zeros})
    loss, _ = run(0, [zeros, zeros])
    assert loss == pytest.approx(2 * np.log(np.finfo(np.float32).tiny), rel=1e-6)


# --- rotary tables ------------------------------------------------------------------------------------------


def test_rotary_tables_among_the_arguments_are_recognised() -> None:
    model = model_of("rope_arguments")
    buffers = model.initial("buffer")
    assert list(buffers) == ["arg14", "arg15"]
    angles = np.outer(np.arange(8), 10000.0 ** -(np.arange(4) / 4))
    np.testing.assert_allclose(buffers["arg14"], np.cos(angles), rtol=1e-6)
    np.testing.assert_allclose(buffers["arg15"], np.sin(angles), rtol=1e-6, atol=1e-7)
    (note,) = [note for note in build_train_step(model).notes if "rotary" in note]
    assert "arg14 and arg15 are used as the tables of rotary positions" in note
    assert "model.roles" in note


def test_tables_are_trained_if_the_roles_say_so() -> None:
    model = load_model(FILES / "rope_arguments.mlir", roles={"arg14": "param", "arg15": "param"})
    assert not model.manifest.of_role("buffer")
    assert not model.notes


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rope_arguments"])
def test_no_weight_is_taken_for_a_table(name: str) -> None:
    model = model_of(name)
    assert not model.manifest.of_role("buffer")
    assert not model.notes


# cos and sin for whole heads, applied as x·cos + (−b, a)·sin, as Qwen and Llama have it in many libraries.
HALVES = """
func.func @main(%w: tensor<2x4x6xf32>, %one: tensor<4x6xf32>, %other: tensor<4x6xf32>, %x: tensor<2x4xi32>,
    %y: tensor<2x4xi32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %a = stablehlo.slice %w [0:2, 0:4, 0:3] : (tensor<2x4x6xf32>) -> tensor<2x4x3xf32>
  %b = stablehlo.slice %w [0:2, 0:4, 3:6] : (tensor<2x4x6xf32>) -> tensor<2x4x3xf32>
  %minus = stablehlo.negate %b : tensor<2x4x3xf32>
  %turned = stablehlo.concatenate %minus, %a, dim = 2
      : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<2x4x6xf32>
  %first = stablehlo.broadcast_in_dim %one, dims = [1, 2] : (tensor<4x6xf32>) -> tensor<2x4x6xf32>
  %second = stablehlo.broadcast_in_dim %other, dims = [1, 2] : (tensor<4x6xf32>) -> tensor<2x4x6xf32>
  %0 = stablehlo.multiply STRAIGHT : tensor<2x4x6xf32>
  %1 = stablehlo.multiply TURNED : tensor<2x4x6xf32>
  %2 = stablehlo.add %0, %1 : tensor<2x4x6xf32>
  %3 = stablehlo.reduce(%2 init: %zero) applies stablehlo.add across dimensions = [0, 1, 2]
      : (tensor<2x4x6xf32>, tensor<f32>) -> tensor<f32>
  return %3 : tensor<f32>
}
"""


@pytest.mark.parametrize("cos_first", [True, False])
def test_tables_for_whole_heads_hold_each_angle_twice(tmp_path: Path, cos_first: bool) -> None:
    file = tmp_path / "halves.mlir"
    tables = ("%first", "%second") if cos_first else ("%second", "%first")
    file.write_text(HALVES.replace("STRAIGHT", f"%w, {tables[0]}").replace("TURNED", f"{tables[1]}, %turned"))
    buffers = load_model(file).initial("buffer")
    angles = np.outer(np.arange(4), np.tile(10000.0 ** -(np.arange(3) / 3), 2))
    cos, sin = ("arg1", "arg2") if cos_first else ("arg2", "arg1")
    np.testing.assert_allclose(buffers[cos], np.cos(angles), rtol=1e-6)
    np.testing.assert_allclose(buffers[sin], np.sin(angles), rtol=1e-6, atol=1e-7)


def test_a_table_that_something_else_is_done_with_is_a_weight(tmp_path: Path) -> None:
    file = tmp_path / "gates.mlir"
    both = HALVES.replace("STRAIGHT", "%w, %first").replace("TURNED", "%second, %turned")
    file.write_text(both.replace("stablehlo.multiply %w", "stablehlo.add %w"))
    assert not load_model(file).manifest.of_role("buffer")


def test_an_integer_table_among_the_weights_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ids.mlir"
    file.write_text(HALVES.replace("STRAIGHT", "%w, %first").replace("TURNED", "%second, %turned").replace(
        "%one: tensor<4x6xf32>", "%ids: tensor<4xi64>, %one: tensor<4x6xf32>"))  # fmt: skip
    with pytest.raises(UserError, match=r"argument 'arg1' of type i64 cannot be trained; give it the role \"buffer\""):
        load_model(file)


# --- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["nanogpt_bf16", "nanochat_d2_bf16", "qwen"])
def test_the_compiled_step_is_verified_and_the_loss_falls(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    step = build_train_step(model, StepOptions(weight_decay=0))
    store, host = BlobStore(tmp_path), Target("cpu", "host", host_features())
    artifact = compile_artifact(step, host, store)
    params, buffers = model.initial("param"), model.initial("buffer")

    report = verify_artifact(
        step,
        artifact,
        lambda made, spec: open_executor(store.path(store.put(made.data)), spec, backend="cpu"),
        params=params,
        buffers=buffers,
        local=host,
        cache=store,
    )
    assert report.worst_error < 1
    assert report.against == "XLA"
    manifest = read_manifest(store, artifact.digest)
    assert manifest is not None
    assert manifest.notes == report.notes == step.notes != ()
    assert step.notes[0] in report.summary
    batch = numbers(model)[1]
    run = open_executor(store.path(artifact.digest), step.spec, backend="cpu")
    try:
        run.load(params, buffers, None)
        losses = [run.train_step(index, 0.02, batch)[0] for index in range(12)]
    finally:
        run.close()
    assert losses[0] == pytest.approx(np.log(VOCABULARY), rel=0.1)
    assert losses[-1] < 0.8 * losses[0]
