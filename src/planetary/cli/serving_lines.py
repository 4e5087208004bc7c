"""A served model on the terminal: a line for everything that happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable

from planetary.core.errors import PeerError
from planetary.fleet.protocol.status import RunStatus
from planetary.run.processes.announcement import Announcement
from planetary.run.status_source import status_source
from planetary.runs.serve.status import ServingStatus


class ServingLines:
    """Prints the news in the gateway's status; a `planetary.run.processes.local_run.RunObserver`."""

    def __init__(self, keys: str = "") -> None:
        """Nothing is printed before the gateway listens. `keys`: file of which a request needs one; "": none."""
        self._keys = keys
        self._read: Callable[[], RunStatus] | None = None
        self._printed = ""  # the newest line
        self._stage = ""
        self._ready = False
        self._told = 0.0  # Unix time in seconds of the newest event that was printed
        self._notes = 0

    def listening(self, announcement: Announcement) -> None:
        """The endpoint answers, though not with texts yet."""
        self._read = status_source(announcement.dashboard)
        self._print(f"dashboard {announcement.dashboard}")

    def lost(self, reason: str) -> None:
        """The next gateway has news of its own."""
        self._print(reason)
        self._ready, self._notes, self._stage = False, 0, ""

    async def look(self) -> None:
        """Print the news."""
        if self._read is None:
            return
        # The gateway may end between two looks, and a busy one may answer late; the next look shows more.
        with contextlib.suppress(PeerError):
            self.show(await asyncio.to_thread(self._read))

    async def ended(self) -> None:
        """Nothing is left to print."""

    def show(self, status: RunStatus) -> None:
        """Print the differences from the status before."""
        for note in status.notes[self._notes :]:
            self._print(note)
        self._notes = len(status.notes)
        for t, text in status.events:
            if t > self._told:
                self._told = t
                self._print(text)
        ready = status.state == "serving"
        if ready and not self._ready and isinstance(status, ServingStatus):
            url, name = status.endpoint, status.model
            count = sum(worker.state in {"ready", "serving"} for worker in status.workers)
            self._print(f"serving at {url}/v1 with {count} worker{'' if count == 1 else 's'}. Try it:")
            self._print(example_request(url, name, self._keys))
        elif not ready and status.stage and status.stage != self._stage:
            self._print(status.stage)
        self._ready, self._stage = ready, status.stage

    def _print(self, line: str) -> None:
        """Print a line, unless it is the one before it: a wait is a stage, and an event once it has lasted."""
        if line != self._printed:
            print(line, flush=True)
        self._printed = line


def example_request(url: str, model: str, keys: str) -> str:
    """Return a command for a shell that asks a served model for a text.

    Args:
        url: of the endpoint.
        model: name of the model.
        keys: file of lines of a name and a key; the command reads the first key from it, so none is printed. "": no key
            is needed.
    """
    key = ""
    if keys:
        first_key = '{ sub(/#.*/, "") } NF == 2 { print $2; exit }'
        key = f' -H "Authorization: Bearer $(awk {shlex.quote(first_key)} {shlex.quote(keys)})"'
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 40}, ensure_ascii=False)
    return (
        f"curl {shlex.quote(url + '/v1/completions')}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
