"""A `RunStatus` as a few lines of plain text, for a pipe or a mail. Pure and ASCII, but for names."""

from __future__ import annotations

from planetary.core.printable import one_line
from planetary.fleet.protocol.status import FINAL_STATES, RunStatus
from planetary.monitor import human_numbers as human
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus, training_of

_COLUMNS = ("worker", "state", "round", "step", "loss", "a step", "transfers", "share", "last result", "lost", "device")
_NUMBERS = frozenset(_COLUMNS[2:10])


def status_text(seen: RunStatus, now: float) -> str:
    """Return the view of a run at Unix time `now`, in lines that end with a newline."""
    status = training_of(seen)
    lines = [_headline(status, now), *_numbers(status, seen.lines, now)]
    if status.workers:
        lines += ["", *_table([_COLUMNS, *(_row(worker, status, now) for worker in status.workers)])]
    lines += [f"{worker.name} is slow: {worker.slow}" for worker in status.workers if worker.slow]
    if status.waiting_for:
        names = ", ".join(status.waiting_for)
        lines.append(f"waiting for {names} ({human.duration(max(0.0, now - status.waiting_since))})")
    if status.message:
        lines.append(f"newest event: {status.message}")
    lines += [f"note: {note}" for note in status.notes]
    return "".join(one_line(line) + "\n" for line in lines)


def _headline(status: TrainingStatus, now: float) -> str:
    parts = [f"run {status.run}: {status.state}"]
    if status.rounds:
        parts.append(f"round {status.round} of {status.rounds}")
    if status.stage:
        parts.append(status.stage)
    if status.started_at:
        elapsed = human.duration(max(0.0, (status.ended_at or now) - status.started_at))
        parts.append(f"took {elapsed}" if status.state in FINAL_STATES else f"{elapsed} so far")
    if status.seconds_left is not None and status.state not in FINAL_STATES:
        parts.append(f"{human.duration(status.seconds_left)} left")
    return ", ".join(parts)


def _numbers(status: TrainingStatus, own: list[str], now: float) -> list[str]:
    lines = []
    if status.loss:
        held_out = f", held-out loss {human.loss(status.eval_loss[-1][1])}" if status.eval_loss else ""
        figures = "".join(f", {one.name} {human.figure(one.points[-1][1])}" for one in status.figures)
        lines.append(f"training loss {human.loss(status.loss[-1][1])}{held_out}{figures}")
    if status.tokens_total:
        speed = f", {human.count(status.tokens_per_s)} {status.counts}/s" if status.tokens_per_s else ""
        traffic = f", up {human.size(status.bytes_up)}, down {human.size(status.bytes_down)}"
        lines.append(f"{human.count(status.tokens_total)} {status.counts}{speed}{traffic}")
    lines += own
    if status.checkpoint_round:
        age = ""
        if status.checkpoint_at is not None:
            age = f", {human.duration(max(0.0, now - status.checkpoint_at))} old"
        free = f", {human.size(status.disk_free)} free on the disk" if status.disk_free is not None else ""
        lines.append(f"newest checkpoint of round {status.checkpoint_round}{age}{free}")
    return lines


def _row(worker: TrainerStatus, status: TrainingStatus, now: float) -> tuple[str, ...]:
    busy = worker.state == "training"
    last = worker.last_contribution_at
    return (
        worker.name,
        f"{worker.state}, slow" if worker.slow else worker.state,
        str(worker.round or "-"),
        f"{worker.step}/{status.inner_steps}" if busy and worker.step and status.inner_steps else "-",
        human.loss(worker.loss),
        _short(worker.step_s),
        _short(worker.transfer_s),
        human.percent(worker.share) if worker.share is not None else "-",
        "-" if last is None else human.duration(max(0.0, now - last)),
        str(worker.lost_count),
        " ".join(filter(None, (worker.backend, worker.target))) or "-",
    )


def _short(seconds: float | None) -> str:
    """Return a duration that is often far below a second."""
    return f"{1000 * seconds:.3g} ms" if seconds is not None and seconds < 0.1 else human.duration(seconds)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    rows = [tuple(one_line(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for cell, width, name in zip(row, widths, _COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    ]
