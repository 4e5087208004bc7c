"""A local run on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from planetary.core.errors import PeerError
from planetary.fleet.gateway.run_files import EVENTS
from planetary.fleet.protocol.status import RunStatus
from planetary.fleet.shell.child import on_stop_signals
from planetary.monitor.screen import Screen, open_screen
from planetary.run.processes.announcement import Announcement
from planetary.run.processes.local_run import LocalRun
from planetary.run.status_source import status_source


class ScreenObserver:
    """Shows the gateway's status; a `planetary.run.processes.local_run.RunObserver`. To be closed."""

    def __init__(self, folder: Path) -> None:
        """Show the run in `folder`; the screen opens when the gateway listens."""
        self._folder = folder
        self._screen: Screen | None = None
        self._read: Callable[[], RunStatus] = status_source(str(folder))

    def listening(self, announcement: Announcement) -> None:
        """Open the screen."""
        self._read = status_source(announcement.dashboard)
        if not sys.stdout.isatty():
            print(f"run {self._folder}, dashboard {announcement.dashboard}", flush=True)
        self._screen = open_screen()

    def lost(self, reason: str) -> None:
        """A training's gateway is not started again."""

    async def look(self) -> None:
        """Show the newest status."""
        # The gateway may end between two looks, and a busy one may answer late; the next look shows more.
        with contextlib.suppress(PeerError):
            self._show(await asyncio.to_thread(self._read))

    async def ended(self) -> None:
        """Show the last status, which only the folder has."""
        # A gateway that failed before the run began has left no journal; the error is shown instead.
        if (self._folder / EVENTS).exists():
            self._show(await asyncio.to_thread(status_source(str(self._folder))))

    def close(self) -> None:
        """Give the terminal back."""
        if self._screen is not None:
            self._screen.close()

    def _show(self, status: RunStatus) -> None:
        if self._screen is not None:
            self._screen.show(status)


async def run_until_signal(run: LocalRun) -> str:
    """Carry `run` out; SIGTERM and SIGINT stop it. Return how it was stopped, or "" if it finished."""
    stopped_by: list[str] = []

    def stop(how: str) -> None:
        stopped_by.append(how)
        run.stop()

    on_stop_signals(stop)
    outcome = await run.run()
    return "" if outcome == "finished" else (stopped_by or ["stopped"])[0]
