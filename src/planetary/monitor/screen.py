"""Where a run is shown: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Protocol, TextIO

from planetary.core.clock import Clock, SystemClock
from planetary.core.printable import one_line
from planetary.fabric.protocol.status import RunStatus


class Screen(Protocol):
    """Shows one status after the other. Not thread-safe: one thread shows and closes."""

    def show(self, status: RunStatus) -> None:
        """Show `status` in place of the one before."""
        ...

    def close(self) -> None:
        """Leave the last status readable and give the terminal back."""
        ...

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_screen(stream: TextIO | None = None, clock: Clock | None = None) -> Screen:
    """Return a live panel when `stream` (default: standard output) is a capable terminal, else plain lines.

    `TERM=dumb`, an encoding other than Unicode and the absence of `rich` all mean plain lines.
    """
    target: TextIO = sys.stdout if stream is None else stream
    unicode = (getattr(target, "encoding", None) or "").lower().startswith("utf")
    if not target.isatty() or not unicode or os.environ.get("TERM") == "dumb":
        return PlainScreen(target)
    try:
        return LiveScreen(target, clock)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "rich":
            raise
        return PlainScreen(target)


class PlainScreen:
    """One line per finished round or notable event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: RunStatus | None = None

    def show(self, status: RunStatus) -> None:
        """Print what is new since the last status."""
        from planetary.monitor.plain_lines import plain_lines

        for line in plain_lines(self._last, status):
            print(line, file=self._stream, flush=True)
        self._last = status

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LiveScreen:
    """A panel that is redrawn in place."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._clock = clock or SystemClock()
        self._console = Console(file=stream)
        # The caller decides when to draw; a thread of rich's own would draw in the middle of its work.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        self._told: tuple[str, ...] = ()

    def show(self, status: RunStatus) -> None:
        """Redraw."""
        from planetary.monitor.display import render

        for note in status.notes:
            if note not in self._told:  # the panel's newest event would be the next worker
                self._console.print(one_line(note))
        self._told = status.notes
        self._live.update(render(status, self._clock.wall(), self._console.width), refresh=True)

    def close(self) -> None:
        """Stop redrawing; the last panel stays on the terminal."""
        self._live.stop()

    def __enter__(self) -> LiveScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
