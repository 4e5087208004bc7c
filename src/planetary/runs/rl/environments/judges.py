"""The processes that judge: a few at a time, ended with everything they started when one of them hangs or breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.core.exit_status import describe_exit
from planetary.runs.rl.environments.judge_process import LEFT_RUNNING, Answer, Case, Request
from planetary.runs.rl.environments.judging import Judged
from planetary.runs.rl.environments.tasks import Problem

START_S = 60.0
"""A process may import the libraries of the environment."""
MOST_ANSWER = 1 << 20
"""Bytes of an answer, of which a reply is the most."""
MOST_PROBLEMS = 1 << 28
"""Bytes of the prompts that a task has of its own."""


@dataclass(frozen=True)
class JudgeLimits:
    """Limits of an environment.

    Attributes:
        processes: how many judge at once.
        seconds: of one verdict.
        memory_bytes: of one process.
    """

    processes: int
    seconds: float
    memory_bytes: int


class _ForeignLineError(Exception):
    """The answer does not repeat the ticket of the request: the environment wrote to the pipe."""


class _JudgeProcess:
    """One process. The process group ends with it.

    Attributes:
        cases: number of completions it has judged.
        loaded: the first answer.
    """

    loaded: Answer

    def __init__(self, process: asyncio.subprocess.Process, send: int, reader: asyncio.StreamReader) -> None:
        self._process, self._send, self._reader = process, send, reader
        self.cases = 0

    @classmethod
    async def start(cls, task: str, limits: JudgeLimits, *, wants_problems: bool = False) -> _JudgeProcess:
        requests, send = os.pipe()
        receive, answers = os.pipe()
        arguments = (task, str(requests), str(answers), str(limits.memory_bytes))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "planetary.runs.rl.environments.judge_process",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(requests, answers),
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        reader = asyncio.StreamReader(limit=MOST_PROBLEMS if wants_problems else MOST_ANSWER)
        file = os.fdopen(receive, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        made = cls(process, send, reader)
        try:
            loaded = await made._ask(None, START_S, wants_problems=wants_problems)
        except TimeoutError:
            await made.end()
            raise UserError(f'rl.task = "{task}": the environment was not loaded within {START_S:g} s') from None
        except _ForeignLineError:
            await made.end()
            raise UserError(f'rl.task = "{task}": the environment wrote to the pipe of the verdicts') from None
        if loaded is None:
            code = await made.end()
            raise UserError(f'rl.task = "{task}": the environment\'s process {describe_exit(code)} before it was ready')
        if loaded.verdict.problem:
            await made.end()
            raise UserError(loaded.verdict.problem)
        made.loaded = loaded
        return made

    async def judge(self, case: Case, seconds: float) -> Judged | None:
        """Return the verdict; None: the process has ended, or answers no more.

        Raises:
            TimeoutError: there is no answer in time.
            _ForeignLineError: the line that came is not the answer.
        """
        answer = await self._ask(case, seconds)
        self.cases += 1
        return None if answer is None else answer.verdict

    async def _ask(self, case: Case | None, seconds: float, *, wants_problems: bool = False) -> Answer | None:
        request = Request(secrets.token_hex(16), case, wants_problems)
        async with asyncio.timeout(seconds):
            try:
                await asyncio.to_thread(os.write, self._send, msgspec.json.encode(request) + b"\n")
                line = await self._reader.readline()
            except (OSError, ValueError):  # ValueError: a line that is too long
                return None
        if not line.endswith(b"\n"):
            return None
        try:
            answer = decoding.from_json(line, Answer)
        except msgspec.MsgspecError:
            raise _ForeignLineError from None
        if not secrets.compare_digest(answer.ticket, request.ticket):
            raise _ForeignLineError
        return answer

    async def end(self) -> int:
        """End the process and all children; return the exit status. Idempotent."""
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._send >= 0:
            os.close(self._send)
            self._send = -1
        return await self._process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes below one, of whatever session; none where /proc is not there."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


class Judges(Protocol):
    """Judges completions of one task. Used on one event loop."""

    async def judge(self, cases: Sequence[Case]) -> list[Judged]:
        """Return a verdict for each completion, in order. Raises `UserError` where the environment does not start."""
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


class JudgeProcesses:
    """`Judges` that run the environment in processes of their own.

    Attributes:
        ended: processes that had to be ended.
    """

    def __init__(self, task: str, limits: JudgeLimits) -> None:
        """Nothing is started before the first completion."""
        self._task, self._limits = task, limits
        self._free: asyncio.Queue[_JudgeProcess | None] = asyncio.Queue()
        for _ in range(limits.processes):
            self._free.put_nowait(None)
        self._all: set[_JudgeProcess] = set()
        self.ended = 0

    async def judge(self, cases: Sequence[Case]) -> list[Judged]:
        """Return a verdict for each completion, in order.

        Raises:
            UserError: the environment's process does not come up.
        """
        found: dict[int, Judged] = {}
        waiting = iter(enumerate(cases))

        async def work() -> None:
            for index, case in waiting:
                found[index] = await self._one(case)

        tasks = [asyncio.ensure_future(work()) for _ in range(min(self._limits.processes, len(cases)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [found[index] for index in range(len(cases))]

    async def close(self) -> None:
        """End all processes."""
        for process in list(self._all):
            await process.end()
        self._all.clear()

    async def _one(self, case: Case) -> Judged:
        process = await self._free.get()
        try:
            verdict = None
            while verdict is None:
                if process is None:
                    process = await self._start()
                verdict, kept = await self._verdict(process, case)
                if not kept:
                    await self._drop(process)
                    process = None
            return verdict
        finally:
            self._free.put_nowait(process)

    async def _verdict(self, process: _JudgeProcess, case: Case) -> tuple[Judged | None, bool]:
        """Return the verdict of a process (None: a fresh process has to judge), and whether the process is kept."""
        try:
            verdict = await process.judge(case, self._limits.seconds)
        except TimeoutError:
            return Judged(problem=f"it took longer than {self._limits.seconds:g} s"), False
        except _ForeignLineError:
            # The line may be of an earlier completion.
            return (None if process.cases else Judged(problem="it wrote to the pipe of the verdicts")), False
        if verdict is None:
            return Judged(problem=f"its process {describe_exit(await process.end())}"), False
        return verdict, verdict.problem != LEFT_RUNNING

    async def _start(self) -> _JudgeProcess:
        process = await _JudgeProcess.start(self._task, self._limits)
        self._all.add(process)
        return process

    async def _drop(self, process: _JudgeProcess) -> None:
        self.ended += 1
        self._all.discard(process)
        await process.end()


def check_environment(task: str, limits: JudgeLimits) -> tuple[tuple[dict[str, Any], ...], tuple[Problem, ...]]:
    """Load an environment in a separate process, within the limits, and end the process. Return the task's tools, and
    the prompts it has of its own. Not for an event loop.

    Raises:
        UserError: there is no such task, it cannot be loaded, or it does not take the arguments of a reward.
    """

    async def check() -> tuple[tuple[dict[str, Any], ...], tuple[Problem, ...]]:
        process = await _JudgeProcess.start(task, limits, wants_problems=True)
        await process.end()
        return process.loaded.tools, process.loaded.problems

    return asyncio.run(check())
