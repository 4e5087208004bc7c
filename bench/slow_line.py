"""A worker at the end of a slow line: what it adds, whether it is lost, and how much memory waits in it to be sent.

    python bench/slow_line.py                                        # a mixture; 20 Mbit/s up, 100 down
    python bench/slow_line.py --up 2 --set moe.refresh_every=10
    python bench/slow_line.py --example stdlib.toml --rounds 3 --up 4

The gateway and one worker stand beside each other; the other worker reaches the gateway through a relay that limits and
delays what passes (`planetary.testing.shaped_relay`). Both compute on this machine and have the same speed.
A composer saves its whole state every `moe.refresh_every` steps, which is more than a slow line carries; a worker of a
run in rounds sends all parameters at a round's end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from planetary.artifacts.jsonl import JsonLinesTail
from planetary.core.config import load_config
from planetary.run.processes.announcement import Announcement, read_announcement
from planetary.runs.mixture.config import MoeConfig
from planetary.testing.shaped_relay import RelayRoute, ShapedRelay, TokenBucket, Way

ROOT = Path(__file__).parents[1]
MBIT = 1e6 / 8
PLACES = ("near", "slow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=float, default=20.0, help="Mbit/s from the slow composer (default: %(default)s)")
    parser.add_argument("--down", type=float, default=100.0, help="Mbit/s to it (default: %(default)s)")
    parser.add_argument("--delay", type=float, default=20.0, help="ms each way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="of 10 steps (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds, then it is ended (default: %(default)s)")
    parser.add_argument("--example", default="parallax-tiny.toml", help="file below examples/ (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planetary-slow-") as folder, ShapedRelay() as relay:
        print(json.dumps(measure(Path(folder), relay, args), indent=1))


def measure(folder: Path, relay: ShapedRelay, args: argparse.Namespace) -> dict[str, Any]:
    run, log = folder / "run", (folder / "log").open("ab")
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "planetary.cli.main", command, f"--state={folder / name}", *flags]
        processes.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return processes[-1]

    is_mixture = load_config(ROOT / "examples" / args.example).of(MoeConfig).composers > 0
    sets = [*(["moe.composers=2"] if is_mixture else []), "fabric.workers=2", f"train.rounds={args.rounds}", *args.set]
    gateway = start(
        "gateway",
        "gateway",
        f"--gateway-config={ROOT / 'examples' / args.example}",
        f"--run-dir={run}",
        "--gateway-port=0",
        "--port=0",
        f"--announce={folder / 'announcement'}",
        *(f"--set={one}" for one in sets),
    )
    try:
        announced = until_announced(folder / "announcement", gateway, folder / "log")
        (folder / "token").write_text(announced.token)
        shaped = relay.listen(
            {"": RelayRoute((announced.host, announced.port), way(args.up, args), way(args.down, args))}
        )
        for name, port in zip(PLACES, (announced.port, shaped), strict=True):
            start(
                "node-manager",
                name,
                f"--host={announced.host}",
                f"--port={port}",
                "--scale=1",
                f"--token-file={folder / 'token'}",
                f"--logs={folder / 'logs' / name}",
                f"--node-name={name}",
            )
        return watch(run, gateway, args)
    finally:
        for process in processes:
            if process.poll() is None:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                for one in family:
                    one.kill()
                psutil.wait_procs(family, timeout=10)
            process.wait()
        log.close()


def way(mbit: float, args: argparse.Namespace) -> Way:
    """All connections share the line, as those of a home do."""
    return Way(delay_s=args.delay / 1e3, shared=(TokenBucket(mbit * MBIT),))


def until_announced(path: Path, gateway: subprocess.Popen[bytes], log: Path) -> Announcement:
    deadline = time.monotonic() + 120
    while (found := read_announcement(path)) is None:
        if gateway.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the gateway did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return found


def watch(run: Path, gateway: subprocess.Popen[bytes], args: argparse.Namespace) -> dict[str, Any]:
    """Follow the run to its end and say what became of both workers."""
    tail = JsonLinesTail(run / "events.jsonl", dict)
    events: list[dict[str, Any]] = []
    most: dict[str, int] = {}
    deadline = time.monotonic() + args.limit
    began = None
    while gateway.poll() is None and time.monotonic() < deadline:
        events += tail.poll()
        if began is None and any(e["event"] in {"shard_granted", "round_started"} for e in events):
            began = time.monotonic()
        for worker, pid in {e["worker"]: e["pid"] for e in events if e["event"] == "worker_joined"}.items():
            try:
                most[worker] = max(most.get(worker, 0), psutil.Process(pid).memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.2)
    events += tail.poll()
    took = time.monotonic() - (began or time.monotonic())
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    losses = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    return {
        "ended": gateway.poll() == 0,
        "seconds": round(took, 1),
        "rounds": len(lines),
        "held-out loss": losses[-1] if losses else None,
        "workers": {w: {**said_of(w, events), "memory at most, MB": round(most[w] / 1e6)} for w in sorted(most)},
        "lost": [f"{e['worker']}: {e['reason']}" for e in events if e["event"] == "worker_lost"][:8],
    }


def said_of(worker: str, events: list[dict[str, Any]]) -> dict[str, int]:
    """What the journal says of a worker: of a composer, or of one in a run in rounds."""
    if any(e["event"] == "mixture_started" for e in events):
        owner = {e["shard"]: e["worker"] for e in events if e["event"] == "shard_granted"}
        mine = {shard for shard, by in owner.items() if by == worker}
        kept = [e for e in events if e["event"] == "shard_kept" and e["shard"] in mine]
        merged = [e for e in events if e["event"] == "fragment_merged" and mine & set(e["shards"])]
        return {
            "steps": max((e["step"] for e in kept), default=0),
            "states saved": len(kept),
            "publications merged": len(merged),
        }
    mine = [e for e in events if e.get("worker") == worker]
    return {
        "tasks given": sum(e["event"] == "lease_assigned" for e in mine),
        "results used": sum(e["event"] == "delta_accepted" for e in mine),
    }


if __name__ == "__main__":
    main()
