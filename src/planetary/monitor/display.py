"""The live display: one status as a rich renderable. Pure: same status, time and width, same picture."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from planetary.core.printable import one_line
from planetary.fleet.protocol.status import FINAL_STATES, RunStatus
from planetary.monitor import human_numbers as human
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus, training_of

MAX_WIDTH = 100
"""Wider terminals get a panel of this many columns: longer lines are no easier to read."""

_RUN_STYLE = {
    "preparing": "cyan",
    "waiting": "yellow",
    "training": "green",
    "serving": "green",
    "finishing": "cyan",
    "finished": "bold green",
    "failed": "bold red",
    "stopped": "yellow",
}
WORKER_STYLE = {
    "starting": "cyan",
    "fetching": "cyan",
    "ready": "blue",
    "training": "green",
    "evaluating": "magenta",
    "serving": "green",
    "lost": "bold red",
    "stopped": "dim",
    "moved": "dim",
    "drained": "dim",
    "restarted": "cyan",
}
_MAX_WORKERS_SHOWN = 12  # more than that, and only those in need of attention come first


def render(seen: RunStatus, now: float, width: int = 80) -> RenderableType:
    """Return the picture of a run at Unix time `now` (seconds) for a terminal of `width` columns."""
    status = training_of(seen)
    width = min(width, MAX_WIDTH)
    inside = width - 4
    parts: list[RenderableType] = [_progress(status, now, inside)]
    if status.loss or status.tokens_total:
        parts += [Text(), _numbers(status, inside)]
    if status.workers:
        parts += [Text(), _workers(status)]
    if status.message:
        style = "red" if status.state == "failed" else "yellow"
        parts += [Text(), Text(one_line(status.message), style=style, overflow="fold")]
    style = _RUN_STYLE[status.state]
    return Panel(
        Group(*parts),
        title=f"[bold]planetary[/] · {escape(status.run)}",
        title_align="left",
        subtitle=f"[{style}]{status.state}[/]",
        subtitle_align="right",
        border_style="bright_black",
        padding=(0, 1),
        width=width,
    )


def fraction_done(status: TrainingStatus) -> float:
    """Share of the run that is done, between 0 and 1: whole rounds plus the mean progress in the open one.

    A round that is being reduced while the next one is trained counts as whole.
    """
    if status.rounds <= 0:
        return 0.0
    trained = status.rounds_finished + (1 if status.reducing else 0)
    in_round = 0.0
    if status.inner_steps > 0 and status.state not in FINAL_STATES:
        steps = [w.step for w in status.workers if w.state == "training" and w.round == trained + 1]
        in_round = sum(steps) / len(steps) / status.inner_steps if steps else 0.0
    return max(0.0, min(1.0, (trained + min(in_round, 1.0)) / status.rounds))


def _progress(status: TrainingStatus, now: float, width: int) -> RenderableType:
    elapsed = human.duration(max(0.0, (status.ended_at or now) - status.started_at)) if status.started_at else "-"
    if status.state in FINAL_STATES:
        right = f"took {elapsed}"
    elif status.seconds_left is not None:
        right = f"{human.duration(status.seconds_left)} left"
    else:
        right = f"{elapsed} so far"
    if status.state == "preparing":
        left = status.stage or "preparing"
    elif status.stage and status.state in ("waiting", "finishing"):
        left = f"round {status.round} of {status.rounds}, {status.stage}"
    elif status.reducing:
        left = f"round {status.round} of {status.rounds}, {status.reducing} is being reduced"
    else:
        left = f"round {status.round} of {status.rounds}"
    if status.stage and status.stage_since and status.state in ("preparing", "waiting", "finishing"):
        left += f", {human.duration(max(0.0, now - status.stage_since))}"
    done = fraction_done(status)
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    if status.state == "preparing":
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(Text(left, style="bold"), Text(right))
        return row
    # The text may be long ("waiting for 2 workers"); the bar takes the rest of the line.
    bar_width = max(8, width - len(left) - len(right) - 14)
    row.add_column(ratio=1)
    row.add_column(width=bar_width)
    row.add_column(justify="right", no_wrap=True, width=5)
    row.add_column(justify="right", no_wrap=True)
    style = _RUN_STYLE[status.state].split()[-1]
    bar = ProgressBar(total=1.0, completed=done, width=bar_width, complete_style=style, finished_style=style)
    row.add_row(Text(left, style="bold"), bar, Text(human.percent(done)), Text(right))
    return row


def _numbers(status: TrainingStatus, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    names = max([10, *(len(figure.name) for figure in status.figures)])
    spark = max(8, width - 43 - names)
    grid.add_column(style="dim", width=names, no_wrap=True)
    grid.add_column(justify="right", width=7, no_wrap=True, style="bold")
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_column(style="dim", width=8, no_wrap=True)
    grid.add_column(width=21, no_wrap=True)
    train, held_out = [v for _, v in status.loss], [v for _, v in status.eval_loss]
    short = "tok" if status.counts == "tokens" else status.counts  # the column is narrow
    speed = f"{human.count(status.tokens_per_s)} {short}/s" if status.tokens_per_s > 0 else "-"
    grid.add_row(
        "train loss",
        human.loss(train[-1] if train else None),
        Text(human.sparkline(train, spark), style="green"),
        status.counts,
        f"{human.count(status.tokens_total)} · {speed}",
    )
    grid.add_row(
        "eval loss",
        human.loss(held_out[-1] if held_out else None),
        Text(human.sparkline(held_out, spark), style="magenta"),
        "traffic",
        f"↑ {human.size(status.bytes_up)} ↓ {human.size(status.bytes_down)}",
    )
    for figure in status.figures:
        values = [value for _, value in figure.points]
        shown = Text(human.sparkline(values, spark), style="cyan")
        grid.add_row(figure.name, human.figure(values[-1] if values else None), shown)
    return grid


def _workers(status: TrainingStatus) -> RenderableType:
    shown, hidden = workers_shown(status.workers, _MAX_WORKERS_SHOWN)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
    table.add_column("worker", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("state", width=12, no_wrap=True)
    table.add_column("round", justify="right", width=5)
    table.add_column("step", justify="right", width=9, no_wrap=True)
    table.add_column("loss", justify="right", width=7)
    table.add_column("lost", justify="right", width=4)
    table.add_column("device", width=11, no_wrap=True, overflow="ellipsis")
    for worker in shown:
        busy = worker.state == "training"
        table.add_row(
            Text(one_line(worker.name)),
            Text(f"● {worker.state}", style="yellow" if worker.slow else WORKER_STYLE[worker.state]),
            str(worker.round) if worker.round else "-",
            f"{worker.step}/{status.inner_steps}" if busy and status.inner_steps else "-",
            human.loss(worker.loss if busy else None),
            Text(str(worker.lost_count), style="red" if worker.lost_count else "dim"),
            Text(one_line(" ".join(filter(None, (worker.backend, worker.target)))), style="dim"),
        )
    below = [Text(one_line(f"{w.name} is slow: {w.slow}"), style="yellow", overflow="fold") for w in shown if w.slow]
    if hidden:
        below.append(Text(f"and {hidden} more workers", style="dim"))
    return Group(table, *below) if below else table


def workers_shown(workers: tuple[TrainerStatus, ...], limit: int) -> tuple[list[TrainerStatus], int]:
    """Return the workers to list and how many are left out: lost and slow ones first when there are too many."""
    if len(workers) <= limit:
        return list(workers), 0
    urgent = sorted(workers, key=lambda worker: (worker.state != "lost", not worker.slow, -worker.lost_count))
    return urgent[:limit], len(workers) - limit
