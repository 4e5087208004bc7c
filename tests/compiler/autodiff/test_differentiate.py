"""`differentiate` as a user meets it: signatures, a GPT, finite differences, errors, zeros."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vjp_oracle import check, run_stablehlo

from planetary.compiler.autodiff.differentiate import differentiate
from planetary.core.errors import CompileError, UnsupportedOpError, UserError


def lowered(function: Any, *arguments: Any) -> str:
    return jax.jit(function, keep_unused=True).lower(*arguments).as_text()


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# --- a small GPT ------------------------------------------------------------------------------------------

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 16, 2, 2, 11, 6


def gpt_parameters() -> list[jax.Array]:
    shapes = [(VOCABULARY, WIDTH), (LENGTH, WIDTH)]
    for _ in range(LAYERS):
        shapes += [
            (WIDTH,),
            (WIDTH, 3 * WIDTH),
            (WIDTH, WIDTH),
            (WIDTH,),
            (WIDTH, 4 * WIDTH),
            (4 * WIDTH, WIDTH),
        ]
    shapes += [(WIDTH, VOCABULARY)]
    return [0.3 * numbers(*shape, seed=i) + (1.0 if len(shape) == 1 else 0.0) for i, shape in enumerate(shapes)]


def gpt_loss(*arguments: jax.Array) -> jax.Array:
    *parameters, tokens, targets = arguments
    it = iter(parameters)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    x = next(it)[tokens] + next(it)
    batch = tokens.shape[0]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for _ in range(LAYERS):
        qkv = norm(x, next(it)) @ next(it)
        q, k, v = (y.reshape(batch, LENGTH, HEADS, -1).transpose(0, 2, 1, 3) for y in jnp.split(qkv, 3, axis=-1))
        scores = jnp.where(mask, jnp.einsum("bhqd,bhkd->bhqk", q, k) / 2.0, -1e9)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
        x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, LENGTH, WIDTH) @ next(it)
        x = x + jax.nn.gelu(norm(x, next(it)) @ next(it)) @ next(it)
    logits = 15.0 * jnp.tanh(x @ next(it) / 15.0)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -chosen.mean()


def gpt_arguments() -> list[jax.Array]:
    draw = np.random.default_rng(5)
    tokens = jnp.asarray(draw.integers(0, VOCABULARY, (2, LENGTH)), jnp.int32)
    return [*gpt_parameters(), tokens, jnp.roll(tokens, -1, 1)]


def test_gpt_gradients_equal_jax() -> None:
    assert check(gpt_loss, *gpt_arguments(), tolerance=1e-5) < 1e-5


@pytest.mark.slow
def test_gpt_gradient_agrees_with_finite_differences() -> None:
    with jax.enable_x64(True):
        finite_difference_check()


def finite_difference_check() -> None:
    arguments = [a.astype(jnp.float64) if a.dtype == jnp.float32 else a for a in gpt_arguments()]
    text = differentiate(lowered(gpt_loss, *arguments), wrt=range(len(arguments) - 2))
    gradients = run_stablehlo(text, [*arguments, jnp.float64(1.0)])
    draw = np.random.default_rng(90)
    direction = [jnp.asarray(draw.normal(size=a.shape)) for a in arguments[:-2]]
    step = 1e-5
    loss = jax.jit(gpt_loss)

    def moved(sign: float) -> float:
        return float(
            loss(
                *[a + sign * step * d for a, d in zip(arguments[:-2], direction, strict=True)],
                *arguments[-2:],
            )
        )

    measured = (moved(1.0) - moved(-1.0)) / (2 * step)
    predicted = sum(float((g * np.asarray(d)).sum()) for g, d in zip(gradients, direction, strict=True))
    assert predicted == pytest.approx(measured, rel=1e-5)


def test_graph_size_is_linear_in_layers() -> None:
    def stack(layers: int) -> int:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = jnp.tanh(x @ w)
            return x.sum()

        return differentiate(lowered(loss, numbers(4, 4), numbers(4, 4)), wrt=(0, 1)).count("\n")

    assert stack(9) - stack(8) == stack(5) - stack(4)


# --- the signature ----------------------------------------------------------------------------------------


def test_arguments_come_first_and_results_follow_wrt() -> None:
    """Arguments are the originals then cotangents and results follow wrt."""

    def function(x: jax.Array, n: jax.Array, y: jax.Array) -> Any:
        return x * y, n + 1, y.sum()

    text = differentiate(lowered(function, numbers(3), jnp.int32(2), numbers(3)), wrt=(2, 0))
    head = next(line for line in text.splitlines() if "@main" in line)
    kinds = ["tensor<3xf32>", "tensor<i32>", "tensor<3xf32>", "tensor<3xf32>", "tensor<i32>", "tensor<f32>"]
    assert [part.split(": ")[1] for part in head.split("(")[1].split(")")[0].split(", ")] == kinds
    assert head.count("->") == 1
    assert head.split("->")[1].count("tensor<3xf32>") == 2
    x, y = numbers(3, seed=1), numbers(3, seed=2)
    by_y, by_x = run_stablehlo(text, [x, jnp.int32(2), y, jnp.ones(3), jnp.int32(7), jnp.float32(3.0)])
    np.testing.assert_allclose(by_y, x + 3.0, rtol=1e-6)
    np.testing.assert_allclose(by_x, y, rtol=1e-6)


def test_an_argument_that_is_not_used_gets_exact_zeros() -> None:
    text = differentiate(lowered(lambda x, y: x * 2, numbers(3), numbers(2)), wrt=(1,))
    (gradient,) = run_stablehlo(text, [numbers(3), numbers(2), jnp.ones(3)])
    assert gradient.tolist() == [0.0, 0.0]
    assert "multiply" not in text


def test_the_same_value_as_two_results_and_an_argument_as_result() -> None:
    def function(x: jax.Array) -> Any:
        y = jnp.sin(x)
        return y, y, x

    check(function, numbers(4))


def test_private_functions_are_differentiated_through() -> None:
    inner = jax.jit(lambda x: jnp.tanh(x) * x)
    text = lowered(lambda x: inner(inner(x)), numbers(3))
    assert "call @" in text
    check(lambda x: inner(inner(x)), numbers(3))


def test_a_portable_artifact_is_read() -> None:
    exported = jax.export.export(jax.jit(jnp.tanh))(numbers(3))
    text = differentiate(exported.mlir_module_serialized, wrt=(0,))
    (gradient,) = run_stablehlo(text, [numbers(3), jnp.ones(3)])
    np.testing.assert_allclose(gradient, 1 - np.tanh(numbers(3)) ** 2, rtol=1e-5)


def test_dead_operations_leave_nothing_behind() -> None:
    def function(x: jax.Array) -> jax.Array:
        jnp.exp(x)
        return 3.0 * x

    assert "exponential" not in differentiate(lowered(function, numbers(3)))


# --- errors -----------------------------------------------------------------------------------------------


def test_underivable_operation_is_named_with_its_place() -> None:
    text = lowered(lambda x: jnp.nextafter(x, 2.0) * x, numbers(3))
    with pytest.raises(
        UnsupportedOpError, match=r"chlo.next_after at line \d+ of the StableHLO text: .*nextafter"
    ) as caught:
        differentiate(text)
    assert caught.value.op == "chlo.next_after"
    assert caught.value.location.startswith("line ")


def test_an_unknown_operation_is_an_error_and_never_a_zero() -> None:
    text = """
    func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %y = stablehlo.custom_call @mystery(%x) : (tensor<3xf32>) -> tensor<3xf32>
      return %y : tensor<3xf32>
    }"""
    with pytest.raises(UnsupportedOpError, match="custom_call @mystery"):
        differentiate(text)


def test_underivable_operation_off_the_path_is_harmless() -> None:
    check(lambda x, y: x * jnp.nextafter(y, 2.0), numbers(3), numbers(3), wrt=(0,))


@pytest.mark.parametrize(
    ("wrt", "message"),
    [((1,), "type tensor<i32>"), ((2,), "has 2 arguments"), ((-1,), "has 2 arguments"), ((), "empty")],
)
def test_wrong_positions_are_refused(wrt: tuple[int, ...], message: str) -> None:
    text = lowered(lambda x, n: x * n, numbers(3), jnp.int32(1))
    with pytest.raises(UserError, match=message):
        differentiate(text, wrt=wrt)


def test_text_that_does_not_parse_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="cannot parse the model"):
        differentiate("func.func @main(%x: tensor<3xf32>) -> {")


def test_a_dynamic_shape_is_a_compile_error() -> None:
    text = """
    func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {
      %y = stablehlo.sine %x : tensor<?xf32>
      return %y : tensor<?xf32>
    }"""
    with pytest.raises(CompileError, match="every shape must be a number"):
        differentiate(text)


def test_a_recursive_function_is_a_compile_error() -> None:
    text = """
    func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %y = call @f(%x) : (tensor<f32>) -> tensor<f32>
      return %y : tensor<f32>
    }
    func.func private @f(%x: tensor<f32>) -> tensor<f32> {
      %y = call @f(%x) : (tensor<f32>) -> tensor<f32>
      return %y : tensor<f32>
    }"""
    with pytest.raises(CompileError, match="calls itself"):
        differentiate(text)


def test_a_softmax_has_no_gradient_through_its_maximum() -> None:
    for function in (jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp):
        text = differentiate(lowered(function, numbers(2, 3)))
        assert "stablehlo.compare" not in text, text


def test_extrema_of_complex_numbers_share_among_ties_as_jax_does() -> None:
    parts = [-np.inf, -1.0, 0.0, 1.0, np.inf, np.nan]
    values = [complex(re, im) for re in parts for im in parts]
    triples = np.array(list(itertools.product(values, repeat=3)), np.complex64)

    ct = np.full(len(triples), 2.0 - 1.0j, np.complex64)

    for extremum in (jnp.max, jnp.min):
        function = functools.partial(extremum, axis=1)
        (found,) = run_stablehlo(differentiate(lowered(function, triples)), [triples, ct])
        (expected,) = jax.jit(lambda x, ct, function=function: jax.vjp(function, x)[1](ct))(triples, ct)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "start", "expected"),
    [("maximum", 2.0, [[0, 0], [0, 5], [0, 7]]), ("minimum", 1.0, [[3, 0], [0, 0], [3.5, 3.5]])],
)
def test_an_initial_value_that_wins_leaves_no_gradient(name: str, start: float, expected: list[list[float]]) -> None:
    text = f"""
    func.func @main(%x: tensor<3x2xf32>) -> tensor<3xf32> {{
      %start = stablehlo.constant dense<{start}> : tensor<f32>
      %y = stablehlo.reduce(%x init: %start) applies stablehlo.{name} across dimensions = [1]
          : (tensor<3x2xf32>, tensor<f32>) -> tensor<3xf32>
      return %y : tensor<3xf32>
    }}"""
    x = np.array([[0.0, 1.5], [1.25, 3.0], [0.5, 0.5]], np.float32)
    if name == "maximum":
        x[2, 1] = 4.0
    (found,) = run_stablehlo(differentiate(text), [x, np.array([3.0, 5.0, 7.0], np.float32)])
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
