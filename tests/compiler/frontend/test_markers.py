"""Marks that survive export: stop_gradient and custom gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from vjp_oracle import check

from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.frontend.markers import custom_vjp, stop_gradient

X = jnp.float32([0.5, -1.0, 2.0])


def test_stop_gradient_is_respected_after_export_as_in_jax() -> None:
    function = lambda x: stop_gradient({"a": jnp.sin(x), "n": jnp.int32(2)})["a"] * x  # noqa: E731
    check(function, X)
    np.testing.assert_allclose(jax.grad(lambda x: function(x).sum())(X), jnp.sin(X), rtol=1e-6)


def test_stop_gradient_is_respected_under_vmap() -> None:
    function = jax.vmap(jax.vmap(lambda x: stop_gradient(jnp.sin(x)) * x))
    rows = jnp.stack([X, X + 1])
    check(function, rows)
    np.testing.assert_allclose(jax.grad(lambda x: function(x).sum())(rows), jnp.sin(rows), rtol=1e-6)


def test_a_custom_gradient_is_used_after_export_as_in_jax() -> None:
    def backward(arguments: Any, results: Any, cotangents: Any) -> Any:
        scale = arguments[0]["scale"]
        return {"x": 7 * cotangents["y"], "scale": results["y"] * cotangents["y"] + 0 * scale}, None

    marked = custom_vjp(lambda p, n: {"y": p["x"] * p["scale"] * n, "n": n + 1}, backward)
    function = lambda x, s: marked({"x": x, "scale": s}, jnp.int32(3))["y"] * x  # noqa: E731
    check(function, X, X + 1)
    by_x = jax.grad(lambda x: marked({"x": x, "scale": x}, jnp.int32(3))["y"].sum())(X)
    np.testing.assert_allclose(by_x, 7 + 3 * X * X, rtol=1e-6)


def test_no_composite_is_left_in_the_gradient() -> None:
    marked = custom_vjp(jnp.sin, lambda arguments, results, cotangents: (cotangents,))
    text = jax.jit(lambda x: marked(stop_gradient(x) + x)).lower(X).as_text()
    assert text.count("composite") > 0
    assert "composite" not in differentiate(text)


def test_composite_is_differentiated_through_its_decomposition() -> None:
    """A composite without a rule is differentiated through its decomposition."""
    body = jax.lax.composite(lambda x: jnp.sin(x) * 2, name="somebody.elses")
    text = jax.jit(body).lower(X).as_text()
    assert "composite" in text
    assert "stablehlo.cosine" in differentiate(text)
