"""How a task judges a completion: whatever it returns, as a verdict."""

from __future__ import annotations

import inspect
import math
from typing import Any

import msgspec

from planetary.core.errors import UserError
from planetary.core.extension_points import TASKS
from planetary.core.registry import Chosen
from planetary.runs.rl.environments.tasks import Task


class Judged(msgspec.Struct, frozen=True):
    """The verdict of an environment on a dialogue.

    Attributes:
        reply: text that follows, after which the policy goes on; None: no text does.
        messages: that follow in a chat, such as answers of tools; None: none do, and without a reply the dialogue has
            ended.
        reward: of an ended dialogue; None: it has none, and `problem` says why.
        problem: failure of the environment; "": none.
    """

    reply: str | None = None
    messages: list[dict[str, Any]] | None = None
    reward: float | None = None
    problem: str = ""


def task_of(name: str) -> Task:
    """Return a task. Raises `UserError`: there is none of this name, or it does not take the arguments."""
    task: Task = TASKS.make(Chosen(name))
    arguments = ("prompt", "completions", "meta")
    try:
        inspect.signature(task.judge).bind(*arguments)
    except TypeError as error:
        raise UserError(f"task {name}: judge is called with ({', '.join(arguments)}): {error}") from error
    return task


def verdict_of(value: Any) -> Judged:
    """Return the verdict that a task's `judge` or `follow` returned."""
    if isinstance(value, str):
        return Judged(reply=value)
    if isinstance(value, list):
        return Judged(messages=value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Judged(problem=f"it returned {type(value).__name__} where a number or a text is expected")
    if not math.isfinite(number):
        return Judged(problem=f"it returned {number}")
    return Judged(reward=number)
