"""Workers that go: lost ones count as lost, and those that are asked to go do not."""

from __future__ import annotations

from typing import get_args

import pytest
from controller_bench import Bench

from planetary.fleet.controller.membership import AWAY_FACTOR
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerBanned, WorkerLeft, WorkerLost
from planetary.fleet.protocol.status import Leave
from planetary.machine.journal import replay
from planetary.runs.rounds import messages as rm


def left(bench: Bench) -> list[tuple[str, str, str]]:
    return [(record.worker, record.kind, record.reason) for record in bench.records(WorkerLeft)]


@pytest.mark.parametrize("kind", ["moved", "drained"])
def test_a_worker_that_is_asked_to_go_is_not_lost(kind: Leave) -> None:
    bench = Bench(2)
    a, b = bench.join("a"), bench.join("b")
    bench.tell(e.LetGo("a/0", "another run needs it", kind))
    assert left(bench) == []  # it has a task
    result = rm.TrainResult(task=bench.task_of(a), round=1, steps=2, tokens=64, loss=3.0, grad_norm=0.5, seconds=0.1)
    bench.tell(e.Received(a, result, "", result.task))
    assert left(bench) == [("a/0", kind, "another run needs it")]
    assert bench.records(WorkerLost) == []
    state = bench.controller.state
    assert (state.losses, state.left, list(state.members)) == ({}, {"a/0": kind}, ["b/0"])
    bench.tell(e.Closed(b, "cut", silent_s=bench.policy.silent_after_s))
    [lost] = bench.records(WorkerLost)
    assert (lost.kind, state.losses) == ("silent", {"b/0": 1})
    bench.join("a")
    assert state.left == {}
    begun = type(state)()
    assert replay([bench.started, *bench.journal], begun) == state


def test_operators_restart_is_no_loss_and_frees_its_lease() -> None:
    """A restart by the operator is not a loss and its lease is free again."""
    bench = Bench()
    session = bench.join("a")
    bench.tell(e.RestartRequested("a/0", "restarted by the test"))
    assert left(bench) == [("a/0", "restarted", "restarted by the test")]
    assert session not in bench.controller.desk.workers
    opened = bench.controller.state.open
    assert opened is not None
    assert (len(opened.orphans), len(opened.holders)) == (1, 0)
    assert bench.controller.membership.desertion_deadline is not None  # it may never come back by itself


def test_every_loss_has_its_kind() -> None:
    bench = Bench(3)
    bench.join("a")
    bench.join("a")
    bench.tell(e.Closed(bench.join("b"), "the socket is gone", silent_s=0.0))
    bench.tell(e.Received(bench.join("c"), m.Goodbye(reason="its machine ends")))
    bench.tell(e.Received(bench.join("d"), m.DeviceRefused(artifact="a" * 64, reason="other digits")))
    assert [record.kind for record in bench.records(WorkerLost)] == ["replaced", "disconnected", "ended", "refused"]
    assert left(bench) == []


def test_run_waits_longer_for_moved_or_drained_workers() -> None:
    """It tells for which, until the desertion of a lost worker counts."""
    bench = Bench()
    for kind in ("drained", "moved"):
        session = bench.join("a")
        bench.tell(e.LetGo("a/0", "the operator needs it", kind))
        bench.tell(e.Received(session, m.TaskFailed(task=bench.task_of(session), reason="no room", kind="resource")))
        assert left(bench)[-1][1] == kind
        bench.now += 2 * bench.policy.abandon_after_s
        bench.tell(e.Tick())
        bench.controller.validate()
        assert bench.finish is None
        assert bench.controller.stalls.why == f"round 1: no worker is connected; a/0 was {kind}"
    bench.tell(e.Closed(bench.join("a"), "cut"))
    bench.now += bench.policy.abandon_after_s
    bench.tell(e.Tick())
    assert bench.finish is not None
    assert bench.finish.kind == "deserted"


def test_run_of_a_lost_drained_worker_is_deserted_at_last() -> None:
    bench = Bench()
    session = bench.join("a")
    bench.tell(e.LetGo("a/0", "the operator needs it", "drained"))
    bench.tell(e.Received(session, m.TaskFailed(task=bench.task_of(session), reason="no room", kind="resource")))
    limit_s = AWAY_FACTOR * bench.policy.abandon_after_s
    bench.now += limit_s - 1
    bench.tell(e.Tick())
    assert bench.finish is None
    bench.now += 1
    bench.tell(e.Tick())
    assert bench.finish is not None
    assert (bench.finish.kind, bench.finish.ok) == ("deserted", False)
    assert bench.finish.reason.startswith(f"no worker was connected for {limit_s:.0f} s; a/0 was drained")


def test_a_ban_beside_a_drained_worker_does_not_end_the_run() -> None:
    bench = Bench()
    idle = bench.join("idle")
    session = bench.join("bad")
    bench.tell(e.LetGo("idle/0", "another run needs it", "drained"))
    bench.tell(e.Received(idle, m.TaskFailed(task=bench.task_of(idle), reason="no room", kind="resource")))
    for _ in range(bench.policy.max_strikes):
        failed = m.TaskFailed(task=bench.task_of(session), reason="no room", kind="resource")
        bench.tell(e.Received(session, failed))
    assert [record.worker for record in bench.records(WorkerBanned)] == ["bad/0"]
    assert left(bench) == [("idle/0", "drained", "another run needs it")]
    assert bench.finish is None


def test_departures_in_good_order_have_a_state_in_displays() -> None:
    from planetary.fleet.protocol.status import WorkerState
    from planetary.monitor import display

    assert {*get_args(Leave)} <= {*get_args(WorkerState)} == {*display.WORKER_STYLE}
