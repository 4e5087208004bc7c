"""Modules as torch-mlir writes them: foreign constants, 64-bit islands, lifted buffers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checked_step import checked
from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import load_model
from planetary.compiler.frontend.manifest import Role
from planetary.compiler.step.train_step import build_train_step
from planetary.core.errors import CompileError, UserError

# loss = mean((x·w·table + b - y)² · scale), where the last product is taken in 64 bits and `table` is a lifted
# buffer between two parameters.
EXPORTED = """
module attributes {torch.debug_module_name = "Linear"} {
  ml_program.global private mutable @global_seed(dense<0> : tensor<i64>) : tensor<i64>
  func.func @main(%w: tensor<4x3xf32>, %table: tensor<3xf32>, %b: tensor<3xf32>, %x: tensor<2x4xf32>,
      %y: tensor<2x3xf32>) -> tensor<f32> {
    %zero = arith.constant dense<0.0> : tensor<f32>
    %number = arith.constant 0.5 : f64
    %scale = tensor.from_elements %number : tensor<f64>
    %count = arith.constant dense<6.0> : tensor<f32>
    %weights = stablehlo.constant dense_resource<each> : tensor<3xf32>
    %unused = arith.constant 7 : i64
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<2x4xf32>, tensor<4x3xf32>) -> tensor<2x3xf32>
    %t = stablehlo.multiply %table, %weights : tensor<3xf32>
    %1 = stablehlo.broadcast_in_dim %t, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>
    %2 = stablehlo.multiply %0, %1 : tensor<2x3xf32>
    %3 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>
    %4 = stablehlo.add %2, %3 : tensor<2x3xf32>
    %5 = stablehlo.subtract %4, %y : tensor<2x3xf32>
    %6 = stablehlo.multiply %5, %5 : tensor<2x3xf32>
    %7 = stablehlo.convert %6 : (tensor<2x3xf32>) -> tensor<2x3xf64>
    %8 = stablehlo.broadcast_in_dim %scale, dims = [] : (tensor<f64>) -> tensor<2x3xf64>
    %9 = stablehlo.multiply %7, %8 : tensor<2x3xf64>
    %10 = stablehlo.convert %9 : (tensor<2x3xf64>) -> tensor<2x3xf32>
    %11 = stablehlo.reduce(%10 init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<2x3xf32>, tensor<f32>) -> tensor<f32>
    %12 = stablehlo.divide %11, %count : tensor<f32>
    return %12 : tensor<f32>
  }
}
{-#
  dialect_resources: { builtin: { each: "0x040000000000803F0000004000004040" } }
#-}
"""
TABLE = np.array([1.0, -1.0, 0.5], np.float32)
ROLES: dict[str, Role] = {"arg1": "buffer"}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model, values = tmp_path / "linear.mlir", tmp_path / "values.safetensors"
    model.write_text(EXPORTED)
    save_file({"arg1": TABLE}, values)
    return model, values


def numbers() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(4, 3), (3,), (3,), (2, 4), (2, 3)]
    made = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    made[1] = TABLE
    return made


def test_foreign_constants_keep_their_values_and_gradients(files: tuple[Path, Path]) -> None:
    model = load_model(files[0], roles=ROLES, init=files[1])
    assert [a.role for a in model.manifest.arguments] == ["param", "buffer", "param", "input", "target"]
    assert "arith" not in model.text
    w, table, b, x, y = numbers()
    scale = table * np.array([1, 2, 3], np.float32)
    error = x @ w * scale + b - y
    assert run_reference(model.stablehlo, "main", numbers(), ["f32"])[0] == pytest.approx(
        0.5 * np.mean(error**2), rel=1e-6
    )
    text = differentiate(model.stablehlo, [0, 2])
    by_w, by_b = run_reference(text, "main", [*numbers(), np.asarray(1, np.float32)], ["f32", "f32"])
    np.testing.assert_allclose(by_b, error.sum(0) / 6, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_w, x.T @ (error * scale) / 6, rtol=1e-5, atol=1e-6)


def test_a_value_for_an_argument_that_is_not_there_is_refused(files: tuple[Path, Path]) -> None:
    save_file({"arg9": TABLE}, files[1])
    with pytest.raises(UserError, match=r"name 'arg9', which .*linear.mlir does not have; it has: arg0, arg1"):
        load_model(files[0], init=files[1])


def test_bytecode_loads_like_text(files: tuple[Path, Path], tmp_path: Path) -> None:
    portable = tmp_path / "linear.mlirbc"
    portable.write_bytes(load_model(files[0]).stablehlo)
    again = load_model(portable, roles=ROLES, init=files[1])
    assert again.text == load_model(files[0]).text


@pytest.mark.parametrize("kind", ["i1", "i8", "bf16", "f64", "i64"])
def test_resources_of_every_width_are_read(tmp_path: Path, kind: str) -> None:
    data = {
        "i1": "0001",
        "i8": "FF02",
        "bf16": "803F0040",
        "f64": "000000000000F03F0000000000000040",
        "i64": "01000000000000000200000000000000",
    }[kind]
    expected = {"i1": [0, 1], "i8": [-1, 2]}.get(kind, [1, 2])
    convert = f"stablehlo.convert %r : (tensor<2x{kind}>) -> tensor<2xf32>"
    file = tmp_path / "model.mlir"
    file.write_text(
        f"""module {{
  func.func @main(%w: tensor<2xf32>, %x: tensor<2xf32>, %y: tensor<2xf32>) -> tensor<f32> {{
    %r = arith.constant dense_resource<"a.b"> : tensor<2x{kind}>
    %f = {convert}
    %0 = stablehlo.multiply %f, %w : tensor<2xf32>
    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %z) applies stablehlo.add across dimensions = [0]
      : (tensor<2xf32>, tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }}
}}
{{-# dialect_resources: {{ builtin: {{ "a.b": "0x08000000{data}" }} }} #-}}
"""
    )
    unit = np.array([1, 10], np.float32)
    found = run_reference(load_model(file).stablehlo, "main", [unit, unit, unit], ["f32"])[0]
    assert found == expected[0] + 10 * expected[1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%s = arith.addf %zero, %count : tensor<f32>", "cannot use arith.addf at .* only constants"),
        ("%s = math.exp %zero : tensor<f32>", "cannot use math.exp"),
        ("%s = ml_program.global_load @global_seed : tensor<i64>", "cannot parse the model.*ml_program"),
    ],
)
def test_other_foreign_operations_are_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "linear.mlir"
    file.write_text(EXPORTED.replace("%unused", line + "\n    %unused"))
    with pytest.raises(CompileError, match=f"(?s){says}"):
        load_model(file)


@pytest.mark.compiles
def test_the_compiled_step_is_the_references(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = load_model(files[0], roles=ROLES, init=files[1])
    step = build_train_step(model)
    assert [spec.name for spec in step.spec.buffers] == ["arg1"]
    assert checked(model, step, tmp_path).worst_error < 1
