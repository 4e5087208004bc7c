"""Reinforcement learning on this machine: tasks and seeds, lag, and workers that are killed.

`python bench/rl.py --help`. Each run is `planetary rl` with a configuration of examples/; a row has what came of it.
Rows are appended as JSON lines to `--out`, so that a bench that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from planetary.monitor.run_folder import load_history

EXAMPLES = Path(__file__).parents[1] / "examples"


def train(name: str, settings: list[str], folder: Path, *, kill_every: float = 0.0) -> dict[str, Any]:
    """Run to the end, killing a worker every so many seconds; return what came of it."""
    command = [sys.executable, "-m", "planetary.cli.main", "rl", str(EXAMPLES / name), f"--run-dir={folder}"]
    command += [f"--set={setting}" for setting in settings]
    began, kills, killed_at = time.monotonic(), 0, time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.5)
        if kill_every and time.monotonic() - killed_at > kill_every and (pid := worker_of(folder)):
            os.kill(pid, signal.SIGKILL)
            kills, killed_at = kills + 1, time.monotonic()
    seconds = time.monotonic() - began
    history = load_history(folder)
    held_out = [(m.round, m.policy.held_out_reward) for m in history.metrics if m.policy is not None]
    known = [(round_, reward) for round_, reward in held_out if reward is not None]
    imitated = max((m.round for m in history.metrics if m.policy is not None and m.policy.imitates), default=0)
    start = next((reward for round_, reward in known if round_ >= imitated), float("nan"))
    return {
        "config": name,
        "settings": settings,
        "exit": process.returncode,
        "minutes": round(seconds / 60, 2),
        "rounds": history.metrics[-1].round,
        "start": round(start, 4),
        "end": round(known[-1][1], 4),
        "staleness": history.metrics[-1].policy.staleness if history.metrics[-1].policy is not None else {},
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
        for seed in range(arguments.seeds):
            runs.append((f"{task}.toml", [f"run.seed={seed}"], 0.0))
    for lag in arguments.lags:
        # No goal: all take as many rounds, so that ends can be compared.
        fixed = [f"rl.ahead={lag}", f"rl.lag={lag}", "rl.goal=0.0", f"train.rounds={arguments.lag_rounds}"]
        runs.append((f"{arguments.tasks[0]}.toml", fixed, 0.0))
    if arguments.kill_every:
        runs.append((f"{arguments.tasks[0]}.toml", ["run.seed=0"], arguments.kill_every))
    return runs


def main() -> None:
    """Run what is asked for and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=["reverse", "add", "sort"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument("--lag-rounds", type=int, default=320)
    parser.add_argument("--kill-every", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("rl.jsonl"))
    arguments = parser.parse_args()
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
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
