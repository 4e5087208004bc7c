"""Derivative rules of a JAX author survive export: the compiled gradient is `jax.grad`'s."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import export_loss
from planetary.compiler.step.train_step import build_train_step
from planetary.core.errors import CompileError, UnsupportedOpError

RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 4)).astype(np.float32)
X = RNG.normal(size=(4, 4)).astype(np.float32)
stop = jax.lax.stop_gradient


@jax.custom_vjp
def rounded(x: Any) -> Any:
    return jnp.round(x * 4) / 4


rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (3 * ct,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(tree: Any, factor: float, count: Any) -> Any:
    return {"y": tree["a"] * tree["b"] * factor, "n": count + 1}


scaled.defvjp(
    lambda tree, factor, count: (scaled(tree, factor, count), (tree, count)),
    lambda factor, kept, ct: (
        {"a": ct["y"] * 7, "b": ct["y"] * factor * kept[1]},
        np.zeros((), jax.dtypes.float0),
    ),
)


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -0.05, 0.05)


clipped.defjvp(lambda values, slopes: (clipped(*values), slopes[0] * jnp.cos(values[0])))


CPU = jax.devices("cpu")[0]
TABLE = jnp.asarray(RNG.normal(size=(4, 4)).astype(np.float32))


@jax.custom_vjp
def tabled(x: Any) -> Any:
    """Closes over an array, which becomes an operand of the exported function."""
    return x * TABLE


tabled.defvjp(lambda x: (tabled(x), x), lambda x, ct: (ct * TABLE * x,))


def in_scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, row: (stop(c) * row + clipped(c), rounded(c)), x[0], w)[1]


def in_cond(w: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda a: rounded(a) * a, lambda a: stop(a) * a, w)


def in_loop(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(rounded(c) * stop(w) + x), w)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "stop_gradient": lambda w, x: stop(x @ w) * w,
    "straight_through": lambda w, x: w + stop(jnp.round(w) - w),
    "custom_vjp": lambda w, x: rounded(x @ w) * w,
    "custom_vjp_of_a_tree": lambda w, x: scaled({"a": w, "b": x @ w}, 2.5, jnp.int32(3))["y"],
    "custom_jvp": lambda w, x: clipped(x @ w) * w,
    "nested_jit": jax.jit(lambda w, x: jax.jit(clipped)(w) * jax.jit(stop)(w)),
    "scan": in_scan,
    "cond": in_cond,
    "fori_loop": in_loop,
    "vmap": lambda w, x: jax.vmap(lambda a, b: rounded(a) * clipped(b) * stop(a))(w, x @ w),
    "remat": jax.checkpoint(lambda w, x: rounded(jnp.sin(w)) * clipped(x @ w) * stop(w)),
    "rule_within_a_rule": lambda w, x: rounded(clipped(w) * stop(w)),
    "linear_solve": lambda w, x: jnp.linalg.solve(jnp.eye(4) * 3 + w, x),
    "inv_and_det": lambda w, x: jnp.linalg.inv(w) * jnp.linalg.det(w) + jnp.linalg.slogdet(w @ w.T)[1],
    "expm": lambda w, x: jax.scipy.linalg.expm(w - w.T) * x,
    "qr": lambda w, x: jnp.linalg.qr(w)[0] * x + jnp.linalg.qr(w[:, :3])[1].sum(),
    "cholesky": lambda w, x: jnp.linalg.cholesky(w @ w.T + jnp.eye(4)) * x,
    "rule_with_a_table": lambda w, x: tabled(w) * x,
    "rule_in_a_window": lambda w, x: jax.lax.cumlogsumexp(w, axis=1) + jax.lax.cumlogsumexp(w * x, reverse=True),
    "placed": lambda w, x: jax.lax.with_sharding_constraint(w @ x, jax.sharding.SingleDeviceSharding(CPU)) * w,
    "batched_factors": lambda w, x: jnp.linalg.inv(jnp.stack([w, w.T + 2 * jnp.eye(4)])) * x,
    "library_rules": lambda w, x: (
        jax.nn.relu(w) + jax.nn.softmax(w) * x + jax.nn.logsumexp(w) + jnp.sinc(w) + jax.nn.softplus(w) * jnp.i0(w)
    ),
}


_SLOW = {"inv_and_det", "expm", "batched_factors", "library_rules", "rule_in_a_window"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in _SLOW else ()) for n in CASES])
def test_gradient_is_that_of_jax(name: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(CASES[name](p["w"], x)))

    expected = jax.value_and_grad(loss)({"w": W}, X)
    model = export_loss(loss, {"w": W}, (X,))
    given = run_reference(differentiate(model.stablehlo), "main", [W, X, np.float32(1)], ["f32"])[0]
    value = run_reference(model.stablehlo, "main", [W, X], ["f32"])[0]
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(given, expected[1]["w"], rtol=2e-4, atol=2e-5)


def test_model_without_rules_is_exported_as_jax_lowers_it() -> None:
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]))  # noqa: E731
    plain = jax.jit(loss, keep_unused=True).lower({"w": W}, X).as_text()
    assert "composite" not in export_loss(loss, {"w": W}, (X,)).text
    assert plain.count("stablehlo.") == export_loss(loss, {"w": W}, (X,)).text.count("stablehlo.")


def test_prints_are_left_out_with_a_note() -> None:
    def loss(p: Any, x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return jnp.sum(jnp.tanh(x @ p["w"]))

    model = export_loss(loss, {"w": W}, (X,))
    assert "custom_call" not in model.text
    assert any("jax.debug.print" in note for note in model.notes)


def test_refused_function_is_named_with_its_line() -> None:
    called = lambda p, x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4, 4), np.float32), p["w"] @ x).sum()  # noqa: E731
    with pytest.raises(CompileError, match=r"line \d+ in pure_callback: this calls a Python function in every step"):
        export_loss(called, {"w": W}, (X,))
    with pytest.raises(CompileError, match=r"test_author_rules\.py, line \d+ in svd: JAX computes this by lapack"):
        export_loss(lambda p, x: jnp.linalg.svd(p["w"] @ x)[1].sum(), {"w": W}, (X,))
    looped = lambda p, x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c * x, p["w"]).sum()  # noqa: E731
    with pytest.raises(UnsupportedOpError, match=r"test_author_rules\.py, line \d+ in .*while: its number of iter"):
        build_train_step(export_loss(looped, {"w": W}, (X,)))
