"""Waits for what another process or thread does.

A limit here is for hangs and never measures speed: a machine may be ten times slower in one minute than in the next. It
lies below the test runner's own limit, which tells less.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

HANG_S = 400.0

Found = TypeVar("Found")


def wait_until(
    holds: Callable[[], Found],
    what: str,
    *,
    said: Callable[[], str] = str,
    process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
) -> Found:
    """Return the first value of `holds` that is true; fails in a hang, or when `process` ends before.

    `said` gives what the failure shows: the end of a log.
    """
    limit = time.monotonic() + HANG_S
    while True:
        # Asked first: what a process did at its end is seen by the call that follows.
        ended = process is not None and process.poll() is not None
        if found := holds():
            return found
        assert process is None or not ended, f"it ended with {process.returncode} before: {what}\n{said()}"
        assert time.monotonic() < limit, f"not within {HANG_S:.0f} s: {what}\n{said()}"
        time.sleep(0.02)  # there is no event to wait for
