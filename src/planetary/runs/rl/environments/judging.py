"""Environments of a user's file: a reward function, or a class of dialogues; and how either judges a completion.

A reward function is `reward(prompt, completion, meta) -> float`. A class of dialogues is made for each with `prompt`
and `meta`; `reply(completion)` returns the following text, or None at the end, and `reward()` a number. Whatever state
it has is made again from the completions, so a process that dies takes no dialogue with it: a class must be a function
of the arguments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from planetary.core.errors import UserError
from planetary.core.user_code import load_module
from planetary.runs.rl.environments.tasks import TASKS


class Judged(msgspec.Struct, frozen=True):
    """The verdict of an environment on a dialogue.

    Attributes:
        reply: text that follows, after which the policy goes on; None: the dialogue has ended.
        reward: of an ended dialogue; None: it has none, and `problem` says why.
        problem: failure of the environment; "": none.
    """

    reply: str | None = None
    reward: float | None = None
    problem: str = ""


Judge = Callable[[str, Sequence[str], Mapping[str, Any]], Judged]
"""`(prompt, completions so far, meta)` -> verdict. May raise anything."""


def judge_of(task: str) -> Judge:
    """Return the judge of a task: a built-in one, `module:name`, or `file.py:name`.

    Raises:
        UserError: there is no such task, file or name, or it cannot be called.
    """
    if task in TASKS:
        return _of_function(TASKS[task].reward)
    place, colon, name = task.rpartition(":")
    if not colon:
        raise UserError(
            f'rl.task = "{task}": expected {", ".join(TASKS)}, or "module:name" or "file.py:name" of a reward function '
            "or a class of dialogues"
        )
    try:
        module = load_module(place)
    except UserError as error:
        raise UserError(f'rl.task = "{task}": {error}') from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f'rl.task = "{task}": {place} has no function or class {name}')
    _check_arguments(task, found)
    return _of_class(found) if inspect.isclass(found) else _of_function(found)


def _check_arguments(task: str, found: Callable[..., Any]) -> None:
    arguments = ("prompt", "meta") if inspect.isclass(found) else ("prompt", "completion", "meta")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a compiled function: the first call tells
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            f'rl.task = "{task}": {found.__name__}{signature} is called with the positional arguments '
            f"({', '.join(arguments)}), one completion a call: {error}"
        ) from error


def _of_function(reward: Callable[..., Any]) -> Judge:
    def judge(prompt: str, completions: Sequence[str], meta: Mapping[str, Any]) -> Judged:
        return _rewarded(reward(prompt, completions[-1], meta))

    return judge


def _of_class(kind: Callable[..., Any]) -> Judge:
    def judge(prompt: str, completions: Sequence[str], meta: Mapping[str, Any]) -> Judged:
        dialogue, reply = kind(prompt, meta), ""
        for completion in completions:
            reply = dialogue.reply(completion)
        if isinstance(reply, str):
            return Judged(reply=reply)
        return _rewarded(dialogue.reward())

    return judge


def _rewarded(value: Any) -> Judged:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Judged(problem=f"it returned {type(value).__name__} where a number is expected")
    if not math.isfinite(number):
        return Judged(problem=f"it returned {number}")
    return Judged(reward=number)
