"""Programs of a mixture that this process builds and runs itself: the trainer's, and the references of checks.

The trainer computes with XLA on this machine's CPU, whatever else is there: it is what others are compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from planetary.core.configuration.step_options import StepOptions
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.program.programs import composer_program, expert_program
from planetary.moe.program.signature import ComposerShape
from planetary.runtime.program_runner import Program, ProgramRunner, XlaRunner

if TYPE_CHECKING:
    from planetary.compiler.backends.targets import Target


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


class IreeRunner(ProgramRunner):
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
        from planetary.compiler.backends.iree import compile_functions
        from planetary.runtime.iree_functions import IreeFunctions

        wanted = {name: program.functions[name] for name in functions or program.functions}
        module = compile_functions(program.portable, target, wanted)
        super().__init__(program, IreeFunctions(module, wanted, backend=target.backend))
