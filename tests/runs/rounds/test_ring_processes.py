"""Real workers that reduce among themselves, and one that is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from killable_run import KillableRun, kill

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.jsonl import read_json_lines
from planetary.machine.journal import replay
from planetary.runs.rounds.records import RoundsRecord
from planetary.runs.rounds.state import ControllerState

pytestmark = pytest.mark.processes

RING = ("--set=sync.topology=ring", "--set=sync.precision=f64")
STEPS = 8000
# Long leases: both workers must be stopped within one, on a busy machine too. Patient connections: for as long.
SLOW = ("--set=fabric.latency_budget_s=60", f"--set=train.inner_steps={STEPS}")
SHORT = ("--rounds=2", "--set=train.inner_steps=200", "--set=outer.momentum=0.9")


def finished(run: KillableRun) -> None:
    code, _, error = run.finish()
    assert code == 0, error


def test_two_workers_end_with_the_stars_bits(tmp_path: Path, shared_cache: Path) -> None:
    runs: dict[str, KillableRun] = {}
    try:
        for name, flags in (("star", ()), ("ring", RING)):  # at the same time: most of it is starting
            runs[name] = KillableRun(tmp_path / name, shared_cache, *SHORT, *flags)
        for run in runs.values():
            finished(run)
    finally:
        for run in runs.values():
            run.close()
    ends = {name: load_latest(run.folder / "checkpoints") for name, run in runs.items()}
    assert ends["star"].info.round == ends["ring"].info.round == 2
    for name, array in ends["star"].params.items():
        np.testing.assert_array_equal(ends["ring"].params[name], array, err_msg=name)
        np.testing.assert_array_equal(ends["ring"].velocity[name], ends["star"].velocity[name], err_msg=name)
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    size = 8 * sum(array.size for array in ends["ring"].params.values())  # float64
    assert all(line["bytes_ring"] == 2 * size for line in lines)  # each of two sends half of it twice
    assert lines[1]["bytes_down"] < 20_000  # no parameters came from the gateway


def test_worker_killed_during_overlap_costs_a_retry(tmp_path: Path, shared_cache: Path) -> None:
    """A worker killed while the others train the next round costs a retry."""
    overlap = ("--set=sync.topology=ring", "--set=sync.overlap=async")
    run = KillableRun(tmp_path / "run", shared_cache, "--rounds=3", *overlap, *SLOW)
    try:
        first = run.wait_for_event("lease_started", round=2)
        second = run.wait_for_event("lease_started", round=2)
        # Reduced, and not finished: on a busy machine the checkpoint takes longer than the leases of round 2.
        if not any(r["round"] == 1 for r in run.of("round_closed")):
            run.wait_for_event("round_closed", round=1)
        os.kill(second["pid"], signal.SIGSTOP)
        run.wait_for_event("delta_accepted", round=2, pid=first["pid"])
        os.kill(first["pid"], signal.SIGSTOP)  # it has contributed, and will not answer the reduction
        os.kill(second["pid"], signal.SIGCONT)
        next_round = run.wait_for_event("lease_started", round=3, pid=second["pid"])
        kill(first["pid"])
        retried = run.wait_for_event("reduce_retried", round=2)
        withdrawn = run.wait_for_event("delta_withdrawn", round=2)
        closed = run.wait_for_event("round_closed", round=2)
        finished(run)
    finally:
        run.close()
    assert retried["attempt"] == 2
    assert withdrawn["worker"] == first["worker"]
    assert closed["contributions"] == 1
    # What was trained meanwhile counts, from the version before the one that was being made.
    [kept] = [r for r in run.of("lease_assigned") if r["task"] == next_round["task"]]
    assert kept["version"] == 1
    assert next_round["task"] in [r["task"] for r in run.of("delta_accepted") if r["round"] == 3]
    state = replay(read_json_lines(run.folder / "events.jsonl", RoundsRecord), ControllerState())
    assert state.round == 3
    assert state.ledger.held == []
    assert state.ledger.trained * STEPS * 2 * 16 == state.tokens_total
    assert load_latest(run.folder / "checkpoints").info.round == 3


def test_a_worker_killed_in_mid_reduce_costs_a_retry(tmp_path: Path, shared_cache: Path) -> None:
    run = KillableRun(tmp_path / "run", shared_cache, "--rounds=3", *RING, *SLOW)
    try:
        first = run.wait_for_event("lease_started", round=2)
        second = run.wait_for_event("lease_started", round=2)
        os.kill(second["pid"], signal.SIGSTOP)
        run.wait_for_event("delta_accepted", round=2, pid=first["pid"])
        os.kill(first["pid"], signal.SIGSTOP)  # it has contributed, and will not answer the reduction
        os.kill(second["pid"], signal.SIGCONT)
        run.wait_for_event("delta_accepted", round=2, pid=second["pid"])
        kill(first["pid"])
        retried = run.wait_for_event("reduce_retried", round=2)
        withdrawn = run.wait_for_event("delta_withdrawn", round=2)
        closed = run.wait_for_event("round_closed", round=2)
        finished(run)
    finally:
        run.close()
    assert retried["attempt"] == 2
    assert withdrawn["worker"] == first["worker"]
    assert closed["contributions"] == 1
    state = replay(read_json_lines(run.folder / "events.jsonl", RoundsRecord), ControllerState())
    assert state.round == 3
    assert state.ledger.held == []
    assert state.ledger.trained * STEPS * 2 * 16 == state.tokens_total
    assert withdrawn["lease"] in [r["lease"] for r in run.of("delta_accepted") if r["round"] > 2]
    assert load_latest(run.folder / "checkpoints").info.round == 3
