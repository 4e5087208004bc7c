from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from planetary.compiler.frontend.export import export_loss, export_model, load_model
from planetary.core.errors import CompileError, UserError

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "sequence_length": 4, "batch_size": 2}

BARE = """
module {
  func.func @main(%w: tensor<4x3xf32>, %b: tensor<3xf32>, %x: tensor<2x4xf32>, %y: tensor<2x3xf32>)
      -> tensor<f32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<2x4xf32>, tensor<4x3xf32>) -> tensor<2x3xf32>
    %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>
    %2 = stablehlo.add %0, %1 : tensor<2x3xf32>
    %3 = stablehlo.subtract %2, %y : tensor<2x3xf32>
    %4 = stablehlo.multiply %3, %3 : tensor<2x3xf32>
    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %5 = stablehlo.reduce(%4 init: %z) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<2x3xf32>, tensor<f32>) -> tensor<f32>
    return %5 : tensor<f32>
  }
}
"""


def test_names_are_pytree_paths_and_values_are_stored() -> None:
    model = export_model("planetary.models.nanochat:build", TINY)
    names = [a.name for a in model.manifest.arguments]
    assert {"blocks.0.attention.query", "embedding", "head"} < set(names)
    assert names[-2:] == ["tokens", "targets"]
    assert [a.role for a in model.manifest.arguments][-2:] == ["input", "target"]
    assert model.param_count == 2 * 16 * 8 + 12 * 8 * 8
    assert model.initial("param")["embedding"].shape == (16, 8)
    assert model.manifest.options == TINY


def test_a_model_survives_its_folder(tmp_path: Path) -> None:
    model = export_model("planetary.models.nanochat:build", TINY)
    model.save(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.manifest == model.manifest
    assert again.digest == model.digest
    assert "stablehlo.dot_general" in again.text
    for name, value in model.initial("param").items():
        np.testing.assert_array_equal(again.initial("param")[name], value)


def test_function_in_a_file_is_found_and_its_mistakes_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import jax.numpy as jnp\nimport numpy as np\n"
        "def build(width=3):\n"
        "    loss = lambda p, x, y: jnp.mean((x @ p['w'] - y) ** 2)\n"
        "    return loss, {'w': np.zeros((width, 1), np.float32)}, (np.zeros((2, width), np.float32),"
        " np.zeros((2, 1), np.float32))\n"
        "def empty(): return 3\n"
        "def fails(): raise RuntimeError('no data')\n"
    )
    model = export_model(f"{file}:build", {"width": 5})
    assert model.manifest.of_role("param")[0].shape == (5, 1)
    for source, options, says in [
        (f"{file}:bild", {}, "no function 'bild'.*build"),
        (f"{file}:build", {"depth": 1}, "depth"),
        (f"{file}:empty", {}, "must return"),
        (f"{file}:fails", {}, "fails failed: RuntimeError: no data"),
        (f"{tmp_path}/gone.py:build", {}, "no file"),
        ("no.such.module:build", {}, "there is no module no.such.module"),
        ("nothing", {}, "module:function"),
    ]:
        with pytest.raises(UserError, match=says):
            export_model(source, options)


def test_integer_leaves_are_buffers_and_roles_can_be_overridden() -> None:
    params = {
        "w": np.ones(3, np.float32),
        "table": np.arange(3, dtype=np.int32),
        "scale": np.ones((), np.float32),
    }

    def loss(p: dict, x: jnp.ndarray, y: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum((p["w"][p["table"]] * p["scale"] * x - y) ** 2)

    x = np.zeros(3, np.float32)
    model = export_loss(loss, params, (x, x), roles={"scale": "buffer"})
    assert [spec.name for spec in model.manifest.of_role("buffer")] == ["scale", "table"]
    assert [spec.name for spec in model.manifest.of_role("param")] == ["w"]
    np.testing.assert_array_equal(model.initial("buffer")["table"], params["table"])


def test_a_loss_must_be_one_float_scalar() -> None:
    x = np.zeros(3, np.float32)
    p = {"w": x}
    for loss, says in [
        (lambda p, x: p["w"] * x, "scalar"),
        (lambda p, x: (jnp.sum(p["w"]), jnp.sum(x)), "scalar"),
        (lambda p, x: jnp.sum(x).astype(jnp.int32), "scalar"),
        (lambda p, x: jnp.sum(p["wrong"]), "wrong"),
    ]:
        with pytest.raises(CompileError, match=says):
            export_loss(loss, p, (x,))
    with pytest.raises(CompileError, match=r"test_export.py, line \d+ in pure_callback: this calls a Python function"):
        export_loss(lambda p, x: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), jnp.float32), p["w"]), p, (x,))
    with pytest.raises(UserError, match=r"'name' is str"):
        export_loss(lambda p, x: jnp.sum(x), {"name": "gpt"}, (x,))


def test_a_bare_file_gets_names_roles_and_values(tmp_path: Path) -> None:
    file = tmp_path / "linear.mlir"
    file.write_text(BARE)
    model = load_model(file)
    assert [a.role for a in model.manifest.arguments] == ["param", "param", "input", "target"]
    np.testing.assert_array_equal(model.initial("param")["arg1"], np.ones(3, np.float32))
    assert model.manifest.model == "linear"

    with pytest.raises(UserError, match=r"'arg1' \(buffer\) has no stored value"):
        load_model(file, roles={"arg1": "buffer"})
    save_file({"arg1": np.full(3, 7, np.float32)}, tmp_path / "values.safetensors")
    model = load_model(file, roles={"arg1": "buffer"}, init=tmp_path / "values.safetensors")
    np.testing.assert_array_equal(model.initial("buffer")["arg1"], np.full(3, 7, np.float32))
    with pytest.raises(UserError, match="cannot read the initial values"):
        load_model(file, init=file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("this is no module", "cannot parse"),
        (
            BARE.replace("-> tensor<f32> {", "-> tensor<2x3xf32> {").replace(
                "return %5 : tensor<f32>", "return %4 : tensor<2x3xf32>"
            ),
            "scalar",
        ),
        ("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }", "dynamic"),
        ("module {}", "main"),
        ("func.func @main(%x: tensor<i32>) -> tensor<i32> { return %x : tensor<i32> }", "scalar"),
    ],
)
def test_a_file_that_is_no_loss_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "wrong.mlir"
    file.write_text(text)
    with pytest.raises(CompileError, match=says):
        load_model(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone"):
        load_model(tmp_path / "gone.mlir")
