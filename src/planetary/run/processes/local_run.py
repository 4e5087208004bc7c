"""A run whose processes are all on this machine: starts them, follows them, and ends them in order.

The node manager is started again when it is killed, and the run ends with the reason when it gives up. The gateway of a
served model is started again when it is killed or hangs. A training goes on with `--resume`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import tempfile
import urllib.error
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import PeerError, PlanetaryError, ResourceError
from planetary.core.exit_status import describe_exit
from planetary.fleet.gateway.run_files import has_run
from planetary.fleet.shell.child import Child
from planetary.fleet.shell.starts import ManagerStart, start_command, write_start
from planetary.fleet.supervisor.restarts import Restarts
from planetary.net.http_opener import opener_for
from planetary.run.processes.announcement import Announcement, read_announcement, read_failure
from planetary.runs.serve.config import ServeConfig
from planetary.runtime.backends import CPU_BACKENDS, check_device, require_backend
from planetary.runtime.host import usable_cores

LOG = "node.log"

StartRole = Callable[[str, msgspec.Struct, str], Awaitable[Child]]
"""Starts a planetary process of a role, with what it is to do and the name of the log."""


class GatewayStart(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway whose workers are all on this machine."""

    config: str  # TOML
    folder: str  # run folder
    cache: str
    announce: str  # file of the announcement
    local_threads: int  # threads of each worker
    dashboard_port: int = 0  # 0: any
    plain: bool = False  # no TLS between the processes
    resume: bool = False
    checkpoint: str = ""  # checkpoint to resume from; "": the newest
    forgive: tuple[str, ...] = ()  # workers whose ban a resumed run forgets


def check_backend(config: Config) -> None:
    """Raise `UserError` unless this machine meets the requirements of a configuration's backend."""
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


def node_start(config: Config, announcement: Announcement, folder: Path, cache: Path) -> ManagerStart:
    """Return the start of a node manager that joins the announced gateway of the run in `folder`."""
    fabric = config.fabric
    return ManagerStart(
        host=announcement.host,
        port=announcement.port,
        token=announcement.token,
        plain=not announcement.token,
        latency_budget_s=fabric.latency_budget_s,
        node="local",
        backend=fabric.backend,
        # "host" is the default for every backend, and a CPU's: of a GPU it means the backend's own default.
        target=fabric.target,
        island=fabric.island,
        threads=threads_of(config),
        cache=str(cache),
        state=str(folder / "workers"),
        logs=str(folder / "logs"),
        allow_code=True,  # the user's own files, on the user's own machine
        scale=fabric.workers,
    )


class LocalNode:
    """A node manager for as long as the run lasts.

    Attributes:
        kept: done when it has ended for good.
        failure: why it gave up, in the node manager's words; "" while it works.
    """

    def __init__(self, start: StartRole, manager: ManagerStart, logs: Path) -> None:
        """Start it. `logs` is the folder of the log."""
        self._start, self._manager, self._log = start, manager, logs / LOG
        self._child: Child | None = None
        self.failure = ""
        self.kept = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        """Start it, again and again while it is killed, and return when it has ended by itself."""
        while True:
            try:
                self._child = await self._start("node-manager", self._manager, LOG)
            except PlanetaryError as error:
                self.failure = str(error)
                return
            code = await self._child.wait()
            if code >= 0:
                break
        if code > 0:
            self.failure = f"the workers of this machine ended for good: {_last_words(self._log)}"

    async def end(self, within_s: float) -> None:
        """Wait for the end, which the gateway's last message brings, a third of `within_s`; then end it."""
        self.kept.cancel()
        if self._child is not None:
            with contextlib.suppress(PlanetaryError):
                try:
                    async with asyncio.timeout(within_s / 3):
                        await self._child.wait()
                except TimeoutError:
                    await self._child.end(within_s * 2 / 3)


