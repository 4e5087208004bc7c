"""The processes that judge: a few at a time, ended with everything they started when one of them hangs or breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from planetary.core.errors import UserError
from planetary.fabric.shell.child import describe_exit
from planetary.rl.environments.judge_process import LEFT_RUNNING, Case
from planetary.rl.environments.judging import Judged

START_S = 60.0
"""A process may import the libraries of the environment."""
MOST_ANSWER = 1 << 20
"""Bytes of an answer, of which a reply is the most."""


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


class _JudgeProcess:
    """One process. Its group ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, send: int, reader: asyncio.StreamReader) -> None:
        self._process, self._send, self._reader = process, send, reader

    @classmethod
    async def start(cls, task: str, limits: JudgeLimits) -> _JudgeProcess:
        requests, send = os.pipe()
        receive, answers = os.pipe()
        arguments = (task, str(requests), str(answers), str(limits.memory_bytes))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "planetary.rl.environments.judge_process",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(requests, answers),
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        reader = asyncio.StreamReader(limit=MOST_ANSWER)
        file = os.fdopen(receive, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        made = cls(process, send, reader)
        try:
            async with asyncio.timeout(START_S):
                line = await reader.readline()
        except TimeoutError:
            line = b""
        if line != b"ready\n":
            code = await made.end()
            raise UserError(f'rl.task = "{task}": the environment\'s process {describe_exit(code)} before it was ready')
        return made

    async def judge(self, case: Case, seconds: float) -> Judged | None:
        """Return the verdict; None: the process is of no more use. Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            try:
                await asyncio.to_thread(os.write, self._send, msgspec.json.encode(case) + b"\n")
                line = await self._reader.readline()
            except (OSError, ValueError):  # ValueError: a line that is too long
                return None
        if not line.endswith(b"\n"):
            return None
        try:
            return msgspec.json.decode(line, type=Judged)
        except msgspec.MsgspecError:
            return None

    async def end(self) -> int:
        """End the process and all that it started; return its exit status."""
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.close(self._send)
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
        kept: _JudgeProcess | None = None
        try:
            if process is None:
                process = await _JudgeProcess.start(self._task, self._limits)
                self._all.add(process)
            try:
                verdict = await process.judge(case, self._limits.seconds)
            except TimeoutError:
                await self._drop(process)
                return Judged(problem=f"it took longer than {self._limits.seconds:g} s")
            if verdict is None:
                code = await self._drop(process)
                return Judged(problem=f"its process {describe_exit(code)}")
            if verdict.problem == LEFT_RUNNING:
                await self._drop(process)
            else:
                kept = process
            return verdict
        finally:
            self._free.put_nowait(kept)

    async def _drop(self, process: _JudgeProcess) -> int:
        self.ended += 1
        self._all.discard(process)
        return await process.end()
