"""Runs StableHLO with the reference interpreter: no compiler, so nothing a compiler gets wrong; about a million
operations a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.compiler import ir
from planetary.compiler.backends import xla
from planetary.core.errors import CompileError
from planetary.core.step import StepSpec

_DTYPES = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
}

LARGEST_COST = 100_000_000
"""Of a step that is interpreted, as `step_cost` counts: some two minutes."""


def step_cost(spec: StepSpec) -> int:
    """Return roughly how many operations a training step takes: six per weight and element of the first input."""
    return 6 * (spec.param_count + sum(buffer.size for buffer in spec.buffers)) * spec.batch[0].size


def run_interpreter(
    stablehlo: str | bytes, function: str, arguments: Sequence[np.ndarray], result_dtypes: Sequence[str]
) -> list[np.ndarray]:
    """Run one function of a module and return the results as host arrays.

    Args:
        stablehlo: text or a portable artifact.
        function: function name.
        arguments: host arrays in argument order.
        result_dtypes: StableHLO element type of each result.

    Raises:
        CompileError: an operation or element type is not one the interpreter takes.
    """
    text, kinds = xla.as_main(stablehlo, function, platform="")
    unknown = sorted({kind for kind in (*kinds, *result_dtypes) if kind not in _DTYPES})
    if unknown:
        raise CompileError(f"cannot interpret {function}: arguments or results of type {', '.join(unknown)}")
    with ir.new_context():
        module = ir.parse_module(text)
        results = ir.evaluate(module, arguments)
    return [result.astype(_DTYPES[kind], casting="equiv") for result, kind in zip(results, result_dtypes, strict=True)]
