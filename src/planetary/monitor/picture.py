"""`loss.png`, losses of a run and the workers over tokens; or the picture of the figures of the run's kind."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planetary.artifacts.store import write_atomically
from planetary.monitor import human_numbers as human
from planetary.monitor.run_folder import Event, RunHistory
from planetary.runs.rounds.metrics import KindPicture, RoundMetrics, figures_of

# Colours that stay apart for colour-blind readers and in grey (after Okabe and Ito).
TRAIN, HELD_OUT, BASELINE, BIGRAM, LOST = "#7FB2D9", "#0B5394", "#D55E00", "#6B6B6B", "#B3261E"
INK, FAINT = "#1F1F1F", "#DADADA"


def write_picture(folder: str | os.PathLike[str], history: RunHistory) -> Path:
    """Draw `loss.png` into the run folder and return the path. Raises `ResourceError` when it cannot be written."""
    import io

    buffer = io.BytesIO()
    draw(history).savefig(buffer, format="png", dpi=160, facecolor="white")
    path = Path(folder) / "loss.png"
    write_atomically(path, buffer.getvalue())
    return path


def draw(history: RunHistory) -> Any:
    """Return the picture as a matplotlib `Figure`. It needs no display and leaves matplotlib's global state
    alone.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    metrics, baseline = history.metrics, history.baseline
    bigram = history.facts.bigram_loss if history.facts else None

    if metrics:
        xs = [m.tokens_total for m in metrics]
        axes.plot(xs, [m.loss for m in metrics], color=TRAIN, lw=1.8, label="training loss (mean of the round)")
    _plot_held_out(axes, baseline, "one worker, no DiLoCo (held-out)", color=BASELINE, marker="s", ls="--")
    _plot_held_out(axes, metrics, "held-out loss", color=HELD_OUT, marker="o", ls="-")
    if bigram is not None:
        axes.axhline(bigram, color=BIGRAM, lw=1.2, ls=(0, (1, 2)), label=f"bigram model ({bigram:.3f})")
    lost = tokens_at_losses(history.events, metrics)
    if lost:
        axes.plot(
            lost,
            [0.015] * len(lost),
            transform=axes.get_xaxis_transform(),
            color=LOST,
            ls="none",
            marker=2,  # a tick that stands on the axis
            markersize=10,
            markeredgewidth=1.4,
            label="a worker was lost" + (f" ({len(lost)} times)" if len(lost) > 1 else ""),
        )
    _mark_last(axes, metrics)
    style(axes)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human.count(value)))
    axes.set_xlabel(f"{history.counts} trained on", color=INK)
    axes.set_ylabel(f"loss{history.loss_unit}", color=INK)
    axes.set_title(_title(history), loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=1.0, edgecolor="none", fontsize=9, labelcolor=INK, loc="upper right")
    else:
        axes.text(0.5, 0.5, "no round is finished yet", transform=axes.transAxes, ha="center", color=BIGRAM)
    return figure


def tokens_at_losses(events: Sequence[Event], metrics: Sequence[RoundMetrics]) -> list[float]:
    """Return for each lost worker how many tokens the run had seen by then, interpolated within a round by
    time.
    """
    ends = [0.0]
    totals = [0.0]
    tokens_of = {m.round: m.tokens_total for m in metrics}
    for event in events:
        t = float(event.get("t", 0.0))
        if event.get("event") == "round_started" and len(ends) == 1:
            ends[0] = t
        elif event.get("event") == "round_finished" and tokens_of.get(event["round"], -1) > totals[-1]:
            ends.append(max(t, ends[-1]))
            totals.append(tokens_of[event["round"]])
    return [
        _interpolate(float(e["t"]), ends, totals) for e in events if e.get("event") == "worker_lost" and len(ends) > 1
    ]


