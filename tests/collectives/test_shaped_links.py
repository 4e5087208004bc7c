"""What several connections and the order of the ring are worth over slow links: the measurement, slowed down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "shaped_links.py"

pytestmark = [pytest.mark.soak]


def measured(*arguments: str) -> dict:
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_eight_connections_are_six_times_as_fast_as_one() -> None:
    # A sixteenth of the bytes at a sixteenth of the rates takes as long as 256 MiB, with little to do for this machine.
    found = measured("connections", "--mebibytes", "16", "--slower", "16", "--repeat", "1")
    assert found["times_faster"] >= 6, found


def test_six_peers_in_two_regions_find_the_optimal_ring() -> None:
    found = measured("order", "--mebibytes", "4", "16", "--slower", "16", "--repeat", "2")
    assert found["optimal"], found
    assert found["cost_s"]["found"] < found["next_best_cost_s"]
    assert min(found["times_faster"].values()) >= 2, found
