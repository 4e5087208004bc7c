"""The supervisor, as transcripts."""

from __future__ import annotations

import pytest

from planetary.core.errors import LocalProtocolError, PeerError
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.supervisor.machine import SupervisorMachine, SupervisorPhase
from planetary.fleet.supervisor.restarts import Restarts


def machine() -> SupervisorMachine:
    restarts = Restarts("n/0", first_s=0.1, limit_s=2.0, healthy_after_s=10.0, final_codes=frozenset({4}))
    return SupervisorMachine("n/0", restarts=restarts, redial_first_s=0.2, redial_limit_s=2.0)


def running(supervisor: SupervisorMachine) -> SupervisorMachine:
    assert supervisor.handle(e.Tick(), 0.0) == [e.StartProcess(1), e.Dial(1)]
    assert supervisor.handle(e.ProcessStarted(100), 0.0) == []  # no connection yet
    assert supervisor.handle(e.Opened(1), 0.1) == [e.Send(1, m.WorkerStarted(pid=100, attempt=1))]
    return supervisor


def test_first_restart_is_at_once_and_reported() -> None:
    supervisor = running(machine())
    out = supervisor.handle(e.ProcessExited(100, -9, "killed by SIGKILL"), 3.0)
    assert out == [e.Send(1, m.WorkerExited(pid=100, code=-9, restart_in_s=0.0, reason="killed by SIGKILL"))]
    assert supervisor.next_deadline() == 3.0
    assert supervisor.handle(e.Tick(), 3.0) == [e.StartProcess(2)]


def test_repeated_failures_pause_longer_up_to_the_limit() -> None:
    supervisor = running(machine())
    now, pauses = 1.0, []
    for attempt in range(1, 9):
        supervisor.handle(e.ProcessExited(100, 1, "exited with status 1"), now)
        deadline = supervisor.next_deadline()
        assert deadline is not None
        pauses.append(deadline - now)
        now = deadline
        assert supervisor.handle(e.Tick(), now) == [e.StartProcess(attempt + 1)]
        supervisor.handle(e.ProcessStarted(100), now)
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert 1.5 <= pauses[-1] <= 2.0


def test_a_process_that_lived_long_had_no_failed_start() -> None:
    supervisor = running(machine())
    for now in (20.0, 40.0, 60.0):
        supervisor.handle(e.ProcessExited(100, -9, "killed"), now)
        assert supervisor.next_deadline() == now
        supervisor.handle(e.Tick(), now)
        supervisor.handle(e.ProcessStarted(100), now)


def test_no_restart_after_a_clean_or_a_final_exit() -> None:
    for code, ok in ((0, True), (4, False)):
        supervisor = running(machine())
        out = supervisor.handle(e.ProcessExited(100, code, "it ended"), 3.0)
        assert out == [
            e.Send(1, m.WorkerExited(pid=100, code=code, restart_in_s=None, reason="it ended")),
            e.Send(1, m.Goodbye(reason="it ended")),
            e.Exit(ok, "it ended", status=code),
        ]
        assert supervisor.next_deadline() is None


def test_the_worker_runs_on_while_the_connection_is_made_again() -> None:
    supervisor = running(machine())
    assert supervisor.handle(e.Closed(1, "reset"), 5.0) == []
    deadline = supervisor.next_deadline()
    assert deadline is not None
    assert supervisor.handle(e.Tick(), deadline) == [e.Dial(2)]
    assert supervisor.handle(e.Opened(2), 6.0) == [e.Send(2, m.WorkerStarted(pid=100, attempt=1))]


def test_the_gateway_can_have_the_worker_restarted() -> None:
    supervisor = running(machine())
    out = supervisor.handle(e.Received(1, m.RestartWorker(reason="stuck")), 5.0)
    assert out == [e.KillProcess("stuck", gracefully=False)]


def test_restarts_at_the_operators_request_are_no_failed_starts() -> None:
    """They do not make the pauses longer; those that the gateway asks for, as the worker is stuck, do."""
    for kind, pauses in (("restarted", True), ("stuck", False)):
        supervisor, now = running(machine()), 1.0
        for attempt in range(2, 6):
            supervisor.handle(e.Received(1, m.RestartWorker(reason="asked", kind=kind)), now)
            supervisor.handle(e.ProcessExited(100, -9, "killed"), now)
            due = supervisor.next_deadline()
            assert due is not None
            assert (due == now) == (pauses or attempt == 2)
            now = due
            assert supervisor.handle(e.Tick(), now) == [e.StartProcess(attempt)]
            supervisor.handle(e.ProcessStarted(100), now)


def test_a_shutdown_ends_the_worker_first() -> None:
    supervisor = running(machine())
    out = supervisor.handle(e.Received(1, m.Shutdown(reason="all done")), 5.0)
    assert out == [e.KillProcess("all done", gracefully=True)]
    out = supervisor.handle(e.ProcessExited(100, -15, "killed by SIGTERM"), 5.5)
    assert out == [e.Send(1, m.Goodbye(reason="all done")), e.Exit(True, "all done")]


def test_a_worker_that_is_not_wanted_any_more_is_no_success() -> None:
    supervisor = running(machine())
    supervisor.handle(e.Received(1, m.Shutdown(reason="3 failed tasks in a row", ok=False, kind="peer")), 5.0)
    out = supervisor.handle(e.ProcessExited(100, 4, "exited with status 4"), 5.5)
    assert out[-1] == e.Exit(False, "3 failed tasks in a row", PeerError)


def test_stopped_before_a_restart_it_starts_nothing_more() -> None:
    supervisor = running(machine())
    supervisor.handle(e.ProcessExited(100, -9, "killed"), 3.0)
    out = supervisor.handle(e.StopRequested("stopped by SIGTERM"), 3.0)
    assert out[-1] == e.Exit(True, "stopped by SIGTERM")
    assert supervisor.handle(e.Tick(), 4.0) == []


def test_a_contradiction_of_phase_and_process_is_found() -> None:
    supervisor = running(machine())
    supervisor.validate()
    supervisor.phase = SupervisorPhase.WAITING
    with pytest.raises(LocalProtocolError, match="waiting with process 100; waiting, the next start at None"):
        supervisor.validate()
