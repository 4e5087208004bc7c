"""Runs the functions of a program over named host arrays, with XLA or with IREE."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from planetary.core.step_options import StepOptions
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.programs import composer_program, expert_program
from planetary.moe.signature import ComposerShape, Program, signature
from planetary.runtime.host_arrays import in_order

if TYPE_CHECKING:
    from planetary.compiler.targets import Target


class XlaRunner:
    """Runs a program with XLA on this machine's CPU; each function is compiled when it is first called.

    Args:
        program: what to run.
        optimise: False compiles faster and runs slower.
    """

    def __init__(self, program: Program, *, optimise: bool = True) -> None:
        self.program = program
        self._optimise = optimise
        self._compiled: dict[str, tuple[Any, list[str]]] = {}

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `Runner`."""
        import jax

        from planetary.compiler import xla

        spec = signature(self.program, function)
        device = jax.devices("cpu")[0]
        if function not in self._compiled:
            text, kinds = xla.as_main(self.program.portable, function)
            self._compiled[function] = xla.compile_main(text, [device], optimise=self._optimise), kinds
        executable, kinds = self._compiled[function]
        arrays = in_order(spec.arguments, tensors)
        placed = [xla.place(array, kind, device) for array, kind in zip(arrays, kinds, strict=True)]
        results = xla.run(executable, placed)
        return {s.name: np.asarray(parts[0]) for s, parts in zip(spec.results, results, strict=True)}


@functools.lru_cache(maxsize=16)
def composer_runner(
    config: LatentMoeConfig, shape: ComposerShape, options: StepOptions, optimise: bool = True
) -> XlaRunner:
    """Return a composer's program ready to run; all trainings of one model in one process share what it compiles."""
    return XlaRunner(composer_program(config, shape, options), optimise=optimise)


def expert_runner(
    config: LatentMoeConfig, slots: int, tokens: int, options: StepOptions, optimise: bool = True
) -> XlaRunner:
    """Return an expert worker's program ready to run, shared in the same way."""
    return _expert_runner(msgspec.structs.replace(config, balance=0.0), slots, tokens, options, optimise)


@functools.lru_cache(maxsize=16)
def _expert_runner(config: LatentMoeConfig, slots: int, tokens: int, options: StepOptions, optimise: bool) -> XlaRunner:
    return XlaRunner(expert_program(config, slots, tokens, options), optimise=optimise)


class IreeRunner:
    """Compiles a program with IREE for one target and runs it on that device of this machine.

    Args:
        program: what to compile.
        target: for an IREE backend.
        functions: those that will be called; default: all.

    Raises:
        CompileError: IREE refuses the program.
        ResourceError: the device cannot be opened, or the module not be loaded.
    """

    def __init__(self, program: Program, target: Target, functions: Sequence[str] = ()) -> None:
        from planetary.compiler.iree import compile_functions
        from planetary.runtime.iree_functions import IreeFunctions

        self.program = program
        module = compile_functions(program.portable, target, functions or list(program.functions))
        self._functions = IreeFunctions(module, backend=target.backend)

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `Runner`."""
        spec = signature(self.program, function)
        arrays = in_order(spec.arguments, tensors)
        results = self._functions.call(function, spec.arguments, arrays, spec.results)
        return {s.name: array for s, array in zip(spec.results, results, strict=True)}
