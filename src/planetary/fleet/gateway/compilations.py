"""Artifacts that are compiled for workers, each in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from planetary.compiler.backends.targets import nearest
from planetary.core.clock import Clock
from planetary.core.errors import PlanetaryError
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.shell.shell import Background

log = logging.getLogger(__name__)


class Compilations:
    """The artifacts a run has made for workers. Methods are called on the event loop.

    Attributes:
        free_compilers: held by whatever compiles.
        compiled_at: Unix time in seconds at which compiling last ended; 0: it never did.
        compiling: target -> Unix time in seconds at which it began.
    """

    def __init__(
        self,
        compile_for: Callable[[CompileTarget], Awaitable[PublishedArtifact]],
        post: Callable[[e.Event], None],
        clock: Clock,
        background: Background,
    ) -> None:
        """`compile_for` compiles and verifies an artifact; `post` takes the events."""
        # One at a time: a compilation uses all cores, and takes some hundred MB.
        self.free_compilers = asyncio.Semaphore(1)
        self._compile_for, self.post, self._clock, self._background = compile_for, post, clock, background
        self.compiled_at = 0.0
        self.compiling: dict[str, float] = {}

    def compile(self, instruction: e.Compile) -> None:
        """Begin; `Compiled` or `CompileFailed` is posted. At the end a compiler is killed with its parent process."""
        self.compiling[f"{instruction.backend}:{instruction.target}"] = self._clock.wall()
        self._background.add(self._compile(instruction), cancels=True)

    async def _compile(self, instruction: e.Compile) -> None:
        backend, target, features = instruction.backend, instruction.target, instruction.features
        began, name = self._clock.monotonic(), f"{backend}:{target}"
        try:
            if note := nearest(backend, target)[1]:
                log.info("%s", note)
            async with self.free_compilers:  # each takes some hundred MB, and every invite can ask for one
                began, self.compiling[name] = self._clock.monotonic(), self._clock.wall()
                published = await self._compile_for(CompileTarget(backend, target, features))
        except PlanetaryError as error:
            self.post(e.CompileFailed(backend, target, features, str(error), instruction.edition))
            return
        except Exception as error:
            log.exception("compiling for %s:%s failed", backend, target)
            text = f"{type(error).__name__}: {error}"
            self.post(e.CompileFailed(backend, target, features, text, instruction.edition))
            return
        finally:
            self.compiling.pop(name, None)
            self.compiled_at = self._clock.wall()
        seconds = self._clock.monotonic() - began
        self.post(compiled_event(CompileTarget(backend, target, features), published, seconds, instruction.edition))


def compiled_event(
    target: CompileTarget, published: PublishedArtifact, seconds: float = 0.0, edition: int = 0
) -> e.Compiled:
    """Return the event of an artifact published for a target, after `seconds` of work."""
    return e.Compiled(
        target.backend,
        target.name,
        target.features,
        published.digest,
        published.nbytes,
        seconds,
        published.verified,
        published.reference,
        edition,
    )
