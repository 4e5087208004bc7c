"""Write docs/images/dashboard.png and dashboard-zoomed.png: `python docs/make_screenshots.py`. Needs Chromium.

The run is a simulated one with four workers: one is stopped for three quarters of the time, one dies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runs" / "rounds"))

import msgspec
from small_training import small_training

from planetary.core.configuration.toml import to_toml
from planetary.monitor.dashboard import Dashboard
from planetary.runs.rounds.training_status import TrainingStatus
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster

IMAGES = Path(__file__).with_name("images")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TAKEN_IN_ROUND = 31
SIZE = "1240,1330"


def status_in_the_midst() -> TrainingStatus:
    """Return the status of a simulated run while it waits for its slow worker, as if that was now."""
    cluster = SimCluster(0, small_training(rounds=48, workers=4, inner_steps=20), 4, [Fault(60.0, "kill_worker", 2)])
    slow, usual_s = cluster.nodes[1], cluster.nodes[1].health.step_s
    taken: list[TrainingStatus] = []

    def follow() -> None:
        gateway = cluster.gateway
        if gateway is None or taken:
            return
        slow.health.step_s = usual_s * (4.0 if len(gateway.metrics) > 20 else 1.0)
        if len(gateway.metrics) >= TAKEN_IN_ROUND and (status := gateway.status()).waiting_for:
            wall = cluster.world.clock.wall()
            if wall - status.waiting_since > 3.0:
                taken.append(_moved(status, time.time() - wall))

    cluster.run(10_000.0, follow)
    (IMAGES / "config.toml").write_text(to_toml(cluster.config))
    return msgspec.structs.replace(taken[0], run="simulated", disk_free=412_000_000_000)


def _moved(status: TrainingStatus, by_s: float) -> TrainingStatus:
    """Move all times of a status."""

    def moved(t: float | None) -> float | None:
        return None if t is None else t + by_s

    workers = tuple(
        msgspec.structs.replace(worker, last_contribution_at=moved(worker.last_contribution_at))
        for worker in status.workers
    )
    return msgspec.structs.replace(
        status,
        workers=workers,
        started_at=status.started_at + by_s,
        stage_since=status.stage_since + by_s,
        waiting_since=status.waiting_since + by_s,
        checkpoint_at=moved(status.checkpoint_at),
        events=tuple((t + by_s, text) for t, text in status.events),
    )


def main() -> None:
    """Take both pictures."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(f"no browser found, none of {', '.join(BROWSERS)}")
    status, config = status_in_the_midst(), IMAGES / "config.toml"
    with Dashboard(lambda: status, config_file=config) as board, tempfile.TemporaryDirectory() as scratch:
        for name, view in (("dashboard", ""), ("dashboard-zoomed", "#log&from=10&to=30")):
            flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
            flags += [f"--user-data-dir={scratch}", "--virtual-time-budget=1500", "--force-color-profile=srgb"]
            target = IMAGES / f"{name}.png"
            subprocess.run([program, *flags, f"--screenshot={target}", board.url + view], check=True, timeout=120)
            print(target)  # noqa: T201
    config.unlink()


if __name__ == "__main__":
    main()
