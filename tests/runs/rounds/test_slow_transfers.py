"""Workers on slow lines are not taken for stuck while what they need, or have made, is on its way."""

from __future__ import annotations

from controller_bench import Bench
from msgspec.structs import replace

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerLost
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.records import DeltaAccepted, LeaseReturned

HOURS = 3 * 3600.0


def begun(bench: Bench) -> int:
    """One worker has a task; its parameters have not left the gateway. Return its session."""
    session = bench.join("a")
    bench.now += 20.0  # the others are not waited for any longer
    bench.tell(e.Tick())
    assert [type(message) for to, message in bench.sent if to == session][-2:] == [rm.Parameters, rm.TrainTask]
    return session


def lost(bench: Bench) -> list[str]:
    return [record.reason for record in bench.records(WorkerLost)]


def parameters(bench: Bench, session: int) -> m.Message:
    return [msg for to, msg in bench.sent if to == session and isinstance(msg, rm.Parameters)][-1]


def result(bench: Bench, session: int) -> rm.TrainResult:
    policy = bench.policy
    return rm.TrainResult(
        task=bench.task_of(session),
        round=1,
        steps=policy.inner_steps,
        tokens=policy.tokens_per_lease,
        loss=2.0,
        grad_norm=1.0,
        seconds=1.0,
    )


def wait(bench: Bench, seconds: float) -> None:
    bench.now += seconds
    bench.tell(e.Tick())


def test_hours_of_parameters_are_waited_for_before_a_step() -> None:
    """Parameters may take hours to a worker and its first step is waited for after that."""
    bench = Bench()
    session = begun(bench)
    wait(bench, HOURS)
    assert lost(bench) == []
    bench.tell(e.PayloadSent(session, parameters(bench, session)))
    wait(bench, bench.policy.first_step_s - 1)
    assert lost(bench) == []
    wait(bench, 2)
    assert lost(bench) == ["it made no progress on its task for 901 s"]


def test_result_may_take_hours_once_it_has_begun_to_arrive() -> None:
    bench = Bench()
    session = begun(bench)
    bench.tell(e.PayloadSent(session, parameters(bench, session)))
    steps = bench.policy.inner_steps
    for step in range(1, steps + 1):
        bench.now += 1.0
        bench.tell(e.Received(session, rm.Progress(task=bench.task_of(session), round=1, step=step, loss=2.0)))
    bench.tell(e.PayloadArrives(session, result(bench, session)))
    wait(bench, HOURS)
    assert lost(bench) == []
    bench.tell(e.Received(session, result(bench, session), "", 1))
    assert len(bench.records(DeltaAccepted)) == 1


def test_trained_worker_that_sends_nothing_is_stuck() -> None:
    bench = Bench()
    session = begun(bench)
    bench.tell(e.PayloadSent(session, parameters(bench, session)))
    bench.now += 1.0
    bench.tell(e.Received(session, rm.Progress(task=bench.task_of(session), round=1, step=4, loss=2.0)))
    wait(bench, 200.0)  # more than twenty of its steps
    assert lost(bench) == ["it made no progress on its task for 200 s"]
    assert len(bench.records(LeaseReturned)) + len(lost(bench)) >= 1


def test_a_result_waits_behind_what_its_worker_sent_before_it() -> None:
    """Such as the result of a lease that was taken back, or an outer state."""
    bench = Bench()
    session = begun(bench)
    bench.tell(e.PayloadSent(session, parameters(bench, session)))
    other = replace(result(bench, session), task=99, id=5)
    bench.controller.desk.tasks.give(session, other)  # a lease that this worker had before
    bench.tell(e.PayloadArrives(session, other))
    wait(bench, HOURS)
    assert lost(bench) == []
    bench.tell(e.Received(session, other, "", 1))
    wait(bench, bench.policy.first_step_s - 1)
    assert lost(bench) == []
    wait(bench, 2)
    assert lost(bench) == ["it made no progress on its task for 901 s"]