def _interpolate(t: float, times: Sequence[float], values: Sequence[float]) -> float:
    right = bisect.bisect_right(times, t)
    if right == 0:
        return values[0]
    if right == len(times):
        return values[-1]
    t0, t1 = times[right - 1], times[right]
    return values[right - 1] + (values[right] - values[right - 1]) * ((t - t0) / (t1 - t0) if t1 > t0 else 0.0)


def _plot_held_out(axes: Any, metrics: Sequence[RoundMetrics], label: str, **style: Any) -> None:
    points = [(m.tokens_total, m.eval_loss) for m in metrics if m.eval_loss is not None]
    if points:
        axes.plot(*zip(*points, strict=True), lw=2, markersize=4, label=label, **style)


def _mark_last(axes: Any, metrics: Sequence[RoundMetrics]) -> None:
    """Write the final held-out loss beside the point, so it can be read without a ruler."""
    last = next((m for m in reversed(metrics) if m.eval_loss is not None), None)
    if last is not None and last.eval_loss is not None:
        axes.annotate(
            f"{last.eval_loss:.3f}",
            (last.tokens_total, last.eval_loss),
            xytext=(6, -3),
            textcoords="offset points",
            color=HELD_OUT,
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
        )


def style(axes: Any) -> None:
    """Give axes the look of all pictures."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.grid(axis="y", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)


def _title(history: RunHistory) -> str:
    parts = [history.facts.run if history.facts else history.name]
    if history.facts:
        parts.append(f"{human.count(history.facts.params)} parameters")
    if history.metrics:
        last = history.metrics[-1]
        most = max(m.workers for m in history.metrics)
        word = "worker" if last.own is None else last.own.worker
        parts.append(f"{most} {word if most == 1 else word + 's'}, {last.round} rounds of {last.inner_steps} steps")
    return "  ·  ".join(parts)


def write_figures(folder: str | os.PathLike[str], history: RunHistory, picture: KindPicture) -> Path:
    """Draw the figures of the run's kind into the run folder and return the path.

    Raises `ResourceError` when it cannot be written.
    """
    import io

    buffer = io.BytesIO()
    draw_figures(history, picture).savefig(buffer, format="png", dpi=160, facecolor="white")
    path = Path(folder) / picture.file
    write_atomically(path, buffer.getvalue())
    return path


def draw_figures(history: RunHistory, picture: KindPicture) -> Any:
    """Return a picture as a matplotlib `Figure`: two figures of every round over the minutes of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    minutes, elapsed = {}, 0.0
    for line in history.metrics:
        elapsed += line.seconds / 60
        minutes[line.round] = elapsed
    points = {
        one.name: [(minutes[number], value) for number, value in one.points] for one in figures_of(history.metrics)
    }
    (each, each_label), (last, last_label) = picture.each_round, picture.held_out
    if each in points:
        axes.plot(*zip(*points[each], strict=True), color=TRAIN, lw=1.2, label=each_label)
    if held_out := points.get(last, []):
        axes.plot(*zip(*held_out, strict=True), color=HELD_OUT, lw=2, marker="o", markersize=4, label=last_label)
        axes.annotate(
            f"{held_out[-1][1]:.3f}", held_out[-1], xytext=(6, -3), textcoords="offset points", color=HELD_OUT
        )
    shaded = [minutes[line.round] for line in history.metrics if line.own is not None and line.own.is_shaded]
    if shaded:
        axes.axvspan(0, shaded[-1], color="#F0F0F0", zorder=0, label=picture.shaded)
    began = float(history.events[0].get("t", 0.0)) if history.events else 0.0
    lost = [(float(e["t"]) - began) / 60 for e in history.events if e.get("event") == "worker_lost"]
    if lost:
        axes.plot(lost, [0.01] * len(lost), color=LOST, ls="none", marker=2, markersize=10, label="a worker was lost")
    style(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes of training", color=INK)
    axes.set_ylabel(picture.axis, color=INK)
    axes.set_title(history.name, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=1.0, edgecolor="none", fontsize=9, labelcolor=INK, loc="lower right")
    return figure
