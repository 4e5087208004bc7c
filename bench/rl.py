"""Reinforcement learning on this machine: tasks and seeds, lag, and workers that are killed.

`python bench/rl.py --help`. Each run is `planetary rl` with a configuration of examples/; a row has its outcome. Rows
are appended as JSON lines to `--out`, so that a bench that is stopped goes on where it was; `--table` prints those that
are there, and `--picture FILE` draws their held-out rewards.

Other programs on the machine make a run's minutes longer. Its CPU seconds (of all its processes, the compilation
included) stay nearly the same: on two idle cores a run takes between half of them and all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from planetary.monitor.picture import FAINT, INK, style
from planetary.monitor.run_folder import load_history
from planetary.runs.rl.status import PolicyMetrics

EXAMPLES = Path(__file__).parents[1] / "examples"
LAST = 10  # rounds at the end of a run, of which the mean reward is compared
SEED_COLOURS = ("#0B5394", "#D55E00", "#009E73")  # apart for colour-blind readers (after Okabe and Ito)
AIM = 0.8  # held-out reward of sampled answers, in the mean of the last rounds


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that were started here and have ended, and of those started by them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(name: str, settings: list[str], folder: Path, *, kill_every: float = 0.0) -> dict[str, Any]:
    """Run to the end, killing a worker every so many seconds; return the outcome."""
    command = [sys.executable, "-m", "planetary.cli.main", "rl", str(EXAMPLES / name), f"--run-dir={folder}"]
    command += [f"--set={setting}" for setting in settings]
    began, used, kills, killed_at = time.monotonic(), cpu_seconds(), 0, time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.5)
        if kill_every and time.monotonic() - killed_at > kill_every and (pid := worker_of(folder)):
            killed_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the journal does not say so yet
                os.kill(pid, signal.SIGKILL)
                kills += 1
    seconds = time.monotonic() - began
    history = load_history(folder)
    lines = [(m.round, m.own) for m in history.metrics if isinstance(m.own, PolicyMetrics)]
    held_out = [(round_, own.held_out_sampled) for round_, own in lines if own.held_out_sampled is not None]
    greedy = [(round_, own.held_out_reward) for round_, own in lines if own.held_out_reward is not None]
    imitated = max((round_ for round_, own in lines if own.imitates), default=0)
    rounds = lines[-1][0]
    last = [reward for round_, reward in held_out if round_ > rounds - LAST]
    sampled = [own.reward for _, own in lines if own.reward is not None]
    return {
        "config": name,
        "settings": settings,
        "exit": process.returncode,
        "minutes": round(seconds / 60, 2),
        "cpu_s": round(cpu_seconds() - used, 1),
        "imitated": imitated,
        "rounds": rounds,
        "start": [round(next((value for at, value in part if at >= imitated), -1.0), 4) for part in (held_out, greedy)],
        "held_out": round(sum(last) / len(last), 4),
        "greedy": round(greedy[-1][1], 4),
        "sampled": [round(sum(part) / len(part), 4) for part in (sampled[:LAST], sampled[-LAST:])],
        "curve": [(round_, round(reward, 4)) for round_, reward in held_out],
        "staleness": last.staleness if isinstance(last := history.metrics[-1].own, PolicyMetrics) else {},
        "kills": kills,
        "lost": sum(event.get("event") == "worker_lost" for event in history.events),
    }


def worker_of(folder: Path) -> int:
    """Return the process of a worker that has joined, as the journal says; 0: there is none now."""
    pid = 0
    if (folder / "events.jsonl").exists():
        for event in load_history(folder).events:
            if event.get("event") == "worker_joined":
                pid = int(event["pid"])
            elif event.get("event") == "worker_lost" and event.get("pid") == pid:
                pid = 0
    return pid


def plan(arguments: argparse.Namespace) -> list[tuple[str, list[str], float]]:
    """Return the runs: configuration, settings, seconds between two kills."""
    runs: list[tuple[str, list[str], float]] = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            runs.append((f"{task}.toml", [f"run.seed={seed}"], 0.0))
    for lag in arguments.lags:
        # No goal: all take as many rounds, so that ends can be compared.
        fixed = [f"rl.ahead={lag}", f"rl.lag={lag}", f"train.rounds={arguments.lag_rounds}"]
        runs.append((f"{arguments.lag_task}.toml", [*fixed, *arguments.lag_settings], 0.0))
    if arguments.kill_every:
        fixed = ["rl.ahead=0", "rl.lag=0", f"train.rounds={arguments.lag_rounds}"]
        runs.append((f"{arguments.lag_task}.toml", [*fixed, *arguments.lag_settings], arguments.kill_every))
    return runs


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    heads = [
        "run",
        "rounds of imitation, of all",
        "end of imitation: sampled, greedy",
        "last ten rounds: sampled, greedy",
        "training prompts: first, last ten rounds",
        "CPU s",
        "minutes",
        "kills",
    ]
    cells = [heads, ["---"] * len(heads)]
    for row in rows:
        cells.append(
            [
                f"{row['config'].removesuffix('.toml')}, {', '.join(row['settings'])}",
                f"{row['imitated']}, {row['rounds']}",
                f"{row['start'][0]:.3f}, {row['start'][1]:.3f}",
                f"{row['held_out']:.3f}, {row['greedy']:.3f}",
                f"{row['sampled'][0]:.2f}, {row['sampled'][1]:.2f}",
                f"{row['cpu_s']:.0f}",
                f"{row['minutes']:.1f}",
                str(row["kills"]),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the held-out reward of each evaluation by round: a panel a configuration, a line a run."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["config"] for row in rows))
    figure = Figure(figsize=(4.2 * len(names), 3.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        style(axes)
        axes.axhline(AIM, color=INK, lw=0.8, ls=(0, (4, 3)))
        for i, row in enumerate(row for row in rows if row["config"] == name):
            colour = SEED_COLOURS[i % len(SEED_COLOURS)]
            label = ", ".join(row["settings"])
            axes.plot(*zip(*row["curve"], strict=True), color=colour, lw=1.6, label=label)
            axes.plot(row["imitated"], row["start"][0], color=colour, marker="o", markersize=7, mfc="white", mew=1.8)
        axes.set(xlim=(0, None), ylim=(0, 1))
        axes.set_title(name.removesuffix(".toml"), loc="left", color=INK, fontweight="bold")
        axes.set_xlabel("rounds; circle: end of the imitation", color=INK)
        axes.legend(framealpha=1.0, edgecolor=FAINT, fontsize=8, labelcolor=INK, loc="lower right")
    figure.axes[0].set_ylabel("mean reward of held-out prompts, sampled", color=INK)
    figure.savefig(path, dpi=110, facecolor="white")


def main() -> None:
    """Run the plan and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", default=["sort", "reverse", "add"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument("--lag-task", default="sort")
    parser.add_argument("--lag-rounds", type=int, default=200)
    parser.add_argument("--lag-settings", nargs="*", default=[], metavar="KEY=VALUE", help="further ones, as of --set")
    parser.add_argument("--kill-every", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("rl.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    if arguments.table:
        print(table(done))
    if arguments.picture is not None:
        draw(done, arguments.picture)
    if arguments.table or arguments.picture is not None:
        return
    keys = [(row["config"], row["settings"], row["kill_every"]) for row in done]
    for name, settings, kill_every in plan(arguments):
        if (name, settings, kill_every) in keys:
            continue
        with tempfile.TemporaryDirectory(prefix="planetary-rl-") as scratch:
            row = {**train(name, settings, Path(scratch) / "run", kill_every=kill_every), "kill_every": kill_every}
        print(json.dumps(row), flush=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
