"""One part of a mixture's program, as the transitions of composers and expert workers call it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.device_program import Handle
from planetary.runtime.program_runner import Program, Runner, signature


class ProgramPart(Runner):
    """Runs `<part>_<function>` of a whole program as `<function>`.

    Args:
        run: the whole program.
        part: "composer", "expert" or "whole".
    """

    def __init__(self, run: Runner, part: str) -> None:
        self._run, self._part = run, part
        self._program = part_of(run.program, part)

    @property
    def program(self) -> Program:
        return self._program

    @property
    def device_name(self) -> str:
        return self._run.device_name

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        return self._run(f"{self._part}_{function}", tensors)

    def signature(self, function: str) -> FunctionSpec:
        return signature(self.program, function)

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        return self._run.put(spec, array)

    def get(self, spec: TensorSpec, handle: Handle) -> np.ndarray:
        return self._run.get(spec, handle)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        return self._run.invoke(f"{self._part}_{function}", arguments)


def part_of(program: Program, part: str) -> Program:
    """Return the description of a part's functions by their own names."""
    mine = {n.removeprefix(f"{part}_"): spec for n, spec in program.functions.items() if n.startswith(f"{part}_")}
    return Program(program.portable, mine)
