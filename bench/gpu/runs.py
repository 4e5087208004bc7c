"""Training runs through the command line, as a user starts them, for parts b, e and f."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Process, tail

CLI = ("-m", "planetary.cli.main")


def train(config: Path, name: str, folder: Path, changes: Mapping[str, object], flags: Sequence[str] = ()) -> Process:
    """Start `planetary train`; its run folder is `folder / "runs" / name`."""
    folder.mkdir(parents=True, exist_ok=True)
    given = [f"--set={key}={value}" for key, value in {"run.name": name, **changes}.items()]
    return Process([*CLI, "train", config, *given, *flags, f"--cache={folder / 'cache'}"], cwd=folder)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, as far as it is written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def outcome(run: Path, code: int, output: str) -> dict[str, Any]:
    """Return what a run left: losses by round, workers with their devices, and what was refused or lost."""
    metrics, journal = read_lines(run / "metrics.jsonl"), read_lines(run / "events.jsonl")
    told = ("worker_refused", "worker_lost", "worker_left", "task_failed", "worker_failed", "lease_failed")
    found: dict[str, Any] = {
        "code": code,
        "losses": [one["loss"] for one in metrics],
        "eval_losses": [one["eval_loss"] for one in metrics if one.get("eval_loss") is not None],
        "round_seconds": [round(one["seconds"], 2) for one in metrics],
        "tokens_per_s": metrics[-1].get("tokens_per_s") if metrics else None,
        "workers": sorted(
            {f"{e['worker']} {e['backend']} {e.get('device', '')}" for e in journal if e["event"] == "worker_joined"}
        ),
        "verified": sorted({e.get("verified", "") for e in journal if e["event"] == "worker_joined"}),
        "contributors": sorted({e["worker"] for e in journal if e["event"] == "delta_accepted"}),
        "trouble": [{k: v for k, v in e.items() if k != "t"} for e in journal if e["event"] in told][:8],
    }
    if code != 0:
        found["output"] = tail(output)
        for log in sorted((run / "logs").glob("*.log")) if (run / "logs").exists() else ():
            found[f"log {log.name}"] = tail(log.read_text(errors="replace"), 4)
    return found


def largest_difference(some: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the largest difference of two series; None unless they are equally long."""
    if not some or len(some) != len(others):
        return None
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def wait_for(condition: Any, limit_s: float) -> bool:
    """Poll until a condition holds; return whether it did."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