def _last_words(log: Path) -> str:
    """Return the error that a planetary process wrote last, in one line, and the place of the log."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        text = ""
    _, found, error = text.rpartition("planetary: ")
    return f"{' '.join(error.split())} (its log is {log})" if found else f"see {log}"


START_LIMIT_S = 60.0  # time for the gateway's process to listen
LOOK_EVERY_S = 0.25
STOP_LIMIT_S = 4.0  # time for all processes to end after a stop

PROBE_S = 5.0  # pause between two health probes of a gateway, and limit of each
MOST_MISSED = 6  # unanswered probes in a row after which a gateway hangs
HEALTHY_AFTER_S = 60.0  # a gateway that lived for so long had no failed start
MOST_FAILED_STARTS = 5
"""Starts in a row that fail before the run ends."""
PAUSES_S = 1.0, 20.0  # shortest and longest pause between two starts

Outcome = Literal["finished", "stopped"]


class LocalRunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a local run is started."""

    folder: Path  # run folder
    cache: Path
    resume: bool = False
    checkpoint: Path | None = None  # checkpoint to resume from; None: the newest
    forgive: tuple[str, ...] = ()  # workers whose ban a resumed run forgets
    plain: bool = False  # no TLS between the processes
    dashboard_port: int = 0  # 0: any
    keeps_gateway: bool = False  # start a gateway again that was killed or hangs, at the same addresses


class RunObserver(Protocol):
    """Follows a run. All calls come from the event loop that carries the run; an exception stops the run."""

    def listening(self, announcement: Announcement) -> None:
        """The gateway listens."""
        ...

    def lost(self, reason: str) -> None:
        """The gateway was lost, and is started again; `listening` follows."""
        ...

    async def look(self) -> None:
        """Time to look again; every `LOOK_EVERY_S` seconds while the gateway's process lives."""
        ...

    async def ended(self) -> None:
        """All processes have ended; the run folder, if the run began, has the last state."""
        ...


