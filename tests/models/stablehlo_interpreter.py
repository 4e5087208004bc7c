"""Runs StableHLO without compiling it: on small graphs far quicker than any compiler is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir as mlir
from jaxlib.mlir.dialects import stablehlo

from planetary.compiler import ir
from planetary.compiler.frontend import chlo


def interpret(text: str, arguments: Sequence[Any]) -> list[np.ndarray]:
    """The results of `main` for f32 and i32 arrays, by the StableHLO reference interpreter."""
    with ir.new_context():
        module = ir.parse_module(text)
        chlo.expand(module)
        given = []
        for array in map(np.asarray, arguments):
            element = {"float32": ir.f32(), "int32": ir.i32()}[array.dtype.name]
            given.append(mlir.DenseElementsAttr.get(np.ascontiguousarray(array), type=ir.tensor(array.shape, element)))
        return [np.array(mlir.DenseElementsAttr(result)) for result in stablehlo.eval_module(module, given)]
