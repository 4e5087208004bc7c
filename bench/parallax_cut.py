"""Whether a network that fails holds a composer up: the gateway stands still again and again, and steps are timed.

    python bench/parallax_cut.py                                    # direct ownership
    python bench/parallax_cut.py --offload                          # with an expert worker
    python bench/parallax_cut.py --cycles 5 --seconds 30 --set train.batch_size=8

A gateway that is stopped (SIGSTOP) answers nothing and takes nothing, like a network that is cut: every background
channel of the composers is gone, they notice that it is silent, lose their connection and try again in vain. Then it
goes on (SIGCONT). Two composers run; the one that is timed has a processor core to itself, as if it were another
machine, and everything else runs on the other cores. A step's time is wall time over steps between two moments that
the journal knows, so everything that happens between two steps is in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
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
Event = dict[str, Any]


class Journal:
    """The events of a run, as they are written."""

    def __init__(self, folder: Path, process: subprocess.Popen) -> None:
        self._tail = JsonLinesTail(folder / "events.jsonl", Event)
        self._process = process
        self.events: list[Event] = []

    def until(self, reached: Callable[[], bool], limit_s: float = 280) -> None:
        deadline = time.monotonic() + limit_s
        while not reached():
            self.events += self._tail.poll()
            if time.monotonic() > deadline or (self._process.poll() is not None and not reached()):
                raise SystemExit(f"the run ended or took too long; last event: {self.events[-1:]}")
            time.sleep(0.05)

    def of(self, name: str, **fields: object) -> list[Event]:
        return [e for e in self.events if e["event"] == name and all(e[k] == v for k, v in fields.items())]


def apart(journal: Journal, family: list[psutil.Process], core: int) -> int:
    """Give the composer of one shard a core to itself; return the shard."""
    owner = journal.of("shard_granted")[0]
    pid = journal.of("worker_joined", worker=owner["worker"])[-1]["pid"]
    others = [number for number in range(os.cpu_count() or 1) if number != core]
    for process in family:
        mine = process.pid == pid
        for thread in process.threads():  # threads that are there already keep their affinity otherwise
            os.sched_setaffinity(thread.id, [core] if mine else others)
        if not mine and "worker" in process.cmdline():
            process.nice(19)  # the gateway must not wait for them
    return owner["shard"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offload", action="store_true", help="parallax-offload.toml and one expert worker")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the gateway stands still each time")
    parser.add_argument("--between", type=float, default=15.0, help="seconds that are timed with the gateway there")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args()
    settings = ["moe.composers=2", "fabric.threads=1", "eval.every=100000", "checkpoint.every=100000"]
    settings += ["moe.expert_workers=1", "fabric.workers=3"] if args.offload else ["fabric.workers=2"]
    example = "parallax-offload.toml" if args.offload else "parallax-tiny.toml"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "planetary.cli.main", "train", str(ROOT / "examples" / example)]
        command += [f"--run-dir={folder}", "--rounds=10000"] + ([f"--cache={args.cache}"] if args.cache else [])
        command += [f"--set={setting}" for setting in [*settings, *args.set]]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            journal = Journal(folder, process)
            journal.until(lambda: len(journal.of("round_finished")) >= 2)
            family = psutil.Process(process.pid).children(recursive=True)
            gateway = next(p for p in family if "gateway" in p.cmdline())
            shard = apart(journal, family, core=(os.cpu_count() or 1) - 1)
            print(json.dumps(measured(journal, gateway, shard, args), indent=1))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def measured(journal: Journal, gateway: psutil.Process, shard: int, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between a gateway that answers and one that stands still; return step times and what came of it."""
    there: list[tuple[float, int]] = []  # ms per step, steps
    gone: list[tuple[float, int]] = []
    grants = len(journal.of("shard_granted"))

    def kept_after(t: float) -> Event:
        journal.until(lambda: any(e["t"] > t for e in journal.of("shard_kept", shard=shard)))
        return next(e for e in journal.of("shard_kept", shard=shard) if e["t"] > t)

    def between(first: Event, last: Event) -> tuple[float, int]:
        steps = last["step"] - first["step"]
        return 1e3 * (last["t"] - first["t"]) / steps, steps

    loss_before = journal.of("round_finished")[-1]["loss"]
    for _ in range(args.cycles):
        first = kept_after(time.time() + 2)  # what was postponed is through
        last = kept_after(first["t"] + args.between)
        there.append(between(first, last))
        os.kill(gateway.pid, signal.SIGSTOP)
        time.sleep(args.seconds)
        os.kill(gateway.pid, signal.SIGCONT)
        back = time.time()
        journal.until(lambda: any(e["t"] > back for e in journal.of("shard_granted", shard=shard)))  # noqa: B023
        gone.append(between(last, journal.of("shard_granted", shard=shard)[-1]))
    kept_after(time.time() + args.between)
    steps = [e["step"] for e in journal.of("shard_kept", shard=shard)]
    ratios = [g / t for (t, _), (g, _) in zip(there, gone, strict=True)]
    return {
        "ms per step, gateway there": [round(ms, 2) for ms, _ in there],
        "ms per step, gateway gone": [round(ms, 2) for ms, _ in gone],
        "steps timed": [sum(n for _, n in there), sum(n for _, n in gone)],
        "ratio, each": [round(ratio, 4) for ratio in ratios],
        "ratio, median": round(statistics.median(ratios), 4),
        "granted again": len(journal.of("shard_granted")) - grants,
        "steps lost": sum(after < before for before, after in itertools.pairwise(steps)),
        "loss before and after": [loss_before, journal.of("round_finished")[-1]["loss"]],
    }


if __name__ == "__main__":
    main()
