"""Where prompts come from: a task, which makes them by number, or a file of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.extension_points import TASKS
from planetary.core.registry import Chosen
from planetary.data.chat.records import is_chat, prompt_of
from planetary.data.kinds import rows_of
from planetary.runs.rl.environments.tasks import Problem, Task
from planetary.runs.serve.http.tools.tool_use import tool_use_of
from planetary.web.api_errors import ApiError

_PROMPTS = ("prompt", "messages", "conversations", "tools")  # fields of a record that are not the reward's
_HELD_OUT = 1  # the stream of random numbers that held-out prompts are drawn from
_MOST_REPLACED = 100  # prompts drawn in place of a held-out one


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
    """Prompts that a task makes. One that is held out is replaced, unless the task hardly makes any other."""

    def __init__(self, task: Task, seed: int, held_out: int, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`seed`: of the run; `held_out`: how many prompts are evaluated; `tools`: of the task."""
        self._task, self._seed, self._count, self._tools = task, seed, held_out, tools

    @property
    def held_out_count(self) -> int:
        return self._count

    def train(self, number: int) -> Problem:
        rng = np.random.default_rng((self._seed, 0, number))
        problem = self._task.problem(rng)
        for _ in range(_MOST_REPLACED):
            if _key(problem) not in self._held_out_keys:
                break
            problem = self._task.problem(rng)
        return _offering(problem, self._tools)

    def held_out(self, number: int) -> Problem:
        """The same for every seed, so runs can be compared."""
        return _offering(self._task.problem(np.random.default_rng((0, _HELD_OUT, number))), self._tools)

    @cached_property
    def _held_out_keys(self) -> frozenset[bytes]:
        return frozenset(_key(self.held_out(number)) for number in range(self._count))


class ListedProblems:
    """Prompts of a set, in another order each time all have been taken."""

    def __init__(
        self, source: str, found: Iterable[Problem], seed: int, held_out: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Raise `UserError` for no prompts, too few, or texts and chats. `source`: of the prompts, for error texts."""
        rows = [_offering(problem, tools) for problem in found]
        if len({isinstance(row.prompt, str) for row in rows}) > 1:
            raise UserError(f"{source} has prompts that are texts and prompts that are messages: expected one kind")
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


def problems_of(
    task: str,
    source: str,
    seed: int,
    held_out: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    listed: Sequence[Problem] = (),
) -> Problems:
    """Return the prompts of a run.

    Args:
        task: `rl.task`.
        source: `rl.prompts`; "": the task makes them.
        seed: of the run.
        held_out: how many prompts are evaluated.
        tools: of the task, which prompts without tools offer.
        listed: prompts that the task has of its own, if any.

    Raises:
        UserError: the task makes no prompts and there is no file, or the file has no usable prompts.
    """
    if source:
        rows = (_problem(row, i, source) for i, row in enumerate(rows_of(source), start=1))
        return ListedProblems(source, rows, seed, held_out, tools)
    if listed:
        return ListedProblems(f"task {task}", listed, seed, held_out, tools)
    made: Task = TASKS.make(Chosen(task))
    if type(made).problem is Task.problem:
        raise UserError(f'rl.task = "{task}" makes no prompts (problem), so it needs rl.prompts, a file of prompts')
    return DrawnProblems(made, seed, held_out, tools)


def check_tools(tools: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `UserError` for tools that are none, or have an invalid schema."""
    try:
        tool_use_of(tools, None, True)
    except ApiError as error:
        raise UserError(f"{where}: {error}") from None


def _key(problem: Problem) -> bytes:
    return msgspec.json.encode((problem.prompt, problem.meta))


def _offering(problem: Problem, tools: Sequence[Mapping[str, Any]]) -> Problem:
    return problem if problem.tools or not tools else replace(problem, tools=tools)


def _problem(row: Mapping[str, Any], number: int, source: str) -> Problem:
    prompt, answer, where = row.get("prompt"), row.get("answer"), f"{source}, record {number}"
    meta = {str(key): value for key, value in row.items() if key not in _PROMPTS}
    if isinstance(prompt, str) and prompt:
        return Problem(prompt, "" if answer is None else str(answer), meta)
    if isinstance(prompt, list) or is_chat(row):
        messages, said, tools = prompt_of(row, where)
        if tools:
            check_tools(tools, where)
        answer = said if answer is None else str(answer)
        return Problem(messages, answer, {**meta, "answer": answer} if answer else meta, tools)
    found = ", ".join(row) or "nothing"
    raise UserError(
        f'{where}: expected a chat in "messages", or a text or messages in the field "prompt"; found the fields {found}'
    )
