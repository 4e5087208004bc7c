"""The process that runs a user's environment: a request and an answer a line, within limits of time and memory.

The process is in a separate session, so whatever it starts is ended with it. Answers go through a separate pipe: output
of the environment does not reach the gateway. The environment can find that pipe, so each answer repeats the random
ticket of the request: a line without the ticket is no answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from typing import Any

import msgspec

from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.runs.rl.environments.judging import Judged, task_of, verdict_of
from planetary.runs.rl.environments.tasks import Problem, Task

MOST_OUTPUT = 16 << 20
"""Bytes an environment may write into one file."""
LEFT_RUNNING = "it left processes running"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Case(msgspec.Struct, frozen=True):
    """One completion to judge.

    Attributes:
        chat: messages of the whole dialogue, where the prompt is messages.
        is_over: whether nothing can follow, as the context is full.
    """

    prompt: Any
    completions: tuple[str, ...]
    meta: dict[str, Any]
    chat: tuple[dict[str, Any], ...] = ()
    is_over: bool = False


class Request(msgspec.Struct, frozen=True):
    """A line to the process. The first one has no case: the answer tells whether the environment can be loaded.

    Attributes:
        ticket: random text the answer repeats.
        wants_problems: whether the answer to the first one has the task's own set of prompts.
    """

    ticket: str
    case: Case | None = None
    wants_problems: bool = False


class Answer(msgspec.Struct, frozen=True):
    """A line from the process; `tools` and `problems`: of the task, in the first one."""

    ticket: str
    verdict: Judged
    tools: tuple[dict[str, Any], ...] = ()
    problems: tuple[Problem, ...] = ()


def limit(memory_bytes: int) -> None:
    """Bound this process: memory, size of files, and no core dumps."""
    for limited, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MOST_OUTPUT),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
            resource.setrlimit(limited, (most, most))


def adopt_orphans() -> None:
    """Become the parent of whatever a child leaves behind, so it is seen; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def has_children() -> bool:
    """Whether a process started here still runs."""
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if found == 0:
            return True


def loaded(name: str) -> tuple[Task | None, str]:
    """Return a task, or None and the reason."""
    try:
        return task_of(name), ""
    except UserError as error:
        return None, str(error)


def described(task: Task, name: str, request: Request) -> Answer:
    """Return the answer to the first request: the task's tools, and its prompts where they are wanted."""
    try:
        problems = tuple(task.problems()) if request.wants_problems else ()
        return Answer(request.ticket, Judged(), tuple(map(dict, task.tools)), problems)
    except Exception as error:  # noqa: BLE001 - a user's code can raise whatever Python can
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return Answer(request.ticket, Judged(problem=f"task {name}: its prompts or tools: {reason[:500]}"))


def judged(task: Task, case: Case) -> Judged:
    """Return the verdict on a case; an exception of the environment is a problem of the case."""
    try:
        return verdict_of(task.follow(case.prompt, case.completions, case.meta, case.chat, is_over=case.is_over))
    except BaseException as error:  # noqa: BLE001 - SystemExit, too: it costs this rollout only
        return Judged(problem=f"it raised {type(error).__name__}: {str(error)[:200]}")


def main() -> None:
    """Judge until the gateway closes the pipe."""
    name, requests, answers, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    limit(memory)
    adopt_orphans()
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    task: Task | None = None
    own = os.getpid()
    with os.fdopen(requests, "rb") as source:
        for line in source:
            request = decoding.from_json(line, Request)
            if task is None or request.case is None:
                task, problem = loaded(name)
                verdict = Judged(problem=problem)
            else:
                verdict = judged(task, request.case)
            if os.getpid() != own:
                os._exit(1)  # the environment has forked, and this is the copy: one of them answers
            if has_children():
                verdict = Judged(problem=LEFT_RUNNING)
            answer = Answer(request.ticket, verdict)
            if task is not None and request.case is None:
                answer = described(task, name, request)
            data = msgspec.json.encode(answer) + b"\n"
            while data:
                data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()
