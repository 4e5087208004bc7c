"""One part of a mixture's program, as the transitions of composers and expert workers call it."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.runtime.device_program import DeviceProgram, Handle, Program, WrappedProgram


class ProgramPart(WrappedProgram):
    """Runs `<part>_<function>` of a whole program as `<function>`.

    Args:
        run: the whole program.
        part: "composer", "expert" or "whole".
    """

    def __init__(self, run: DeviceProgram, part: str) -> None:
        super().__init__(run, part_of(run.program, part))
        self._part = part

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        return super().invoke(f"{self._part}_{function}", arguments)


def part_of(program: Program, part: str) -> Program:
    """Return the description of a part's functions by their own names."""
    mine = {n.removeprefix(f"{part}_"): spec for n, spec in program.functions.items() if n.startswith(f"{part}_")}
    return Program(program.portable, mine)
