"""Runs StableHLO functions with XLA on the CPU: the reference that compiled artifacts are compared with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from planetary.compiler.backends import xla
from planetary.compiler.step.step_module import TrainStep, replaced_arguments
from planetary.core.errors import CompileError


def run_reference(
    stablehlo: str | bytes, function: str, arguments: Sequence[np.ndarray], result_dtypes: Sequence[str]
) -> list[np.ndarray]:
    """Run one function of a module and return the results as host arrays.

    Args:
        stablehlo: text or a portable artifact.
        function: function name.
        arguments: host arrays in argument order (bfloat16 as its bits).
        result_dtypes: StableHLO element type of each result.

    Raises:
        CompileError: there is no such function, or XLA cannot compile or run it.
    """
    text, kinds = xla.as_main(stablehlo, function)
    device = jax.devices("cpu")[0]
    executable = _compile(text, device)
    try:
        placed = [xla.place(array, kind, device) for array, kind in zip(arguments, kinds, strict=True)]
        outputs = xla.run(executable, placed)
        return [_as_host(np.asarray(parts[0]), kind) for parts, kind in zip(outputs, result_dtypes, strict=True)]
    except Exception as error:  # XLA raises its own class, which is not public either
        raise CompileError(f"XLA cannot run {function} as the reference: {error}") from error


def temporary_memory(train_step: TrainStep) -> int:
    """Return the bytes a training step takes beside arguments and results, as XLA compiles it for a CPU.

    Raises:
        CompileError: XLA cannot compile it.
    """
    text, _ = xla.as_main(train_step.portable, "train_step", replaced=replaced_arguments(train_step.spec))
    return int(xla.compile_main(text, [jax.devices("cpu")[0]]).get_compiled_memory_stats().temp_size_in_bytes)


@functools.lru_cache(maxsize=4)
def _compile(text: str, device: Any) -> Any:
    return xla.compile_main(text, [device], optimise=False)


def _as_host(array: np.ndarray, kind: str) -> np.ndarray:
    return array.view(np.uint16) if kind == "bf16" else array
