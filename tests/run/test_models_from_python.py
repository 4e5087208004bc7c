"""`planetary.export`, `planetary.compile` and `planetary.vjp`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import planetary
from planetary.compiler.check.interpreter import run_interpreter
from planetary.core.errors import UserError

SQUARE = """
func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
  %y = stablehlo.multiply %x, %x : tensor<3xf32>
  return %y : tensor<3xf32>
}
"""


def build(width: int = 4) -> Any:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] - y) ** 2)

    return loss, {"w": jnp.zeros((width, 1))}, (jnp.ones((8, width)), jnp.ones((8, 1)))


def test_a_function_is_exported_and_its_folder_is_a_model(tmp_path: Path) -> None:
    model = planetary.export(build, tmp_path / "model", options={"width": 3})
    assert (model.param_count, model.manifest.arguments[0].name) == (3, "w")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "init.safetensors",
        "manifest.json",
        "model.mlir",
    ]
    with pytest.raises(UserError, match="already holds a model"):
        planetary.export(build, tmp_path / "model")
    assert planetary.export(build, tmp_path / "model", force=True).param_count == 4


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(UserError, match=r"must return \(loss_fn, params, example_batch\), found int"):
        planetary.export(lambda: 3)
    with pytest.raises(UserError, match="of the zoo"):
        planetary.compile("nowhere")
    with pytest.raises(UserError, match="learning rate"):
        planetary.compile(planetary.export(build), step={"learning_rate": 0.1})
    with pytest.raises(UserError, match="they are"):
        planetary.compile(planetary.export(build), step={"optimizer": 3})


def test_vjp_of_text_bytes_file_and_model_is_that_of_jax(tmp_path: Path) -> None:
    x, cotangent = np.array([1.0, -2.0, 3.0], np.float32), np.array([1.0, 1.0, 0.5], np.float32)
    (tmp_path / "square.mlir").write_text(SQUARE)
    texts = [planetary.vjp(SQUARE), planetary.vjp(SQUARE.encode()), planetary.vjp(tmp_path / "square.mlir")]
    assert len(set(texts)) == 1
    np.testing.assert_array_equal(run_interpreter(texts[0], "main", [x, cotangent], ["f32"])[0], 2 * x * cotangent)
    loss, params, batch = build()
    text = planetary.vjp(planetary.export(build))
    arguments = [np.asarray(params["w"]), *map(np.asarray, batch), np.ones((), np.float32)]
    found = run_interpreter(text, "main", arguments, ["f32"])
    np.testing.assert_allclose(found[0], jax.grad(loss)(params, *batch)["w"], rtol=1e-6)
    with pytest.raises(UserError, match="No such file"):
        planetary.vjp(tmp_path / "nowhere.mlir")


@pytest.mark.compiles
def test_a_step_is_compiled_beside_a_running_event_loop(tmp_path: Path) -> None:
    model = planetary.export(build)

    async def notebook() -> Any:
        return planetary.compile(model, "cpu:host", cache=tmp_path / "cache", output=tmp_path / "step.vmfb")

    compiled = asyncio.run(notebook())
    assert compiled.path == tmp_path / "step.vmfb"
    assert compiled.path.stat().st_size == compiled.published.nbytes
    assert compiled.step.spec.param_count == 4
    assert planetary.compile(model, "cpu:host", cache=tmp_path / "cache").published.cached
