"""The examples run, and the manual's diagrams are the tables'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planetary.collectives import Master
from waiting import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("hello_numpy", []),
        pytest.param("ddp_torch", ["5"], marks=pytest.mark.doors("torch")),
        ("diloco_numpy", ["12"]),
        ("diloco_numpy", ["--overlap", "12"]),
        ("average_jax", []),
    ],
)
def test_two_peers_run_the_example(script: str, arguments: list[str]) -> None:
    with Master("127.0.0.1:0") as master:
        command = [sys.executable, str(ROOT / "examples/collectives" / f"{script}.py"), master.address, *arguments]
        peers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
        try:
            said = [peer.communicate(timeout=HANG_S)[0].decode() for peer in peers]
        finally:
            for peer in peers:
                peer.kill()
        assert [peer.returncode for peer in peers] == [0, 0], said
    lines = sorted(text.strip().splitlines()[-1] for text in said)
    assert lines[0].startswith("rank 0")
    assert lines[1].startswith("rank 1")
    if script == "diloco_numpy":
        distances = [float(line.split("distance ")[1].split(",")[0]) for line in lines]
        assert max(distances) < 0.2
        assert lines[0].split("theta[0]")[1] == lines[1].split("theta[0]")[1]
