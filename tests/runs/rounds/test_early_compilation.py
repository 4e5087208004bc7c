"""A step of a local run is compiled while it is checked; the end of preparing waits for that, an error ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from planetary.core.configuration.schema import Config
from planetary.core.errors import CompileError, NumericsError
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, StepToCompile
from planetary.runs.rounds.gateway.gateway import RoundsSetup
from planetary.runs.rounds.preparation.machine_speed import local_target
from planetary.runs.rounds.preparation.preparation import Prepared

STEP: Any = object()


class Compiler:
    """Stands in for a compiler; `allowed` lets it end."""

    def __init__(self, error: str = "") -> None:
        self.begun, self.allowed, self.seen = threading.Event(), threading.Event(), []
        self.cancelled, self._error = False, error

    async def __call__(self, step: StepToCompile, target: CompileTarget, cache: Path) -> PublishedArtifact:
        self.seen.append((step, target))
        self.begun.set()
        try:
            await asyncio.to_thread(self.allowed.wait)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self._error:
            raise CompileError(self._error)
        return PublishedArtifact("digest", 1, "verified")


def prepared(compiler: Compiler, checks: Callable[[], None], threads: int | None = 1) -> Any:
    """Prepare a run whose step is made, and then checked by a function."""

    def prepare(config: Config, cache: Path, stage: Any, own: Any, made: Callable[[StepToCompile], None]) -> Prepared:
        made(STEP)
        checks()
        return cast("Prepared", "prepared")

    setup = RoundsSetup(prepare=prepare, compile_for=compiler)
    options = GatewayOptions(folder=Path(), cache=Path(), host="", port=0, resume=False, local_threads=threads)
    gateway = Gateway[Any](Config(), options, Security(), setup)
    return setup.prepared(gateway, gateway.config, None)


def test_a_step_is_compiled_while_it_is_checked() -> None:
    compiler = Compiler()

    def checks() -> None:
        assert compiler.begun.wait(10)
        compiler.allowed.set()

    assert prepared(compiler, checks) == "prepared"
    assert compiler.seen == [(STEP, local_target(Config()))]


def test_a_check_that_fails_ends_the_compiler() -> None:
    compiler = Compiler()

    def checks() -> None:
        assert compiler.begun.wait(10)
        raise NumericsError("not a number")

    try:
        with pytest.raises(NumericsError):
            prepared(compiler, checks)
        assert compiler.cancelled
    finally:
        compiler.allowed.set()


def test_a_step_that_cannot_be_compiled_ends_the_run() -> None:
    compiler = Compiler("no such operation")
    compiler.allowed.set()
    with pytest.raises(CompileError, match="no such operation"):
        prepared(compiler, lambda: None)


def test_workers_elsewhere_say_what_is_compiled() -> None:
    compiler = Compiler()
    assert prepared(compiler, lambda: None, threads=None) == "prepared"
    assert not compiler.seen
