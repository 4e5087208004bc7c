"""Where a run is shown: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Protocol, TextIO, get_args

from planetary.core.clock import Clock, SystemClock
from planetary.core.printable import one_line
from planetary.fleet.protocol.status import FINAL_STATES, Leave, RunStatus
from planetary.monitor import human_numbers as human
from planetary.runs.rounds.training_status import TrainingStatus, training_of

_LEFT = frozenset(get_args(Leave))
_PRESENT = frozenset({"ready", "training", "evaluating", "serving"})


def plain_lines(before: TrainingStatus | None, after: TrainingStatus) -> list[str]:
    """Return the lines that tell how `before` (None: nothing was seen yet) became `after`, oldest news
    first.
    """
    lines = []
    if after.rounds and (before is None or not before.rounds):
        lines.append(f"run {after.run}: {after.rounds} rounds of {after.inner_steps} inner steps")
    elif before is None:
        lines.append(f"run {after.run}: its length will be fitted to this machine")
    told = before.notes if before is not None else ()
    lines += [f"note: {note}" for note in after.notes if note not in told]
    lines += _worker_lines(before, after)
    lines += _round_lines(before, after)
    # While a run waits, the newest message is the stage, which has a separate line; so has news of a worker.
    if after.message not in {"", after.stage, *lines} and (before is None or before.message != after.message):
        lines.append(f"note: {after.message}")
    lines += _stage_times(before, after)
    lines += _state_lines(before, after)
    return [one_line(line) for line in lines]


def _stage_times(before: RunStatus | None, after: RunStatus) -> list[str]:
    """Return the duration of an ended stage, from one second."""
    if before is None or not before.stage_since or not before.stage or before.stage.startswith("waiting"):
        return []
    seconds = after.stage_since - before.stage_since
    return [f"{before.stage}: took {human.duration(seconds)}"] if seconds >= 1 else []


def _state_lines(before: RunStatus | None, after: RunStatus) -> list[str]:
    if before is not None and (before.state, before.stage) == (after.state, after.stage):
        return []
    if after.state == "training":
        return []  # the rounds speak for it
    if after.state == "waiting" and any(worker.state in _PRESENT for worker in after.workers):
        return []  # the moment between two rounds
    if after.state in FINAL_STATES:
        return [] if before is not None and before.state == after.state else [after.state]
    return [f"{after.state}: {after.stage}" if after.stage else after.state]


def _worker_lines(before: TrainingStatus | None, after: TrainingStatus) -> list[str]:
    known = {worker.name: worker for worker in before.workers} if before else {}
    lines = []
    for worker in after.workers:
        old = known.get(worker.name)
        if worker.lost_count > (old.lost_count if old else 0):
            lines.append(f"worker {worker.name} was lost (pid {old.pid if old else worker.pid})")
        elif worker.state in _LEFT and (old is None or old.state != worker.state):
            lines.append(f"worker {worker.name} was {worker.state}")
        if worker.slow and not (old and old.slow):
            lines.append(f"worker {worker.name} is slow: {worker.slow}")
        elif old and old.slow and not worker.slow and worker.state in _PRESENT:
            lines.append(f"worker {worker.name} is not slow any more")
        here = worker.state in _PRESENT
        was_here = old is not None and old.state in _PRESENT
        if here and (not was_here or (old is not None and old.pid != worker.pid)):
            device = " ".join(filter(None, (worker.backend, worker.target)))
            how = "".join(f"; {text}" for text in (worker.chosen, worker.verified) if text)
            lines.append(f"worker {worker.name} is ready (pid {worker.pid}, {device or 'unknown device'}){how}")
    return lines


def _round_lines(before: TrainingStatus | None, after: TrainingStatus) -> list[str]:
    told = {number for number, _ in before.loss} if before else set()
    held_out, figures = dict(after.eval_loss), [(one.name, dict(one.points)) for one in after.figures]
    told_held_out = {number for number, _ in before.eval_loss} if before else set()
    lines = []
    fresh = [(number, value) for number, value in after.loss if number not in told]
    for number, value in fresh:
        line = f"round {number}/{after.rounds}: train loss {human.loss(value)}"
        if number in held_out:
            line += f", eval loss {human.loss(held_out[number])}"
        line += "".join(f", {name} {human.figure(points[number])}" for name, points in figures if number in points)
        if number == fresh[-1][0]:  # totals are those of the newest round
            line += f", {human.count(after.tokens_total)} {after.counts}"
            if after.tokens_per_s > 0:
                line += f", {human.count(after.tokens_per_s)} {after.counts}/s"
            line += f", up {human.size(after.bytes_up)}, down {human.size(after.bytes_down)}"
            if after.seconds_left is not None:
                line += f", {human.duration(after.seconds_left)} left"
        lines.append(line)
    # A held-out loss can arrive after the round was printed.
    lines += [
        f"round {number}/{after.rounds}: eval loss {human.loss(value)}"
        for number, value in after.eval_loss
        if number in told and number not in told_held_out
    ]
    return lines


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
        self._last: TrainingStatus | None = None

    def show(self, status: RunStatus) -> None:
        """Print the news since the last status."""
        after = training_of(status)
        for line in plain_lines(self._last, after):
            print(line, file=self._stream, flush=True)
        self._last = after

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
        # The caller decides when to draw; rich's own thread would draw in the middle of the work.
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
