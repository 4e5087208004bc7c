"""The node manager of a local run: started again when it is killed, and why the run ends when it gives up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from planetary.core.config import Config
from planetary.core.errors import PlanetaryError
from planetary.fabric.shell.child import Child
from planetary.run.processes.announcement import Announcement
from planetary.runtime.backends import CPU_BACKENDS, check_device, require_backend
from planetary.runtime.host import usable_cores

LOG = "node.log"

StartRole = Callable[[str, list[str], str], Awaitable[Child]]
"""Starts a planetary process of a role, with flags and the name of its log."""


def check_backend(config: Config) -> None:
    """Raise `UserError` unless this machine has what the backend of a configuration needs."""
    fabric = config.fabric
    if fabric.backend != "auto":
        require_backend(fabric.backend, fabric.island)


def threads_of(config: Config) -> int:
    """Return the threads of each worker; 0 for GPUs."""
    fabric = config.fabric
    if fabric.backend not in {"auto", *CPU_BACKENDS}:
        check_device(fabric.backend, 0, fabric.threads or None)
        return 0
    return fabric.threads or max(1, usable_cores() // fabric.workers)


def node_flags(config: Config, announcement: Announcement, folder: Path, cache: Path, scratch: Path) -> list[str]:
    """Return the flags of a node manager that joins the announced gateway of the run in `folder`.

    Its token lies in `scratch`, a folder that goes with the run.
    """
    fabric = config.fabric
    flags = [f"--host={announcement.host}", f"--port={announcement.port}", f"--scale={fabric.workers}"]
    # "host" is the default for every backend, and a CPU's: of a GPU it means the backend's own default.
    target = "" if fabric.target == "host" else fabric.target
    flags += [f"--backend={fabric.backend}", f"--target={target}", "--node-name=local", f"--island={fabric.island}"]
    flags += [f"--threads={threads_of(config)}", f"--latency-budget={fabric.latency_budget_s}"]
    flags += [f"--cache={cache}", f"--state={folder / 'workers'}", f"--logs={folder / 'logs'}"]
    if announcement.token:
        token_file = scratch / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(announcement.token)
        return [*flags, f"--token-file={token_file}"]
    return [*flags, "--plain-loopback"]


class LocalNode:
    """A node manager for as long as its run lasts.

    Attributes:
        failure: why it gave up, in its own words; "" while it has not.
    """

    def __init__(self, start: StartRole, flags: list[str], logs: Path) -> None:
        """`logs` is the folder of its log."""
        self._start, self._flags, self._log = start, flags, logs / LOG
        self._child: Child | None = None
        self.failure = ""

    async def keep(self) -> None:
        """Start it, again and again while it is killed, and return when it has ended by itself."""
        while True:
            try:
                self._child = await self._start("node-manager", self._flags, LOG)
            except PlanetaryError as error:
                self.failure = str(error)
                return
            code = await self._child.wait()
            if code >= 0:
                break
        if code > 0:
            self.failure = f"the workers of this machine ended for good: {_last_words(self._log)}"

    async def end(self, within_s: float) -> None:
        """Wait for its end, which the gateway's last message brings, a third of `within_s`; then end it."""
        if self._child is not None:
            with contextlib.suppress(PlanetaryError):
                try:
                    async with asyncio.timeout(within_s / 3):
                        await self._child.wait()
                except TimeoutError:
                    await self._child.end(within_s * 2 / 3)


def _last_words(log: Path) -> str:
    """Return the error that a planetary process wrote last, in one line, and where its log is."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        text = ""
    _, found, error = text.rpartition("planetary: ")
    return f"{' '.join(error.split())} (its log is {log})" if found else f"see {log}"
