"""The node manager: starts one supervisor per worker, one after the other, and keeps them running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from planetary.core.exit_status import describe_exit
from planetary.fleet.shell.child import Child, on_stop_signals
from planetary.fleet.supervisor.node_news import NodeNews, read_report
from planetary.fleet.supervisor.restarts import Restarts

LOOK_EVERY_S = 0.5  # seconds between two looks at the supervisors' reports

log = logging.getLogger(__name__)


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a node manager is started."""

    names: tuple[str, ...]  # worker names
    commands: tuple[tuple[str, ...], ...]  # commands of their supervisors
    log: Path | None  # folder for the supervisors' output; None: this process's own
    stagger_s: float
    restart_first_s: float
    restart_limit_s: float
    shutdown_s: float
    place: str  # address of the gateway
    reports: tuple[Path, ...]  # files of the supervisors; see `supervisor_machine`
    final_codes: frozenset[int]


class NodeManager:
    """Runs until every supervisor has ended for good, or a stop signal comes."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Return the highest exit status of the supervisors' last runs."""
        on_stop_signals(self.stop)
        news = NodeNews(self._options.place, len(self._options.names))
        talking = asyncio.get_running_loop().create_task(self._talk(news))
        codes = await asyncio.gather(
            *(
                self._keep(index, name, command)
                for index, (name, command) in enumerate(zip(self._options.names, self._options.commands, strict=True))
            )
        )
        talking.cancel()
        self._look(news)
        return max(codes, default=0)

    async def _talk(self, news: NodeNews) -> None:
        while True:
            self._look(news)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, news: NodeNews) -> None:
        """Log the reports of the supervisors."""
        for line in news.lines([read_report(path) for path in self._options.reports], time.monotonic()):
            log.info("%s", line)

    def stop(self, reason: str) -> None:
        """End all supervisors, then return from `run`."""
        log.info("node manager stops: %s", reason)
        self._stopping.set()

    async def _keep(self, index: int, name: str, command: Sequence[str]) -> int:
        options = self._options
        restarts = Restarts(
            name,
            first_s=options.restart_first_s,
            limit_s=options.restart_limit_s,
            healthy_after_s=options.restart_limit_s,
            final_codes=options.final_codes,
        )
        pause: float | None = index * options.stagger_s
        code = 0
        while pause is not None and not await self._stopped_within(pause):
            began = time.monotonic()
            folder = options.log
            child = await Child.start(command, log=None if folder is None else folder / f"supervisor-{index}.log")
            code = await self._watch(child)
            log.info("supervisor of %s, process %d, %s", name, child.pid, describe_exit(code))
            if self._stopping.is_set():
                return 0
            pause = restarts.pause_after(code, time.monotonic() - began)
        return max(code, 0)

    async def _watch(self, child: Child) -> int:
        ended = asyncio.ensure_future(child.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            # A supervisor gives the worker `shutdown_s` to end, and needs a moment itself.
            await child.end(2 * self._options.shutdown_s)
        return await ended

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()
