"""Chats are rendered in processes that are ended when a template takes too long, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from planetary.core import decoding
from planetary.core.errors import ResourceError, UserError
from planetary.core.exit_status import describe_exit
from planetary.data.chat.messages import MOST_TEXT, ChatToRender, Rendered, Sample

SECONDS = 5.0
"""Time of one chat."""
START_S = 60.0
"""Time until a process is ready."""
PROCESSES = 2
_LINE = 6 * MOST_TEXT + (1 << 16)  # bytes of an answer, every character of which JSON may escape


class ChatRenderer:
    """Renders chats, a few at a time. Used on one event loop."""

    def __init__(self, *, seconds: float = SECONDS, processes: int = PROCESSES) -> None:
        """Start no process before the first chat. `seconds`: limit of one chat."""
        self._seconds = seconds
        self._free: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        for _ in range(processes):
            self._free.put_nowait(None)
        self._all: set[asyncio.subprocess.Process] = set()

    async def text(self, template: str, names: Mapping[str, Any], *, is_training: bool = False) -> str:
        """Return the text of a chat; see `ChatTemplate`. In a training today is `TRAINING_DAY`.

        Raises:
            UserError: the template fails, refuses the chat, or exceeds a limit; the text begins with "it".
            ResourceError: the process cannot be started.
        """
        chat = ChatToRender(template, dict(names), 2 * self._seconds, is_training=is_training)
        return (await self._rendered(chat)).text

    async def samples(self, template: str, names: Mapping[str, Any], turns: Sequence[int]) -> tuple[Sample, ...]:
        """Return the texts that train a chat's turns; see `ChatTemplate.samples`. Raises as `text`."""
        return (await self._rendered(ChatToRender(template, dict(names), 2 * self._seconds, tuple(turns)))).samples

    async def _rendered(self, chat: ChatToRender) -> Rendered:
        process, kept = await self._free.get(), None
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await _ask(process, chat)
            except TimeoutError:
                await self._end(process)
                raise UserError(f"it takes longer than {self._seconds:g} s, and was stopped") from None
            except asyncio.CancelledError:  # an answer is left in the pipe
                await self._end(process)
                raise
            if answer is None:
                code = await self._end(process)
                raise UserError(f"it broke the process that renders it, which {describe_exit(code)}")
            kept = process
            if answer.problem:
                raise UserError(answer.problem)
            return answer
        finally:
            self._free.put_nowait(kept)

    async def close(self) -> None:
        """End all processes."""
        for process in list(self._all):
            await self._end(process)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "planetary.data.chat.template_process")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(f"cannot start the process that renders chats: {error.strerror or error}") from error
        self._all.add(process)
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        if line != b"ready\n":
            code = await self._end(process)
            raise ResourceError(f"the process that renders chats {describe_exit(code)} before it was ready")
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> int:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def _ask(process: asyncio.subprocess.Process, chat: ChatToRender) -> Rendered | None:
    """Return a process's answer; None: it gives none any more."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(chat) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        return decoding.from_json(line, Rendered) if line.endswith(b"\n") else None
    except (OSError, ValueError, msgspec.MsgspecError):  # ValueError: a line that is too long
        return None
