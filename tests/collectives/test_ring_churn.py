"""Real processes that are killed and started all the time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from planetary.collectives import Master
from waiting import HANG_S, wait_until

PROGRAM = Path(__file__).with_name("churn_peer.py")
MOST_PEERS = 6
SECONDS = float(os.environ.get("PLANETARY_CHURN_S", "30"))
"""`make soak` sets it to 600."""


@pytest.mark.processes
@pytest.mark.timeout(SECONDS * 2 + 2 * HANG_S)
def test_churn(tmp_path: Path) -> None:
    rng = random.Random(11)
    stop = tmp_path / "stop"
    peers: dict[str, subprocess.Popen[bytes]] = {}
    kills = joins = 0

    def start() -> None:
        nonlocal joins
        joins += 1
        name = f"peer-{joins}"
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [sys.executable, str(PROGRAM), master.address, name, str(tmp_path / f"{name}.jsonl"), str(stop)]
            peers[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def last_steps() -> dict[str, int]:
        return {name: len(_lines(tmp_path / f"{name}.jsonl")) for name in peers}

    with Master("127.0.0.1:0") as master:
        try:
            for _ in range(3):
                start()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                before = last_steps()
                pause = time.monotonic() + rng.uniform(0.5, 1.0)
                while time.monotonic() < pause:
                    time.sleep(0.02)  # the rhythm of the kills, not a wait for anything
                for name, peer in peers.items():
                    assert peer.poll() is None, f"{name} ended: {(tmp_path / f'{name}.log').read_text()}"
                working = [name for name, steps in last_steps().items() if steps > before[name]]
                if len(peers) >= MOST_PEERS or (len(working) > 1 and rng.random() < 0.6):
                    # On a busy machine one peer may train while the others still start: the group would lose its state.
                    trained = {name for name, steps in last_steps().items() if steps}
                    victim = rng.choice(sorted(set(peers) - trained if len(trained) == 1 else peers))
                    peers[victim].send_signal(signal.SIGKILL)
                    peers.pop(victim).wait()
                    kills += 1
                if len(peers) < MOST_PEERS:
                    start()
            # Without further kills all peers make progress, the last newcomers too.
            before = last_steps()
            wait_until(
                lambda: all(steps > before[name] for name, steps in last_steps().items()), "progress of every peer"
            )
            stop.touch()
            for name, peer in peers.items():
                assert peer.wait(HANG_S) == 0, f"{name}: {(tmp_path / f'{name}.log').read_text()}"
        finally:
            for peer in peers.values():
                peer.kill()
                peer.wait()
    seen: dict[int, set[str]] = defaultdict(set)
    steps = aborts = 0
    worlds: set[int] = set()
    for path in tmp_path.glob("peer-*.jsonl"):
        for line in _lines(path):
            seen[line["revision"]].add(line["digest"])
            steps, aborts = steps + 1, aborts + line["aborts"]
            worlds.add(line["world"])
    sys.stderr.write(
        f"{steps} steps, {steps * 8} operations, {aborts} aborted, {kills} kills, {joins} joins, "
        f"{len(seen)} revisions\n"
    )
    assert kills >= SECONDS / 6
    assert max(worlds) >= 3
    assert all(len(digests) == 1 for digests in seen.values()), "the state differed between peers"


def _lines(path: Path) -> list[dict]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
