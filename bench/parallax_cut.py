"""Whether a network that fails holds a composer up: the gateway stands still again and again, and steps are timed.

    python bench/parallax_cut.py                                    # direct ownership
    python bench/parallax_cut.py --offload                          # with an expert worker
    python bench/parallax_cut.py --cycles 5 --seconds 30 --set train.batch_size=8

A gateway that is stopped (SIGSTOP) answers nothing and takes nothing, like a network that is cut: every background
channel of the composers is gone, they notice that it is silent, lose their connection and try again in vain. Then it
goes on (SIGCONT). Two composers run; the one that is timed has a processor core to itself, as if it were another
machine, and everything else runs on the other cores. A step's time is wall time over steps between two moments that
the journal knows, so everything that happens between two steps is in it: also a composer's own work of packing what it
publishes and taking what it gets. The time inside steps is what the composer itself has counted.
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
from typing import Any, NamedTuple

import psutil

from planetary.artifacts.jsonl import JsonLinesTail

ROOT = Path(__file__).parents[1]
PER_ROUND = 10  # steps, in the examples
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


class Timed(NamedTuple):
    """A stretch of one composer's steps: wall time from a step to the next, time inside steps, and how many."""

    wall_ms: float
    inside_ms: float
    steps: int


def timed(journal: Journal, shard: int, first: Event, last: Event, told: Event) -> Timed:
    """Time the steps between two events; the saved state `told`, at or after the last, says what was spent inside."""
    inside = 0.0
    kept = journal.of("shard_kept", shard=shard)
    mine = [e for e in kept if first["t"] <= e["t"] <= told["t"]]
    for before, after in itertools.pairwise(mine):
        # After the state that ends a round of the run a composer's sum begins anew.
        ended = before["progress"] // PER_ROUND > max(
            (e["progress"] // PER_ROUND for e in kept if e["t"] < before["t"]), default=0
        )
        inside += after["compute_s"] - (0.0 if ended else before["compute_s"])
    steps = last["step"] - first["step"]
    wall = (last["t"] - first["t"]) / steps
    return Timed(1e3 * wall, 1e3 * inside / (mine[-1]["step"] - mine[0]["step"]), steps)


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
    there: list[Timed] = []
    gone: list[Timed] = []
    grants = len(journal.of("shard_granted"))

    def kept_after(t: float) -> Event:
        journal.until(lambda: any(e["t"] > t for e in journal.of("shard_kept", shard=shard)))
        return next(e for e in journal.of("shard_kept", shard=shard) if e["t"] > t)

    loss_before = journal.of("round_finished")[-1]["loss"]
    for _ in range(args.cycles):
        first = kept_after(time.time() + 2)  # what was postponed is through
        last = kept_after(first["t"] + args.between)
        there.append(timed(journal, shard, first, last, last))
        os.kill(gateway.pid, signal.SIGSTOP)
        time.sleep(args.seconds)
        os.kill(gateway.pid, signal.SIGCONT)
        back = time.time()
        journal.until(lambda: any(e["t"] > back for e in journal.of("shard_granted", shard=shard)))  # noqa: B023
        granted = journal.of("shard_granted", shard=shard)[-1]
        gone.append(timed(journal, shard, last, granted, kept_after(granted["t"])))
    kept_after(time.time() + args.between)
    steps = [e["step"] for e in journal.of("shard_kept", shard=shard)]
    found: dict[str, Any] = {}
    for what, times in {
        "between two steps": [[one.wall_ms for one in phase] for phase in (there, gone)],
        "inside a step": [[one.inside_ms for one in phase] for phase in (there, gone)],
    }.items():
        ratios = [g / t for t, g in zip(*times, strict=True)]
        found[f"ms {what}, gateway there"] = [round(ms, 2) for ms in times[0]]
        found[f"ms {what}, gateway gone"] = [round(ms, 2) for ms in times[1]]
        found[f"{what}, gone by there"] = [round(ratio, 4) for ratio in ratios]
        found[f"{what}, median"] = round(statistics.median(ratios), 4)
    return found | {
        "steps timed": [sum(one.steps for one in there), sum(one.steps for one in gone)],
        "granted again": len(journal.of("shard_granted")) - grants,
        "steps lost": sum(after < before for before, after in itertools.pairwise(steps)),
        "loss before and after": [loss_before, journal.of("round_finished")[-1]["loss"]],
    }


if __name__ == "__main__":
    main()
