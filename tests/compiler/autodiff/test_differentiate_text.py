"""Operations that JAX does not emit, written as StableHLO text and checked against finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vjp_oracle import run_stablehlo

from planetary.compiler.autodiff.differentiate import differentiate

CASES = {
    "dot": """
    func.func @main(%a: tensor<2x3xf64>, %b: tensor<3x4xf64>) -> tensor<2x4xf64> {
      %0 = stablehlo.dot %a, %b : (tensor<2x3xf64>, tensor<3x4xf64>) -> tensor<2x4xf64>
      return %0 : tensor<2x4xf64>
    }""",
    "if": """
    func.func @main(%a: tensor<3xf64>, %b: tensor<3xf64>) -> tensor<3xf64> {
      %t = stablehlo.constant dense<true> : tensor<i1>
      %0 = "stablehlo.if"(%t) ({
        %1 = stablehlo.multiply %a, %b : tensor<3xf64>
        stablehlo.return %1 : tensor<3xf64>
      }, {
        stablehlo.return %a : tensor<3xf64>
      }) : (tensor<i1>) -> tensor<3xf64>
      return %0 : tensor<3xf64>
    }""",
    "map": """
    func.func @main(%a: tensor<3xf64>, %b: tensor<3xf64>) -> tensor<3xf64> {
      %0 = "stablehlo.map"(%a, %b) <{dimensions = array<i64: 0>}> ({
      ^bb0(%x: tensor<f64>, %y: tensor<f64>):
        %1 = stablehlo.sine %x : tensor<f64>
        %2 = stablehlo.multiply %1, %y : tensor<f64>
        stablehlo.return %2 : tensor<f64>
      }) : (tensor<3xf64>, tensor<3xf64>) -> tensor<3xf64>
      return %0 : tensor<3xf64>
    }""",
    "batch_norm_training": """
    func.func @main(%a: tensor<4x2xf64>, %s: tensor<2xf64>, %o: tensor<2xf64>)
        -> (tensor<4x2xf64>, tensor<2xf64>, tensor<2xf64>) {
      %0:3 = "stablehlo.batch_norm_training"(%a, %s, %o) <{epsilon = 0.001 : f32, feature_index = 1 : i64}>
        : (tensor<4x2xf64>, tensor<2xf64>, tensor<2xf64>) -> (tensor<4x2xf64>, tensor<2xf64>, tensor<2xf64>)
      return %0#0, %0#1, %0#2 : tensor<4x2xf64>, tensor<2xf64>, tensor<2xf64>
    }""",
    "batch_norm_inference": """
    func.func @main(%a: tensor<4x2xf64>, %s: tensor<2xf64>, %o: tensor<2xf64>, %m: tensor<2xf64>, %v: tensor<2xf64>)
        -> tensor<4x2xf64> {
      %v2 = stablehlo.multiply %v, %v : tensor<2xf64>
      %0 = "stablehlo.batch_norm_inference"(%a, %s, %o, %m, %v2) <{epsilon = 0.01 : f32, feature_index = 1 : i64}>
        : (tensor<4x2xf64>, tensor<2xf64>, tensor<2xf64>, tensor<2xf64>, tensor<2xf64>) -> tensor<4x2xf64>
      return %0 : tensor<4x2xf64>
    }""",
    "torch_index_select": """
    func.func @main(%a: tensor<2x4x3xf64>) -> tensor<2x2x3xf64> {
      %i = stablehlo.constant dense<[3, 3]> : tensor<2xi32>
      %0 = "stablehlo.torch_index_select"(%a, %i) <{dim = 1 : i64, batch_dims = 0 : i64}>
        : (tensor<2x4x3xf64>, tensor<2xi32>) -> tensor<2x2x3xf64>
      return %0 : tensor<2x2x3xf64>
    }""",
    "dynamic_gather": """
    func.func @main(%a: tensor<4x3xf64>) -> tensor<2x3xf64> {
      %i = stablehlo.constant dense<[[1], [9]]> : tensor<2x1xi32>
      %n = stablehlo.constant dense<[1, 3]> : tensor<2xi32>
      %0 = "stablehlo.dynamic_gather"(%a, %i, %n) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
        collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false}>
        : (tensor<4x3xf64>, tensor<2x1xi32>, tensor<2xi32>) -> tensor<2x3xf64>
      return %0 : tensor<2x3xf64>
    }""",
    "dynamic_shapes_that_are_known": """
    func.func @main(%a: tensor<2x3xf64>) -> tensor<2x3x2xf64> {
      %n = stablehlo.constant dense<[3, 2]> : tensor<2xi64>
      %0 = stablehlo.dynamic_reshape %a, %n : (tensor<2x3xf64>, tensor<2xi64>) -> tensor<3x2xf64>
      %m = stablehlo.constant dense<[2, 3, 2]> : tensor<3xi64>
      %1 = stablehlo.dynamic_broadcast_in_dim %0, %m, dims = [1, 2]
        : (tensor<3x2xf64>, tensor<3xi64>) -> tensor<2x3x2xf64>
      %2 = stablehlo.multiply %1, %1 : tensor<2x3x2xf64>
      return %2 : tensor<2x3x2xf64>
    }""",
    "cholesky_of_both_triangles": """
    func.func @main(%a: tensor<2x2xf64>) -> (tensor<2x2xf64>, tensor<2x2xf64>) {
      %t = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x2xf64>) -> tensor<2x2xf64>
      %p = stablehlo.dot %a, %t : (tensor<2x2xf64>, tensor<2x2xf64>) -> tensor<2x2xf64>
      %l = stablehlo.cholesky %p, lower = true : tensor<2x2xf64>
      %u = stablehlo.cholesky %p, lower = false : tensor<2x2xf64>
      return %l, %u : tensor<2x2xf64>, tensor<2x2xf64>
    }""",
    "scatter_that_subtracts": """
    func.func @main(%a: tensor<4xf64>, %u: tensor<3xf64>) -> tensor<4xf64> {
      %i = stablehlo.constant dense<[[1], [1], [7]]> : tensor<3x1xi32>
      %0 = "stablehlo.scatter"(%a, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<
        inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
      ^bb0(%x: tensor<f64>, %y: tensor<f64>):
        %1 = stablehlo.subtract %x, %y : tensor<f64>
        stablehlo.return %1 : tensor<f64>
      }) : (tensor<4xf64>, tensor<3x1xi32>, tensor<3xf64>) -> tensor<4xf64>
      return %0 : tensor<4xf64>
    }""",
    "reduce_with_an_initial_value": """
    func.func @main(%a: tensor<3x2xf64>, %i: tensor<f64>) -> tensor<2xf64> {
      %0 = stablehlo.reduce(%a init: %i) applies stablehlo.multiply across dimensions = [0]
        : (tensor<3x2xf64>, tensor<f64>) -> tensor<2xf64>
      return %0 : tensor<2xf64>
    }""",
}


def argument_shapes(text: str) -> list[tuple[int, ...]]:
    head = text.split("->", maxsplit=1)[0]
    kinds = [part.split(">")[0] for part in head.split("tensor<")[1:]]
    return [tuple(int(n) for n in kind.split("x")[:-1]) for kind in kinds]


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_agree_with_finite_differences(name: str) -> None:
    text = CASES[name]
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(draw.normal(size=shape)) for shape in argument_shapes(text)]
        results = run_stablehlo(text, arguments)
        cotangents = [jnp.asarray(draw.normal(size=r.shape)) for r in results]
        gradients = run_stablehlo(differentiate(text, wrt=range(len(arguments))), [*arguments, *cotangents])
        directions = [draw.normal(size=a.shape) for a in arguments]

        def value(step: float) -> float:
            moved = [a + step * d for a, d in zip(arguments, directions, strict=True)]
            return sum(float((r * c).sum()) for r, c in zip(run_stablehlo(text, moved), cotangents, strict=True))

        measured = (value(1e-6) - value(-1e-6)) / 2e-6
    predicted = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert predicted == pytest.approx(measured, rel=1e-6)