class LocalRun:
    """One gateway, one node manager, and the processes they start."""

    def __init__(self, config: Config, options: LocalRunOptions, observer: RunObserver | None = None) -> None:
        self._config = config
        self._options = options
        self._observer = observer
        self._stop = asyncio.Event()
        self._logs = options.folder / "logs"
        self._scratch = Path()  # folder of the files that the processes are started with
        self._children: list[Child] = []
        self._restarts = Restarts(
            "gateway",
            first_s=PAUSES_S[0],
            limit_s=PAUSES_S[1],
            healthy_after_s=HEALTHY_AFTER_S,
            final_codes=frozenset(range(1, 256)),  # exit codes of a gateway with a reason of its own
        )
        self._failed_starts = 0

    async def run(self) -> Outcome:
        """Run to the end, or until `stop`.

        Raises:
            PlanetaryError: the error that the gateway ended with.
            ResourceError: this machine cannot compute the configuration's step.
        """
        check_backend(self._config)
        with tempfile.TemporaryDirectory(prefix="planetary-") as scratch:
            self._scratch = Path(scratch)
            announced_in = self._scratch / "announcement"
            node: LocalNode | None = None
            code, again = 0, True
            try:
                while again:
                    began = asyncio.get_running_loop().time()
                    gateway = await self._start_gateway(announced_in)
                    announcement, hangs = None, False
                    try:
                        announcement = await self._announced(gateway, announced_in)
                        if announcement is not None:
                            if self._observer is not None:
                                self._observer.listening(announcement)
                            if node is None:
                                self._keep_addresses(announcement)
                                start = node_start(
                                    self._config, announcement, self._options.folder, self._options.cache
                                )
                                node = LocalNode(self._start, start, self._logs)
                            hangs = await self._follow(gateway, node, announcement.dashboard)
                    finally:
                        if hangs:
                            gateway.kill()
                        code = await gateway.end(STOP_LIMIT_S)  # first, so it can close the sessions
                    lived_s = asyncio.get_running_loop().time() - began
                    again = node is not None and not node.failure and await self._is_started_again(code, lived_s, hangs)
            finally:
                if node is not None:
                    await node.end(STOP_LIMIT_S * 3 / 4)
            if self._observer is not None:
                await self._observer.ended()
            if node is not None and node.failure:
                raise ResourceError(node.failure)
            if self._stop.is_set():
                return "stopped"
            if code != 0:
                raise self._error_of(announced_in, code)
        return "finished"

    def stop(self) -> None:
        """End the run in order; it can be resumed. To be called on the event loop of `run`."""
        self._stop.set()

    def kill(self) -> None:
        """Send SIGKILL to the live processes started by this object; from any thread."""
        for child in self._children:
            child.kill()

    async def _is_started_again(self, code: int, lived_s: float, hangs: bool) -> bool:
        """Whether a gateway that ended is started again, after a pause."""
        pause = self._restarts.pause_after(code, lived_s) if self._options.keeps_gateway else None
        self._failed_starts = 1 if lived_s >= HEALTHY_AFTER_S else self._failed_starts + 1
        if self._stop.is_set() or pause is None or self._failed_starts > MOST_FAILED_STARTS:
            return False
        why = f"does not answer for {MOST_MISSED * PROBE_S:.0f} s" if hangs else describe_exit(code)
        if self._observer is not None:
            self._observer.lost(f"the gateway {why}: it is started again, and clients may try again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stop.wait()
        self._options = msgspec.structs.replace(self._options, resume=has_run(self._options.folder))
        return not self._stop.is_set()

    def _keep_addresses(self, announcement: Announcement) -> None:
        """Have later gateways listen where the first one does, which clients and workers know."""
        fabric = msgspec.structs.replace(self._config.fabric, port=announcement.port)
        dashboard = urllib.parse.urlsplit(announcement.dashboard).port or 0
        self._options = msgspec.structs.replace(self._options, dashboard_port=dashboard)
        self._config = msgspec.structs.replace(self._config, fabric=fabric)
        if announcement.endpoint:
            port = urllib.parse.urlsplit(announcement.endpoint).port or 0
            self._config = self._config.having(msgspec.structs.replace(self._config.of(ServeConfig), port=port))

    # --- processes --------------------------------------------------------------------------------------------

    async def _start_gateway(self, announced_in: Path) -> Child:
        options = self._options
        announced_in.unlink(missing_ok=True)
        start = GatewayStart(
            config=to_toml(self._config),
            folder=str(options.folder),
            cache=str(options.cache),
            announce=str(announced_in),
            local_threads=threads_of(self._config),
            dashboard_port=options.dashboard_port,
            plain=options.plain,
            resume=options.resume,
            checkpoint=str(options.checkpoint or ""),
            forgive=options.forgive,
        )
        return await self._start("gateway", start, "gateway.log")

    async def _start(self, role: str, start: msgspec.Struct, log: str) -> Child:
        file = write_start(self._scratch / f"{role}.json", start)
        child = await Child.start(start_command(role, file), log=self._logs / log)
        self._children.append(child)
        return child

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

    async def _follow(self, gateway: Child, node: LocalNode, dashboard: str) -> bool:
        """Let the observer look until the gateway ends, the run is to stop, or the node manager gives up.

        Returns whether the gateway hangs.
        """
        ended = asyncio.ensure_future(gateway.wait())
        stopping = asyncio.ensure_future(self._stop.wait())
        hanging = asyncio.ensure_future(_hangs(f"{dashboard.rstrip('/')}/healthz"))
        waiters = {ended, stopping, *((hanging,) if self._options.keeps_gateway else ())}
        try:
            while not any(one.done() for one in waiters) and not node.failure:
                if self._observer is not None:
                    await self._observer.look()
                kept = () if node.kept.done() else (node.kept,)
                await asyncio.wait({*waiters, *kept}, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            return hanging in waiters and hanging.done() and not ended.done()
        finally:
            for waiter in (ended, stopping, hanging):
                waiter.cancel()

    def _error_of(self, announced_in: Path, code: int) -> PlanetaryError:
        failure = read_failure(announced_in)
        if failure is None:
            return PeerError(f"the gateway {describe_exit(code)}; its log is {self._logs / 'gateway.log'}")
        return failure.error()


async def _hangs(url: str) -> None:
    """Return when so many health probes in a row had no answer."""
    missed = 0
    while missed < MOST_MISSED:
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.to_thread(_probe, url)
            missed = 0
        except (OSError, http.client.HTTPException):
            missed += 1
        await asyncio.sleep(max(0.0, PROBE_S - (asyncio.get_running_loop().time() - began)))


def _probe(url: str) -> None:
    """Raises `OSError` for no answer in time."""
    with contextlib.suppress(urllib.error.HTTPError), opener_for(url).open(url, timeout=PROBE_S):
        pass
