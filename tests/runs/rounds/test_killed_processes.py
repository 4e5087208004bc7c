"""Real processes, and what is left of a run when some of them are killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from killable_run import KillableRun, kill

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.jsonl import read_json_lines
from planetary.machine.journal import replay
from planetary.runs.rounds.records import RoundsRecord
from planetary.runs.rounds.state import ControllerState
from waiting import HANG_S

pytestmark = pytest.mark.processes

Start = Callable[..., KillableRun]
RELAYED = (
    "--set=sync.compression=sign",
    "--set=sync.broadcast_compression=relay",
    "--set=sync.start_compression=int8",
    "--set=outer.merge=rda",
    "--set=optimizer.learning_rate=0.0005",  # at six times as much a round is ruinous now and then, and taken back
)


@pytest.fixture
def start(tmp_path: Path, shared_cache: Path) -> Iterator[Start]:
    runs: list[KillableRun] = []

    def begin(*arguments: str, resume: bool = False) -> KillableRun:
        runs.append(KillableRun(tmp_path / "run", shared_cache, *arguments, resume=resume))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def check_finished(run: KillableRun, rounds: int) -> None:
    """Every round has one line, every lease was trained once, and the journal replays to the end of the run."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    assert all(line["eval_loss"] is not None for line in lines)
    state = replay(read_json_lines(run.folder / "events.jsonl", RoundsRecord), ControllerState())
    assert state.round == rounds
    assert state.ended is not None
    assert state.ended.ok
    assert state.ledger.held == []
    assert state.ledger.trained * 1000 * 2 * 16 == state.tokens_total == lines[-1]["tokens_total"]
    assert load_latest(run.folder / "checkpoints").info.round == rounds


@pytest.mark.essential
def test_a_killed_worker_comes_back_and_trains_its_lease(start: Start) -> None:
    run = start("--rounds=6")
    started = run.wait_for_event("lease_started", round=2)
    kill(started["pid"])
    lost = run.wait_for_event("worker_lost", pid=started["pid"])
    assert lost["worker"] == started["worker"]
    again = run.wait_for_event("lease_started", lease=started["lease"])
    assert again["worker"] == started["worker"]
    assert again["pid"] != started["pid"]
    code, out, error = run.finish()
    assert code == 0, error
    assert "Trained 6 rounds" in out
    check_finished(run, 6)
    report = json.loads((run.folder / "report.json").read_text())
    assert report["faults"]["workers_lost"] == 1


def test_killed_gateway_is_resumed_from_the_last_round(start: Start) -> None:
    """Workers with relayed updates get whole parameters once, and have the gateway's bits in every round after it."""
    run = start("--rounds=8", *RELAYED)
    run.wait_for_event("round_finished", round=3)
    run.wait_for_event("lease_started", round=4)
    kill(run.child("gateway").pid)
    code, _, error = run.finish()
    assert code == 6
    assert "SIGKILL" in error
    finished = max(e["round"] for e in run.of("round_finished"))
    resumed = start(resume=True)
    mark = resumed.wait_for_event("run_resumed")["mark"]
    assert mark["round"] >= finished  # a checkpoint may have been written that the journal could not tell of
    code, _, error = resumed.finish()
    assert code == 0, error
    check_finished(resumed, 8)
    assert resumed.of("task_failed") == []
    for worker in {e["worker"] for e in resumed.of("parameters_sent")}:
        forms = [e["form"] for e in resumed.of("parameters_sent") if e["worker"] == worker]
        later = forms[forms.index("whole") :]
        assert later == ["whole"] + ["relay"] * (len(later) - 1)
        assert len(later) > 1
        assert set(forms[: forms.index("whole")]) == {"int8", "relay"}


def test_ctrl_c_ends_everything_in_time_and_can_be_resumed(start: Start) -> None:
    run = start("--rounds=5")
    run.wait_for_event("lease_started", round=2)
    family = run.family()
    assert len(family) >= 6  # gateway, node manager, two supervisors, two workers
    run.process.send_signal(signal.SIGINT)
    code, _, error = run.finish()
    assert code == 130
    assert "planetary train --resume" in error
    gone, alive = psutil.wait_procs(family, timeout=HANG_S)
    assert not alive, [p.cmdline() for p in alive]
    assert len(gone) == len(family)
    assert run.of("run_finished")[-1]["ok"] is False
    resumed = start(resume=True)
    code, _, error = resumed.finish()
    assert code == 0, error
    check_finished(resumed, 5)


def test_a_killed_supervisor_and_node_take_their_children_along(start: Start) -> None:
    run = start("--rounds=40")
    run.wait_for_event("lease_started", round=1)
    supervisor = run.child("supervisor", "local/0")
    worker = run.child("worker", "local/0")
    kill(supervisor.pid)
    gone, alive = psutil.wait_procs([supervisor, worker], timeout=HANG_S)
    assert len(gone) == 2, alive
    run.wait_for(lambda e: e["event"] == "worker_joined" and e["worker"] == "local/0" and e["pid"] != worker.pid)
    family = run.family()
    kill(run.process.pid)
    _, alive = psutil.wait_procs(family, timeout=HANG_S)
    assert not alive, [p.cmdline() for p in alive]


def test_a_killed_worker_that_nobody_restarts_is_not_waited_for(start: Start) -> None:
    """Two workers, one is gone for good: the rounds go on with the other, and its lease is trained later."""
    run = start("--rounds=4", "--set=fabric.latency_budget_s=0.5")
    run.wait_for_event("lease_started", round=1)
    # Found before the lease begins that its worker must not end: looking for processes takes a busy machine a while.
    node, supervisors = (
        run.child("node-manager"),
        {name: run.child("supervisor", name) for name in ("local/0", "local/1")},
    )
    started = run.wait_for_event("lease_started", round=2)
    # Take the supervisor's parent's means to restart it away: stop the node manager from acting at all.
    node.suspend()
    supervisors[started["worker"]].kill()
    run.wait_for_event("worker_lost", worker=started["worker"])
    returned = run.wait_for_event("lease_returned", to="pool")
    assert returned["lease"] == started["lease"]
    assigned = run.wait_for_event("lease_assigned", lease=started["lease"])
    assert assigned["worker"] != started["worker"]
    node.resume()
    code, _, error = run.finish()
    assert code == 0, error
    check_finished(run, 4)
