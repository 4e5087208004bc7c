"""A worker whose process ends again and again is told of, and is not started for ever."""

from __future__ import annotations

import pytest
from controller_bench import Bench

from planetary.fleet.controller.membership import LIVED_S, MOST_CRASHES
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerBanned
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm


def supervised(bench: Bench, name: str) -> int:
    """A supervisor connects; returns its session."""
    session = 1000 + len(bench.controller.desk.supervisors)
    hello = m.Hello(
        role="supervisor",
        protocol=m.FABRIC.version,
        software="test",
        token="",
        worker=f"{name}/0",
        node=name,
        pid=1,
    )
    bench.tell(e.Received(session, hello))
    return session


def crash(bench: Bench, session: int, *, lived_s: float = 1.0) -> None:
    bench.tell(e.Received(session, m.WorkerStarted(pid=7, attempt=1)))
    bench.now += lived_s
    bench.tell(e.Received(session, m.WorkerExited(pid=7, code=-9, restart_in_s=1.0, reason="killed by SIGKILL")))


@pytest.mark.parametrize("local", [True, False])
def test_worker_crashing_in_a_row_is_given_up_with_the_signal(local: bool) -> None:
    bench = Bench(local=local)
    session = supervised(bench, "a")
    for _ in range(MOST_CRASHES - 1):
        crash(bench, session)
    assert not bench.records(WorkerBanned)
    assert bench.controller.membership.whom_we_wait_for() == (
        f"waiting for a/0 (its process ended {MOST_CRASHES - 1} times in a row, the last time: killed by SIGKILL) "
        "to start"
    )
    crash(bench, session)
    [banned] = bench.records(WorkerBanned)
    assert banned.worker == "a/0"
    assert f"ended {MOST_CRASHES} times in a row and answered no task" in banned.reason
    assert "killed by SIGKILL (out of memory?" in banned.reason
    shutdown = [message for to, message in bench.sent if to == session and isinstance(message, m.Shutdown)]
    assert not shutdown[0].ok
    assert bench.finish is not None
    assert bench.finish.kind == "resource"
    assert "killed by SIGKILL" in bench.finish.reason


def test_crashes_with_answers_between_them_are_forgiven() -> None:
    bench = Bench()
    supervisor = supervised(bench, "a")
    for round_ in range(1, 3):
        for _ in range(MOST_CRASHES - 1):
            crash(bench, supervisor)
        session = bench.join("a")
        result = rm.TrainResult(
            task=bench.task_of(session),
            round=round_,
            steps=bench.policy.inner_steps,
            tokens=bench.policy.tokens_per_lease,
            loss=2.0,
            grad_norm=1.0,
            seconds=0.1,
        )
        bench.tell(e.Received(session, result, "", round_))
        bench.tell(e.OuterStepDone(round_, 1.0))
        bench.tell(e.CheckpointDone(round_, f"round-{round_}", 0.1))
    assert not bench.records(WorkerBanned)


def test_a_process_that_lived_long_did_not_crash_at_its_start() -> None:
    bench = Bench()
    supervisor = supervised(bench, "a")
    for _ in range(2 * MOST_CRASHES):
        bench.join("other")
        crash(bench, supervisor, lived_s=LIVED_S)
    assert not bench.records(WorkerBanned)
