"""One part of a mixture's program, as the transitions of composers and expert workers call it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors
from planetary.moe.signature import Program, Runner


class Part:
    """Runs `<part>_<function>` of a whole program as `<function>`.

    Args:
        run: the whole program.
        part: "composer", "expert" or "whole".
    """

    def __init__(self, run: Runner, part: str) -> None:
        self._run, self._part = run, part
        self.program = part_of(run.program, part)

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `Runner`."""
        return self._run(f"{self._part}_{function}", tensors)


def part_of(program: Program, part: str) -> Program:
    """Return the description of a part's functions by their own names."""
    mine = {n.removeprefix(f"{part}_"): spec for n, spec in program.functions.items() if n.startswith(f"{part}_")}
    return Program(program.portable, mine)


def loaded_program(functions: Mapping[str, FunctionSpec]) -> Program:
    """Return the description of a program of which only the compiled module is here."""
    return Program(b"", functions)
