"""Steps of models that take their tokens in other types than i32 give what the reference gives, on every runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planetary.compiler.backends.iree import Artifact, compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import load_model
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.step import StepSpec
from planetary.runtime.executor import Executor, open_executor
from planetary.runtime.host import host_features

HOST = Target("cpu", "host", host_features())
pytestmark = pytest.mark.compiles

# One weight per token, looked up by comparison: the mean of (w[x] - y)^2.
MODEL = """
module {
  func.func @main(%w: tensor<8xf32>, %x: tensor<2x4xINPUT>, %y: tensor<2x4xTARGET>) -> tensor<f32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %eight = stablehlo.constant dense<8.0> : tensor<f32>
    %ids = stablehlo.iota dim = 2 : tensor<2x4x8xINPUT>
    %wide = stablehlo.broadcast_in_dim %x, dims = [0, 1] : (tensor<2x4xINPUT>) -> tensor<2x4x8xINPUT>
    %same = stablehlo.compare EQ, %wide, %ids : (tensor<2x4x8xINPUT>, tensor<2x4x8xINPUT>) -> tensor<2x4x8xi1>
    %ones = stablehlo.constant dense<1.0> : tensor<2x4x8xf32>
    %zeros = stablehlo.constant dense<0.0> : tensor<2x4x8xf32>
    %one = stablehlo.select %same, %ones, %zeros : tensor<2x4x8xi1>, tensor<2x4x8xf32>
    %found = stablehlo.dot_general %one, %w, contracting_dims = [2] x [0]
      : (tensor<2x4x8xf32>, tensor<8xf32>) -> tensor<2x4xf32>
    %target = stablehlo.convert %y : (tensor<2x4xTARGET>) -> tensor<2x4xf32>
    %off = stablehlo.subtract %found, %target : tensor<2x4xf32>
    %square = stablehlo.multiply %off, %off : tensor<2x4xf32>
    %sum = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>
    %mean = stablehlo.divide %sum, %eight : tensor<f32>
    return %mean : tensor<f32>
  }
}
"""


@pytest.mark.parametrize("backend", ["cpu", "pjrt:cpu"])
@pytest.mark.parametrize(("inputs", "targets"), [("i64", "i64"), ("ui16", "i64"), ("ui32", "i32")])
def test_a_step_takes_tokens_as_the_model_wants_them(inputs: str, targets: str, backend: str, tmp_path: Path) -> None:
    source = tmp_path / "model.mlir"
    source.write_text(MODEL.replace("INPUT", inputs).replace("TARGET", targets))
    step = build_train_step(load_model(str(source)), StepOptions(optimizer="sgd", momentum=0.0))
    target = HOST if backend == "cpu" else Target("pjrt:cpu", "stablehlo")
    artifact = compile_artifact(step, target)
    weights = {step.spec.params[0].name: np.arange(8, dtype=np.float32)}

    def opened(made: Artifact, spec: StepSpec) -> Executor:
        (tmp_path / made.digest).write_bytes(made.data)
        return open_executor(tmp_path / made.digest, spec, backend=backend, threads=None)

    verify_artifact(step, artifact, opened, params=weights, buffers={}, local=HOST)
    executor = opened(artifact, step.spec)
    try:
        executor.load(weights, {}, None)
        x = np.array([[0, 1, 2, 3], [7, 7, 7, 7]], step.spec.batch[0].zeros().dtype)
        y = np.array([[0, 1, 2, 4], [7, 7, 7, 7]], step.spec.batch[1].zeros().dtype)
        assert executor.eval_step((x, y)) == pytest.approx(1 / 8)
    finally:
        executor.close()
