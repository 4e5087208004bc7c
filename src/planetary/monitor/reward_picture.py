"""`reward.png`: what a policy was rewarded with, round by round, and what it is rewarded with on held-out prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from planetary.artifacts.store import write_atomically
from planetary.monitor.picture import HELD_OUT, INK, LOST, TRAIN, style
from planetary.monitor.run_folder import RunHistory


def write_reward_picture(folder: str | os.PathLike[str], history: RunHistory) -> Path:
    """Draw `reward.png` into the run folder and return its path. Raises `ResourceError` when it cannot be written."""
    import io

    buffer = io.BytesIO()
    draw_rewards(history).savefig(buffer, format="png", dpi=160, facecolor="white")
    path = Path(folder) / "reward.png"
    write_atomically(path, buffer.getvalue())
    return path


def draw_rewards(history: RunHistory) -> Any:
    """Return the picture as a matplotlib `Figure`: rewards of sampled and of held-out completions, over minutes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    minutes, elapsed = {}, 0.0
    for line in history.metrics:
        elapsed += line.seconds / 60
        minutes[line.round] = elapsed
    policies = [(minutes[line.round], line.policy) for line in history.metrics if line.policy is not None]
    sampled = [(at, one.reward) for at, one in policies if one.reward is not None]
    held_out = [(at, one.held_out_reward) for at, one in policies if one.held_out_reward is not None]
    if sampled:
        axes.plot(*zip(*sampled, strict=True), color=TRAIN, lw=1.2, label="sampled completions (mean of the round)")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color=HELD_OUT, lw=2, marker="o", markersize=4, label="held-out prompts"
        )
        axes.annotate(
            f"{held_out[-1][1]:.3f}", held_out[-1], xytext=(6, -3), textcoords="offset points", color=HELD_OUT
        )
    imitated = [at for at, one in policies if one.imitates]
    if imitated:
        axes.axvspan(0, imitated[-1], color="#F0F0F0", zorder=0, label="imitation of answers")
    began = float(history.events[0].get("t", 0.0)) if history.events else 0.0
    lost = [(float(e["t"]) - began) / 60 for e in history.events if e.get("event") == "worker_lost"]
    if lost:
        axes.plot(lost, [0.01] * len(lost), color=LOST, ls="none", marker=2, markersize=10, label="a worker was lost")
    style(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes of training", color=INK)
    axes.set_ylabel("mean reward", color=INK)
    axes.set_title(history.name, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=1.0, edgecolor="none", fontsize=9, labelcolor=INK, loc="lower right")
    return figure
