"""What a gateway has under way beside its event loop; compiling, which every kind of run does, among it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from planetary.compiler.backends.targets import nearest
from planetary.core.errors import PlanetaryError
from planetary.fabric.preparation.compiling import CompileTarget, Published
from planetary.fabric.protocol import events as e

log = logging.getLogger(__name__)


class Background:
    """One per run. Its methods are called on the event loop."""

    def __init__(
        self, compile_for: Callable[[CompileTarget], Awaitable[Published]], post: Callable[[e.Event], None]
    ) -> None:
        """`compile_for` compiles and verifies what workers run; `post` takes the events."""
        self._compile_for, self.post = compile_for, post
        self._tasks: set[asyncio.Task[None]] = set()
        self.compiled_at = 0.0  # Unix time in seconds at which compiling last ended; 0: it never did
        self.compiling: dict[str, float] = {}  # target -> Unix time in seconds at which it began

    def compile(self, instruction: e.Compile) -> None:
        """Begin; `Compiled` or `CompileFailed` is posted."""
        self.add(self._compile(instruction), name="compile")

    def add(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Begin something else that `finish` is to wait for."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for what is under way, except that a compiler is killed with its process."""
        for task in list(self._tasks):
            if task.get_name() == "compile":
                task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _compile(self, instruction: e.Compile) -> None:
        backend, target, features = instruction.backend, instruction.target, instruction.features
        began, name = time.monotonic(), f"{backend}:{target}"
        self.compiling.setdefault(name, time.time())
        try:
            if note := nearest(backend, target)[1]:
                log.info("%s", note)
            published = await self._compile_for(CompileTarget(backend, target, features))
        except PlanetaryError as error:
            self.post(e.CompileFailed(backend, target, features, str(error)))
            return
        except Exception as error:
            log.exception("compiling for %s:%s failed", backend, target)
            self.post(e.CompileFailed(backend, target, features, f"{type(error).__name__}: {error}"))
            return
        finally:
            self.compiling.pop(name, None)
            self.compiled_at = time.time()
        seconds = time.monotonic() - began
        self.post(
            e.Compiled(
                backend,
                target,
                features,
                published.digest,
                published.nbytes,
                seconds,
                published.verified,
                published.reference,
            )
        )
