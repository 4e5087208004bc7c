"""Time from `kill -9` of a random worker to its lease being trained again, on a real run.

    python bench/recovery.py                      # 20 kills in 4 runs of the default model
    python bench/recovery.py --kills 4 --runs 1   # quick

Each run is `planetary train` with two workers. A worker that is in the middle of a lease is chosen at random and
killed after a random delay; the clock stops when the journal says that the same lease is being trained again (the
worker that took it has parameters and tokens and begins its first inner step). Every run must end with exit code 0.
Writes bench/results/recovery.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from planetary.artifacts.jsonl import JsonLinesTail
from planetary.monitor.report import Loss, losses
from planetary.monitor.run_folder import load_history

ROOT = Path(__file__).parents[1]
WAIT_S = 120.0


class Run:
    """One `planetary train` and its journal."""

    def __init__(self, config: Path, folder: Path, rounds: int) -> None:
        command = [sys.executable, "-m", "planetary.cli.main", "train", str(config), "--json"]
        self.process = subprocess.Popen(
            [*command, f"--run-dir={folder}", f"--rounds={rounds}", "--set=train.inner_steps=100"],
            stdout=subprocess.DEVNULL,
        )
        self._tail = JsonLinesTail(folder / "events.jsonl", dict[str, Any])
        self._events: list[dict[str, Any]] = []
        self._read = 0

    def wait_for(self, wanted: Any) -> dict[str, Any]:
        """Return the first unread event that `wanted` accepts."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self._events += self._tail.poll()
            while self._read < len(self._events):
                event = self._events[self._read]
                self._read += 1
                if wanted(event):
                    return event
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended early with exit code {self.process.returncode}")
            time.sleep(0.02)
        raise SystemExit(f"nothing happened for {WAIT_S:.0f} s: the run hangs")

    def skip_to_now(self) -> None:
        """Forget what was written up to now."""
        self._events += self._tail.poll()
        self._read = len(self._events)

    def in_training(self) -> dict[str, dict[str, Any]]:
        """The newest `lease_started` of each worker whose lease is still being trained."""
        self._events += self._tail.poll()
        busy: dict[str, dict[str, Any]] = {}
        for event in self._events:
            if event["event"] == "lease_started":
                busy[event["worker"]] = event
            elif event["event"] in ("delta_accepted", "worker_lost", "lease_returned"):
                busy.pop(event["worker"], None)
        return busy


def kill_and_measure(run: Run, source: random.Random) -> tuple[float, float, float]:
    """Kill one worker; return seconds until it was known, until its lease was assigned, and was trained again."""
    run.wait_for(lambda e: e["event"] == "lease_started")
    time.sleep(source.uniform(0.2, 3.0))
    while not (busy := run.in_training()):
        time.sleep(0.05)
    victim = busy[source.choice(sorted(busy))]
    run.skip_to_now()
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.time()
    lost = run.wait_for(lambda e: e["event"] == "worker_lost" and e["pid"] == victim["pid"])
    assigned = run.wait_for(lambda e: e["event"] == "lease_assigned" and e["lease"] == victim["lease"])
    started = run.wait_for(lambda e: e["event"] == "lease_started" and e["lease"] == victim["lease"])
    return lost["t"] - killed, assigned["t"] - killed, started["t"] - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "stdlib.toml")
    args = parser.parse_args()
    source = random.Random(args.seed)
    known: list[float] = []
    assigned: list[float] = []
    again: list[float] = []
    lost: list[Loss] = []
    trained = 0
    for number in range(args.runs):
        kills = args.kills // args.runs + (number < args.kills % args.runs)
        with tempfile.TemporaryDirectory(prefix="planetary-bench-") as scratch:
            run = Run(args.config, Path(scratch) / "run", rounds=2 * kills + 1)  # a kill may pass into the next round
            try:
                for _ in range(kills):
                    to_known, to_assigned, to_trained = kill_and_measure(run, source)
                    known.append(to_known)
                    assigned.append(to_assigned)
                    again.append(to_trained)
                    print(f"kill {len(again):2}: assigned after {to_assigned:.2f} s, trained after {to_trained:.2f} s")
                if run.process.wait(timeout=WAIT_S * 3) != 0:
                    raise SystemExit(f"run {number + 1} ended with exit code {run.process.returncode}")
            finally:
                if run.process.poll() is None:
                    run.process.send_signal(signal.SIGINT)
                    run.process.wait(timeout=30)
            history = load_history(Path(scratch) / "run")
            lost.append(losses(history.events, history.metrics[-1].inner_steps))
            trained += history.metrics[-1].tokens_total
        print(f"run {number + 1} of {args.runs} finished with exit code 0 after {kills} kills")
    report(args, known, assigned, again, (sum(one.rounds for one in lost), sum(one.tokens for one in lost), trained))


def report(
    args: argparse.Namespace,
    known: list[float],
    assigned: list[float],
    again: list[float],
    lost: tuple[int, int, int],
) -> None:
    """Print the result and write it down with its command, date and machine."""

    def row(name: str, values: list[float]) -> str:
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
        return f"| {name} | {statistics.median(values):.2f} | {p95:.2f} | {ordered[-1]:.2f} |"

    lines = [
        "# Recovery after `kill -9` of a worker",
        "",
        f"`python bench/recovery.py --kills {args.kills} --runs {args.runs} --seed {args.seed}`, "
        f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.platform()}.",
        "",
        f"{len(again)} kills in {args.runs} runs; every run ended with exit code 0. Seconds from the signal:",
        "",
        "| until | median | p95 | worst |",
        "|---|---|---|---|",
        row("the gateway knows", known),
        row("the lease is assigned again", assigned),
        row("the lease is trained again", again),
        "",
        f"Rounds lost: {lost[0]}. Tokens trained that do not count: {lost[1]:,} of {lost[2]:,} "
        f"({100 * lost[1] / lost[2]:.1f} %, {lost[1] // len(again):,} a kill).",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    target = ROOT / "bench" / "results" / "recovery.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


if __name__ == "__main__":
    main()
