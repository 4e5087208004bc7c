"""A run whose processes are all on this machine: starts them, shows them, and ends them in order."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from planetary.cli.announcement import Announcement, read_announcement
from planetary.cli.errors import EXIT_CODES, EXIT_OK
from planetary.cli.status_source import status_source
from planetary.core.config import Config, to_toml
from planetary.core.errors import PeerError, PlanetaryError, ResourceError
from planetary.fabric.gateway.run_files import EVENTS
from planetary.fabric.protocol.status import RunStatus
from planetary.fabric.shell.child import Child, describe_exit, on_stop_signals, planetary_command
from planetary.monitor.screen import open_screen
from planetary.runtime.backends import CPU_BACKENDS, check_device
from planetary.runtime.host import usable_cores

START_LIMIT_S = 60.0  # for the gateway's process to listen
SHOW_EVERY_S = 0.25
STOP_LIMIT_S = 4.0  # for everything to end after Ctrl+C


class LocalRunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a local run is started."""

    folder: Path  # of the run
    cache: Path
    resume: bool
    checkpoint: Path | None
    plain: bool  # no TLS between the processes
    dashboard_port: int
    quiet: bool  # show nothing


class LocalRun:
    """One gateway, one node manager, and what they start."""

    def __init__(self, config: Config, options: LocalRunOptions) -> None:
        self._config = config
        self._options = options
        self._stop = asyncio.Event()
        self._logs = options.folder / "logs"

    async def run(self) -> None:
        """Run to the end. Raises what the gateway failed with, or `KeyboardInterrupt` after a stop signal."""
        on_stop_signals(lambda _: self._stop.set())
        with tempfile.TemporaryDirectory(prefix="planetary-") as scratch:
            gateway = await self._start_gateway(Path(scratch))
            node: Child | None = None
            try:
                announcement = await self._announced(gateway, Path(scratch) / "announcement")
                if announcement is not None:
                    node = await self._start_node(announcement, Path(scratch))
                    await self._show(gateway, announcement)
            finally:
                code = await self._end(gateway, node)
        if self._stop.is_set():
            raise KeyboardInterrupt(f"planetary train --resume {os.path.relpath(self._options.folder)}")
        if code != EXIT_OK:
            raise self._error_of(code)

    # --- processes --------------------------------------------------------------------------------------------

    async def _start_gateway(self, scratch: Path) -> Child:
        options = self._options
        flags = [f"--announce={scratch / 'announcement'}", f"--state={options.folder / 'authority'}"]
        flags += [f"--cache={options.cache}", f"--port={self._config.fabric.port}"]
        flags += [f"--gateway-port={options.dashboard_port}"]
        flags += ["--plain-loopback"] if options.plain else []
        flags += [f"--local-threads={self._threads}"]
        if options.resume:
            flags += [f"--resume={options.folder}", f"--set=train.rounds={self._config.train.rounds}"]
            flags += [f"--set=fabric.workers={self._config.fabric.workers}"]
            flags += [f"--checkpoint={options.checkpoint}"] if options.checkpoint is not None else []
        else:
            resolved = scratch / f"{self._config.run.name}.toml"
            resolved.write_text(to_toml(self._config))
            flags += [f"--gateway-config={resolved}", f"--run-dir={options.folder}"]
        return await Child.start(planetary_command("gateway", *flags), log=self._logs / "gateway.log")

    @property
    def _threads(self) -> int:
        """Of each worker; 0 for GPUs."""
        fabric = self._config.fabric
        if fabric.backend not in {"auto", *CPU_BACKENDS}:
            check_device(fabric.backend, 0, fabric.threads or None)
            return 0
        return fabric.threads or max(1, usable_cores() // fabric.workers)

    async def _start_node(self, announcement: Announcement, scratch: Path) -> Child:
        fabric, options = self._config.fabric, self._options
        flags = [f"--host={announcement.host}", f"--port={announcement.port}", f"--scale={fabric.workers}"]
        # "host" is the default for every backend, and a CPU's: of a GPU it means the backend's own default.
        target = "" if fabric.target == "host" else fabric.target
        flags += [f"--backend={fabric.backend}", f"--target={target}", "--node-name=local"]
        flags += [f"--island={fabric.island}"]
        flags += [f"--threads={self._threads}", f"--latency-budget={fabric.latency_budget_s}"]
        flags += [f"--cache={options.cache}", f"--state={options.folder / 'workers'}", f"--logs={self._logs}"]
        if announcement.token:
            token_file = scratch / "token"
            token_file.touch(mode=0o600)
            token_file.write_text(announcement.token)
            flags += [f"--token-file={token_file}"]
        else:
            flags += ["--plain-loopback"]
        return await Child.start(planetary_command("node-manager", *flags), log=self._logs / "node.log")

    async def _announced(self, gateway: Child, path: Path) -> Announcement | None:
        """Wait until the gateway listens; None when it ended instead, or when this run is to stop."""
        ended = asyncio.ensure_future(gateway.wait())
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while (announcement := read_announcement(path)) is None:
                    await asyncio.wait((ended,), timeout=0.05)
                    if ended.done() or self._stop.is_set():
                        return None
        except TimeoutError:
            raise ResourceError(
                f"the gateway did not listen within {START_LIMIT_S:.0f} s; see {self._logs / 'gateway.log'}"
            ) from None
        finally:
            ended.cancel()
        return announcement

    async def _end(self, gateway: Child, node: Child | None) -> int:
        """End everything that is still there, the gateway first so that it can say goodbye; return its status."""
        code = await gateway.end(STOP_LIMIT_S)
        if node is not None:
            with contextlib.suppress(PlanetaryError):
                try:
                    async with asyncio.timeout(STOP_LIMIT_S / 4):
                        await node.wait()  # told by the gateway that the run is over
                except TimeoutError:
                    await node.end(STOP_LIMIT_S / 2)
        return code

    # --- display ----------------------------------------------------------------------------------------------

    async def _show(self, gateway: Child, announcement: Announcement) -> None:
        read = status_source(announcement.dashboard)
        ended = asyncio.ensure_future(gateway.wait())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            with contextlib.ExitStack() as stack:
                show: Callable[[RunStatus], None] | None = None
                if not self._options.quiet:
                    if not sys.stdout.isatty():
                        print(f"run {self._options.folder}, dashboard {announcement.dashboard}", flush=True)
                    show = stack.enter_context(open_screen()).show
                while not (ended.done() or stopping.done()):
                    if show is not None:
                        await self._show_once(read, show)
                    await asyncio.wait((ended, stopping), timeout=SHOW_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                # A gateway that failed before its run began has left no journal; its own words are shown instead.
                if show is not None and ended.done() and (self._options.folder / EVENTS).exists():
                    await self._show_once(status_source(str(self._options.folder)), show)
        finally:
            for waiter in (ended, stopping):
                waiter.cancel()

    async def _show_once(self, read: Callable[[], RunStatus], show: Callable[[RunStatus], None]) -> None:
        # The gateway may end between two looks, and a busy one may answer late; the next look will tell.
        with contextlib.suppress(PeerError):
            show(await asyncio.to_thread(read))

    def _error_of(self, code: int) -> PlanetaryError:
        """The gateway's own last words, as an error of the class that its exit status stands for."""
        path = self._logs / "gateway.log"
        last: collections.deque[str] = collections.deque(maxlen=40)
        with contextlib.suppress(OSError):
            last.extend(path.read_text(errors="replace").splitlines())
        lines = list(last)
        starts = [i for i, line in enumerate(lines) if line.startswith("planetary: ")]
        if code < 0 or not starts:
            return PeerError(f"the gateway {describe_exit(code)}; its log is {path}")
        text = " ".join(lines[starts[-1] :]).removeprefix("planetary: ")
        kind = next((cls for cls, number in EXIT_CODES.items() if number == code), PlanetaryError)
        return kind(text)
