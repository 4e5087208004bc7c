"""A clipped gradient with two readers: the update stays equal, and IREE writes it in place without copies."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compiler.plain_iree import compile_for

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.rewrites.normalise import scale_for_each_reader

_KIND = "tensor<16x16xf32>"
UPDATE = f"""
func.func @main(%x: {_KIND}, %s: tensor<f32>, %p: {_KIND} {{iree.abi.output = 0 : index}},
                %m: {_KIND} {{iree.abi.output = 1 : index}}, %v: {_KIND} {{iree.abi.output = 2 : index}})
    -> ({_KIND}, {_KIND}, {_KIND}) {{
  %c = stablehlo.constant dense<0.9> : {_KIND}
  %h = stablehlo.dot_general %x, %p, contracting_dims = [1] x [0] : ({_KIND}, {_KIND}) -> {_KIND}
  %root = stablehlo.sqrt %s : tensor<f32>
  %f = stablehlo.broadcast_in_dim %root, dims = [] : (tensor<f32>) -> {_KIND}
  %g = stablehlo.multiply %h, %f : {_KIND}
  %m1 = stablehlo.multiply %m, %c : {_KIND}
  %m2 = stablehlo.add %m1, %g : {_KIND}
  %g2 = stablehlo.multiply %g, %g : {_KIND}
  %v1 = stablehlo.multiply %v, %c : {_KIND}
  %v2 = stablehlo.add %v1, %g2 : {_KIND}
  %d = stablehlo.divide %m2, %v2 : {_KIND}
  %p2 = stablehlo.subtract %p, %d : {_KIND}
  return %p2, %m2, %v2 : {_KIND}, {_KIND}, {_KIND}
}}"""


def rewritten() -> str:
    with ir.new_context():
        module = ir.parse_module(UPDATE)
        scale_for_each_reader(module)
        ir.verify(module)
        return ir.to_text(module)


def test_two_products_compute_the_same_update() -> None:
    assert rewritten().count("stablehlo.multiply") == UPDATE.count("stablehlo.multiply") + 1
    draw = np.random.default_rng(0)
    given = [draw.random(shape, np.float32) for shape in [(16, 16), (), *[(16, 16)] * 3]]
    before, after = (run_reference(text, "main", given, ["f32"] * 3) for text in (UPDATE, rewritten()))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_iree_copies_moments_unless_there_are_two_products() -> None:
    copies = [
        compile_for("cpu:host", text, "--compile-to=stream").decode().count("stream.cmd.copy")
        for text in (UPDATE, rewritten())
    ]
    assert copies == [2, 0], "IREE writes them in place by itself: the rewrite can go" if not copies[0] else copies
