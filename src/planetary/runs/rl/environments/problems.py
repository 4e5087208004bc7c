"""Where prompts come from: a task, which makes them by number, or a file of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from planetary.core.errors import UserError
from planetary.core.extension_points import TASKS
from planetary.core.registry import Chosen
from planetary.data.kinds import rows_of
from planetary.runs.rl.environments.tasks import Problem, Task

_HELD_OUT = 1  # the stream of random numbers that held-out prompts are drawn from


class Problems(Protocol):
    """The prompts of a run. Each is a function of the number."""

    def train(self, number: int) -> Problem:
        """Return the prompt of a training group, from 1."""
        ...

    def held_out(self, number: int) -> Problem:
        """Return a held-out prompt, from 0."""
        ...

    @property
    def held_out_count(self) -> int:
        """How many held-out prompts there are."""
        ...


class DrawnProblems:
    """Prompts that a task makes. A training prompt may be a held-out one by chance, as rarely as two are equal."""

    def __init__(self, task: Task, seed: int, held_out: int) -> None:
        """`seed`: of the run; `held_out`: how many prompts are evaluated."""
        self._task, self._seed, self._count = task, seed, held_out

    @property
    def held_out_count(self) -> int:
        return self._count

    def train(self, number: int) -> Problem:
        return self._task.problem(np.random.default_rng((self._seed, 0, number)))

    def held_out(self, number: int) -> Problem:
        """The same for every seed, so runs can be compared."""
        return self._task.problem(np.random.default_rng((0, _HELD_OUT, number)))


class FileProblems:
    """Prompts of a file, in another order each time all have been taken."""

    def __init__(self, source: str, seed: int, held_out: int) -> None:
        """Read all. Raises `UserError` for a file without prompts, or with too few."""
        rows = [_problem(row, i, source) for i, row in enumerate(rows_of(source), start=1)]
        if len(rows) <= held_out:
            raise UserError(
                f"{source} has {len(rows)} prompts: expected more than rl.held_out = {held_out}, which are never "
                "trained on"
            )
        order = np.random.default_rng((0, _HELD_OUT)).permutation(len(rows))
        self._held = [rows[i] for i in order[:held_out]]
        self._rows = [rows[i] for i in order[held_out:]]
        self._seed = seed

    @property
    def held_out_count(self) -> int:
        return len(self._held)

    def train(self, number: int) -> Problem:
        epoch, place = divmod(number - 1, len(self._rows))
        order = np.random.default_rng((self._seed, 0, epoch)).permutation(len(self._rows))
        return self._rows[order[place]]

    def held_out(self, number: int) -> Problem:
        return self._held[number]


def problems_of(task: str, source: str, seed: int, held_out: int) -> Problems:
    """Return the prompts of a run.

    Args:
        task: `rl.task`.
        source: `rl.prompts`; "": the task makes them.
        seed: of the run.
        held_out: how many prompts are evaluated.

    Raises:
        UserError: the task makes no prompts and there is no file, or the file has no usable prompts.
    """
    if source:
        return FileProblems(source, seed, held_out)
    made: Task = TASKS.make(Chosen(task))
    if type(made).problem is Task.problem:
        raise UserError(f'rl.task = "{task}" makes no prompts (problem), so it needs rl.prompts, a file of prompts')
    return DrawnProblems(made, seed, held_out)


def _problem(row: Mapping[str, Any], number: int, source: str) -> Problem:
    prompt, answer = row.get("prompt"), row.get("answer", "")
    if not isinstance(prompt, str) or not prompt:
        found = ", ".join(row) or "nothing"
        raise UserError(f'{source}, record {number}: expected a text in the field "prompt"; found the fields {found}')
    meta = {str(key): value for key, value in row.items() if key != "prompt"}
    return Problem(prompt, "" if answer is None else str(answer), meta)
