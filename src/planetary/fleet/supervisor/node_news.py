"""News of a node manager: whether the workers have a gateway, and since when not. Pure, but for reading files.

Each supervisor writes a `SupervisorReport` whenever it changes; the node manager reads them and makes one line of the
reports that agree, so a node with eight workers logs one line instead of eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planetary.core import decoding
from planetary.machine.redial import LinkState

AGAIN_S = 30.0  # seconds until an unchanged error is logged again
LINE_S = 60.0  # seconds between two lines while nothing happens


class SupervisorReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a supervisor's connection and worker."""

    link: LinkState
    run: str = ""  # run of the last connected gateway
    error: str = ""  # why it is not connected; "" while it is, and before the first attempt has ended
    retry_in_s: float | None = None  # time until the next attempt, at the time of writing
    pid: int = 0  # worker's process id; 0: it does not run
    restarts: int = 0  # restarts of that process
    ended: str = ""  # why the supervisor ends, by order of the gateway or a person; "": it does not


def read_report(path: Path) -> SupervisorReport | None:
    """Return the newest report in a file; None when there is none yet."""
    try:
        return decoding.from_json(path.read_bytes(), SupervisorReport)
    except (OSError, msgspec.MsgspecError):
        return None


class NodeNews:
    """The lines of one node manager; `now` is monotonic, in seconds."""

    def __init__(self, place: str, workers: int) -> None:
        """`place`: of the gateway; `workers`: how many this node has."""
        self._place, self._workers = place, workers
        self._run = ""  # joined run
        self._lost_at: float | None = None
        self._error, self._told_at = "", 0.0
        self._begun = self._over = False

    def lines(self, reports: Sequence[SupervisorReport | None], now: float) -> list[str]:
        """Return the lines to log now, given the newest reports."""
        told: list[str] = []
        if not self._begun:
            self._begun = True
            told.append(f"connecting to {self._place}")
        known = [report for report in reports if report is not None]
        if ended := next((report.ended for report in known if report.ended), ""):
            told += [] if self._over else [f"leaving{f' run {self._run}' if self._run else ''}: {ended}"]
            self._over = True
            return told
        connected = [report for report in known if report.link is LinkState.CONNECTED]
        if connected:
            told += self._connected(connected, known, now)
        elif errors := [report for report in known if report.error]:
            told += self._away(errors[0], now)
        if told:
            self._told_at = now
        return told

    def _connected(
        self, connected: Sequence[SupervisorReport], known: Sequence[SupervisorReport], now: float
    ) -> list[str]:
        run, lost_at, self._lost_at, self._error = connected[0].run, self._lost_at, None, ""
        if run != self._run:
            self._run = run
            return [f"joined run {run} at {self._place}"]
        if lost_at is not None:
            return [f"the gateway of run {run} is back after {now - lost_at:.0f} s"]
        if now < self._told_at + LINE_S:
            return []
        running, restarts = sum(report.pid > 0 for report in known), sum(report.restarts for report in known)
        again = f", {restarts} restarts so far" if restarts else ""
        return [f"run {run}: {running} of {self._workers} workers are running{again}"]

    def _away(self, report: SupervisorReport, now: float) -> list[str]:
        wait = report.retry_in_s  # None while a try is under way
        retry = " (trying again now)" if wait is None else f" (next try in {wait:.1f} s)"
        if self._run and self._lost_at is None:
            self._lost_at, self._error = now, report.error
            return [f"the gateway of run {self._run} is lost: {report.error}{retry}"]
        if report.error == self._error and now < self._told_at + AGAIN_S:
            return []
        self._error = report.error
        return [f"cannot join yet: {report.error}{retry}"]
