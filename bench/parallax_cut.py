"""Whether a network that fails holds composers up: the gateway stands still for a while, and steps are timed.

    python bench/parallax_cut.py                      # 30 s, examples/parallax-tiny.toml
    python bench/parallax_cut.py --seconds 10 --set moe.composers=2 --set fabric.workers=2

A gateway that is stopped (SIGSTOP) answers nothing and takes nothing, like a network that is cut: composers notice that
it is silent, lose their connection and try again in vain. The step times are the composers' own. Then the gateway goes
on (SIGCONT), and so must training: everybody's epoch is higher, and the loss falls on.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from planetary.artifacts.jsonl import JsonLinesTail

ROOT = Path(__file__).parents[1]


class Journal:
    """The events of a run, as they are written."""

    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / "events.jsonl", dict[str, Any])
        self.events: list[dict[str, Any]] = []

    def until(self, reached: Callable[[], bool], process: subprocess.Popen, limit_s: float = 280) -> None:
        deadline = time.monotonic() + limit_s
        while not reached():
            self.events += self._tail.poll()
            if time.monotonic() > deadline or (process.poll() is not None and not reached()):
                raise SystemExit(f"the run ended or took too long; last event: {self.events[-1:]}")
            time.sleep(0.1)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def step_times(kept: list[dict[str, Any]], begin: float, end: float, per_round: int) -> tuple[float, float, int]:
    """Return compute and wall seconds per step between two saved states of each shard, and how many steps that were.

    Args:
        kept: `shard_kept` events.
        begin: use each shard's last state before this time (Unix seconds).
        end: and its first one after this.
        per_round: steps.
    """
    compute = wall = 0.0
    steps = 0
    for shard in {event["shard"] for event in kept}:
        mine = [event for event in kept if event["shard"] == shard]
        first = [event for event in mine if event["t"] <= begin][-1]
        last = next(event for event in mine if event["t"] >= end)
        saved_round, base = 0, 0.0
        for event in mine:
            if first["t"] < event["t"] <= last["t"]:
                compute += event["compute_s"] - base
            # After the first state at or after the end of a round the sum begins anew.
            ends_round = event["step"] // per_round > saved_round
            saved_round, base = event["step"] // per_round, 0.0 if ends_round else event["compute_s"]
        wall += last["t"] - first["t"]
        steps += last["step"] - first["step"]
    return compute / steps, wall / steps, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the gateway stands still")
    parser.add_argument("--around", type=float, default=20.0, help="seconds that are timed before and after")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "planetary.cli.main", "train", str(ROOT / "examples" / "parallax-tiny.toml")]
        command += [f"--run-dir={folder}", "--rounds=10000", "--set=eval.every=50", "--set=checkpoint.every=1000"]
        command += [f"--set={setting}" for setting in args.set] + ([f"--cache={args.cache}"] if args.cache else [])
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        journal = Journal(folder)
        try:
            journal.until(lambda: len(journal.of("round_finished")) >= 5, process)
            began = time.time()
            journal.until(lambda: time.time() > began + args.around, process)
            family = psutil.Process(process.pid).children(recursive=True)
            gateway = next(p for p in family if "gateway" in p.cmdline())
            cut = time.time()
            os.kill(gateway.pid, signal.SIGSTOP)
            time.sleep(args.seconds)
            os.kill(gateway.pid, signal.SIGCONT)
            back = time.time()
            shards = {event["shard"] for event in journal.of("shard_kept")}
            journal.until(
                lambda: {e["shard"] for e in journal.of("shard_kept") if e["t"] > back + 1} == shards, process
            )
            returned = time.time()
            journal.until(lambda: time.time() > returned + args.around, process)
            grants = [e for e in journal.of("shard_granted") if e["t"] > back]
            losses = [(e["t"], e["loss"]) for e in journal.of("round_finished")]
            kept = journal.of("shard_kept")
            times = {
                "before": step_times(kept, began, cut - 3, 10),
                "cut": step_times(kept, cut, back + 1, 10),
                "after": step_times(kept, returned, returned + args.around - 4, 10),
            }
            print(
                json.dumps(
                    {
                        "seconds": args.seconds,
                        **{
                            key: {"compute_ms": 1e3 * c, "wall_ms": 1e3 * w, "steps": n}
                            for key, (c, w, n) in times.items()
                        },
                        "compute_ratio": times["cut"][0] / times["before"][0],
                        "wall_ratio": times["cut"][1] / times["before"][1],
                        "granted_again": len(grants),
                        "steps_lost": sum(
                            max(e["step"] for e in kept if e["shard"] == g["shard"] and e["t"] < g["t"]) > g["step"]
                            for g in grants
                        ),
                        "loss_before": [x for t, x in losses if t < cut][-1],
                        "loss_after": losses[-1][1],
                    },
                    indent=1,
                )
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


if __name__ == "__main__":
    main()
