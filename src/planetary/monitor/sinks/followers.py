"""Brings metrics and events of a run to sinks: one bounded queue and one thread for each.

A sink never stops or slows a run: records beyond the queue are dropped, the first failure is reported, so is the
recovery, and at the end it gets a limited time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from planetary.core.errors import UserError
from planetary.core.printable import one_line
from planetary.machine.journal import Record
from planetary.monitor.sinks.sink import Sink, SinkRun
from planetary.runs.rounds.metrics import RoundMetrics

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # items of one sink
END_S = 30.0  # seconds for sinks to take the rest

Item = RoundMetrics | Record


class Followers:
    """The sinks of one run; see `planetary.fleet.gateway.gateway.Follower`. Methods do not block, but `close`."""

    def __init__(
        self, sinks: Sequence[tuple[str, Sink]], run: Callable[[], SinkRun], report: Callable[[str], None]
    ) -> None:
        """Start the threads of named sinks.

        `run` is called when the run has begun, and `report` with messages for people; both from those threads.
        """
        self._followers = [_Follower(name, sink, run, report) for name, sink in sinks]

    def write_metrics(self, line: RoundMetrics) -> None:
        """Pass on the metrics of a round."""
        for follower in self._followers:
            follower.put(line)

    def write_event(self, record: Record) -> None:
        """Pass on a record of the journal."""
        for follower in self._followers:
            follower.put(record)

    def close(self, ok: bool, within_s: float = END_S) -> None:
        """Let the sinks take queued records, and end them; sinks that have not ended after `within_s` are abandoned."""
        for follower in self._followers:
            follower.end(ok)
        share = within_s / max(1, len(self._followers))
        for follower in self._followers:
            follower.join(share)


class _Follower:
    """One sink with a queue and a thread."""

    def __init__(self, name: str, sink: Sink, run: Callable[[], SinkRun], report: Callable[[str], None]) -> None:
        self._name, self._sink, self._run, self._report = name, sink, run, report
        self._queue: queue.Queue[Item | bool] = queue.Queue(MOST_WAITING)  # last item: the run finished
        self._left_out = 0
        self._opened = self._failing = self._hopeless = False
        self._ending = threading.Event()
        self._ok = False
        self._thread = threading.Thread(target=self._follow, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._report(f"sink {self._name} is slower than the run: some of its lines are left out")

    def end(self, ok: bool) -> None:
        self._ok = ok
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(ok)  # wakes the thread up

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.warning("sink %s did not end within %.0f s", self._name, within_s)

    def _follow(self) -> None:
        self._attempt(self._sink.load)
        while not (self._ending.is_set() and self._queue.empty()):
            item = self._queue.get()
            if isinstance(item, bool) or self._hopeless or not self._sink.wants(item):
                continue
            if self._attempt(lambda item=item: self._write(item)) and self._failing:
                self._failing = False
                self._report(f"sink {self._name} works again")
        if self._opened:
            self._attempt(lambda: self._sink.close(self._ok))

    def _open(self) -> None:
        self._sink.open(self._run())
        self._opened = True

    def _write(self, item: Item) -> None:
        if not self._opened:
            self._open()
        if isinstance(item, RoundMetrics):
            self._sink.write_round(item)
        else:
            self._sink.write_event(item)

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Return whether it did not fail; the first failure is reported."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises is no reason to stop a run
            self._hopeless |= isinstance(error, UserError)  # an import that failed fails again
            if not self._failing:
                self._failing = True
                text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                self._report(one_line(f"sink {self._name} failed, and the run goes on without it: {text}"))
            return False
        return True
