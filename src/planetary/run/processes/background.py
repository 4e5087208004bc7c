"""A run carried by a thread of its own, so that it needs no event loop, and works beside one, as in a notebook.

The thread installs no signal handlers. At the interpreter's exit every run that is still carried is stopped in order;
processes that remain are killed by their ids.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
from typing import Protocol

from planetary.run.processes.local_run import STOP_LIMIT_S, Outcome

EXIT_LIMIT_S = 3 * STOP_LIMIT_S


class Orchestration(Protocol):
    """Starts, follows and ends the processes of a run: `planetary.run.processes.local_run.LocalRun`."""

    async def run(self) -> Outcome:
        """Run to the end, or until `stop`."""
        ...

    def stop(self) -> None:
        """End in order. Called on the event loop of `run`."""
        ...

    def kill(self) -> None:
        """Kill the processes. Called from any thread."""
        ...


class BackgroundRun:
    """One orchestration and the thread that carries it."""

    def __init__(self, orchestration: Orchestration) -> None:
        """Start."""
        self.outcome: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self.outcome.set_running_or_notify_cancel()  # from now on waiting for it can be cancelled, itself it cannot
        self._orchestration = orchestration
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        _CARRIED.add(self)
        # A daemon: the interpreter would wait for any other thread before it calls `_stop_all`.
        self._thread = threading.Thread(target=self._carry, name="planetary-run", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for an orderly end; from any thread. `outcome` tells when it has come."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has come
            self._loop.call_soon_threadsafe(self._orchestration.stop)

    def end(self, within_s: float) -> None:
        """Stop, and kill the processes if they have not ended after `within_s` seconds.

        On the run's own thread, which a callback is called on, it only asks: waiting there would wait for itself.
        """
        self.stop()
        if threading.current_thread() is self._thread:
            return
        if not concurrent.futures.wait([self.outcome], within_s).done:
            self._orchestration.kill()
            concurrent.futures.wait([self.outcome], within_s)

    def _carry(self) -> None:
        try:
            with self._runner:
                outcome = self._runner.run(self._orchestration.run())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            _CARRIED.discard(self)
            self.outcome.set_exception(error)
        else:
            _CARRIED.discard(self)
            self.outcome.set_result(outcome)


_CARRIED: set[BackgroundRun] = set()


@atexit.register
def _stop_all() -> None:
    carried = list(_CARRIED)
    for run in carried:
        run.stop()
    for run in carried:
        run.end(EXIT_LIMIT_S)
