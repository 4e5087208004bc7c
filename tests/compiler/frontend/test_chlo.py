from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend import chlo
from planetary.compiler.frontend.export import export_loss, export_model
from planetary.compiler.frontend.markers import stop_gradient
from planetary.compiler.step.train_step import build_train_step

X = np.array([-30.0, -1.5, 0.0, 0.3, 2.0, 30.0], np.float32)


def loss(params: dict, x: jnp.ndarray, y: jnp.ndarray) -> jnp.ndarray:
    values, _ = jax.lax.top_k(params["w"] * x, 4)
    exact = jax.nn.gelu(params["w"] * x, approximate=False)
    return jnp.sum(values) + jnp.sum(exact * y) + jnp.sum(jax.lax.lgamma(jnp.abs(x) + params["w"]))


@pytest.mark.slow
def test_stored_model_keeps_chlo_operations_and_gradients() -> None:
    w = np.full(6, 1.5, np.float32)
    model = export_loss(loss, {"w": w}, (X, X))
    with ir.new_context():
        stored = ir.to_text(ir.parse_module(model.stablehlo))
    assert 'stablehlo.composite "chlo.erfc"' in stored
    assert " chlo." not in stored  # no operation of a dialect that the portable format lacks
    assert "chlo.top_k" in model.text
    assert "composite" not in model.text
    found = run_reference(differentiate(model.stablehlo), "main", [w, X, X, np.float32(1)], ["f32"])[0]
    expected = np.asarray(jax.grad(loss)({"w": w}, X, X)["w"])
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    value = run_reference(model.stablehlo, "main", [w, X, X], ["f32"])[0]  # by the decompositions alone
    np.testing.assert_allclose(value, loss({"w": w}, X, X), rtol=1e-5)


def test_equal_operations_share_a_decomposition() -> None:
    text = """
    func.func @main(%x: tensor<3xf32>, %y: tensor<2xf32>) -> (tensor<3xf32>, tensor<2xf32>) {
      %0 = chlo.erf %x : tensor<3xf32> -> tensor<3xf32>
      %1 = chlo.erf %0 : tensor<3xf32> -> tensor<3xf32>
      %2 = chlo.erf %y : tensor<2xf32> -> tensor<2xf32>
      return %1, %2 : tensor<3xf32>, tensor<2xf32>
    }"""
    with ir.new_context():
        module = ir.parse_module(text)
        chlo.to_composites(module)
        assert len(ir.functions(module)) == 3
        chlo.from_composites(module)
        ir.run_passes(module, "symbol-dce")
        assert ir.to_text(module) == ir.to_text(ir.parse_module(text))


def test_a_training_step_has_neither_chlo_nor_composites() -> None:
    def marked(params: dict, x: jnp.ndarray, y: jnp.ndarray) -> jnp.ndarray:
        return loss(params, stop_gradient(x), y)

    step = build_train_step(export_loss(marked, {"w": X}, (X, X)))
    assert "chlo." not in step.stablehlo
    assert "composite" not in step.stablehlo
    assert "call" not in step.stablehlo


def test_a_zoo_model_with_the_exact_gelu_is_portable() -> None:
    from planetary.models.zoo import ZOO

    assert export_model(ZOO["vit"].source, ZOO["vit"].options("tiny")).param_count > 0
