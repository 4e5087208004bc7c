"""A child process that dies with the parent, on every system.

The parent holds the write end of the child's standard input and never writes to it. When the parent dies, however it
dies, the child reads the end of the file and ends too: `end_with_parent`. So killing any process of the tree takes down
everything below it, and no process is left to compete with a replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from planetary.core.errors import ResourceError


class ChildProcess(Protocol):
    """A running child process, as the parent sees it; see `Child`."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    async def wait(self) -> int:
        """Wait for the end; return the exit status, negative for a signal."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...

    async def end(self, within_s: float) -> int:
        """SIGTERM, then SIGKILL if it is still there after `within_s` seconds; return the exit status."""
        ...


class StartChild(Protocol):
    """Starts a child process, as `Child.start` does."""

    async def __call__(self, command: Sequence[str], *, log: Path | None) -> ChildProcess:
        """Start `command`, with output appended to `log` (None: this process's own). Raises `ResourceError`."""
        ...


class Child:
    """A running child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Made by `start`."""
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], *, log: Path | None, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Start `command`, with output appended to `log` (None: this process's own). Raises `ResourceError`."""
        with contextlib.ExitStack() as stack:
            output = None
            try:
                if log is not None:
                    log.parent.mkdir(parents=True, exist_ok=True)
                    output = stack.enter_context(log.open("ab"))
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=None if environment is None else {**os.environ, **environment},
                    start_new_session=True,  # Ctrl+C reaches the top of the tree only, which ends the rest in order
                )
            except OSError as error:
                raise ResourceError(f"cannot start {command[0]}: {error}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end; return the exit status, negative for a signal."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def kill_group(self) -> None:
        """SIGKILL to the whole session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self, within_s: float) -> int:
        """SIGTERM, then SIGKILL if it is still there after `within_s` seconds; return the exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(within_s):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()


def end_with_parent(ended: Callable[[], None]) -> None:
    """Call `ended` from another thread when the parent is gone (see the module)."""

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 1 << 12):
                pass
        ended()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def end_group() -> None:
    """End this process and all that it started, such as a compiler: a child of `Child.start` leads a group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def on_stop_signals(stop: Callable[[str], None]) -> None:
    """Call `stop` on the running event loop for SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        name = signal.Signals(number).name
        try:
            loop.add_signal_handler(number, stop, f"stopped by {name}")
        except NotImplementedError:  # an event loop without signals
            signal.signal(number, lambda *_, name=name: loop.call_soon_threadsafe(stop, f"stopped by {name}"))
