"""A served model on the terminal: a line for everything that happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from planetary.core.errors import PeerError
from planetary.fabric.protocol.status import RunStatus
from planetary.run.processes.announcement import Announcement
from planetary.run.status_source import status_source


class ServingLines:
    """Prints the news in the gateway's status; a `planetary.run.processes.local_run.RunObserver`."""

    def __init__(self) -> None:
        """Nothing is printed before the gateway listens."""
        self._read: Callable[[], RunStatus] | None = None
        self._endpoint = ""
        self._stage = ""
        self._ready = False
        self._told = 0.0  # Unix time in seconds of the newest event that was printed
        self._notes = 0

    def listening(self, announcement: Announcement) -> None:
        """The endpoint answers, though not with texts yet."""
        self._read, self._endpoint = status_source(announcement.dashboard), announcement.endpoint
        print(f"dashboard {announcement.dashboard}", flush=True)

    async def look(self) -> None:
        """Print the news."""
        if self._read is None:
            return
        # The gateway may end between two looks, and a busy one may answer late; the next look shows more.
        with contextlib.suppress(PeerError):
            self._show(await asyncio.to_thread(self._read))

    async def ended(self) -> None:
        """Nothing is left to print."""

    def _show(self, status: RunStatus) -> None:
        for note in status.notes[self._notes :]:
            print(note, flush=True)
        self._notes = len(status.notes)
        for t, text in status.events:
            if t > self._told:
                self._told = t
                print(text, flush=True)
        ready = status.state == "serving"
        if ready and not self._ready:
            count = sum(worker.state in {"ready", "serving"} for worker in status.workers)
            print(f"serving at {self._endpoint}/v1 with {count} worker{'' if count == 1 else 's'}", flush=True)
        elif not ready and status.stage and status.stage != self._stage:
            print(status.stage, flush=True)
        self._ready, self._stage = ready, status.stage
