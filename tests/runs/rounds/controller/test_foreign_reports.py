"""A worker reports on the tasks that it was given, and on no others."""

from __future__ import annotations

import pytest
from controller_bench import Bench

from planetary.fleet.controller.desk import MOST_REMEMBERED, GivenTasks, Standing
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerBanned, WorkerJoined
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.records import DeltaAccepted, DeltaRejected, RoundStarted

EAGER = ("sync.overlap=eager", "sync.compression=float32")
MODES = pytest.mark.parametrize("given", [(), EAGER, ("sync.overlap=streaming",)], ids=["none", "eager", "streaming"])


def result_of(bench: Bench, task: int, **fields: object) -> rm.TrainResult:
    """A sound result of a task of the first round, but for `fields`."""
    sound = {
        "payload": bench.controller.topology.result,
        "task": task,
        "round": 1,
        "steps": bench.policy.inner_steps,
        "tokens": bench.policy.tokens_per_lease,
        "loss": 2.0,
        "grad_norm": 1.0,
        "seconds": 1.0,
    }
    return rm.TrainResult(**{**sound, **fields})  # type: ignore[arg-type]


def begun(given: tuple[str, ...] = ()) -> tuple[Bench, int, int]:
    """Two workers with a task each; and their sessions."""
    bench = Bench(workers=2, given=given)
    sessions = bench.join("a", identity="a1" * 32), bench.join("b", identity="b2" * 32)
    assert bench.task_of(sessions[0]) != bench.task_of(sessions[1])
    return bench, *sessions


@MODES
@pytest.mark.parametrize("task", [12345, 0, -1, 2**63 - 1])
@pytest.mark.parametrize("round_", [0, 1, -1])
def test_result_for_a_task_of_nobody_changes_nothing(given: tuple[str, ...], task: int, round_: int) -> None:
    bench, session, _ = begun(given)
    message = result_of(bench, task, round=round_)
    for event in (e.PayloadArrives(session, message), e.Received(session, message, "", 7)):
        bench.tell(event)
        bench.controller.validate()
    assert bench.finish is None
    assert not bench.records(DeltaAccepted)


@MODES
def test_result_of_an_own_task_for_round_0_is_refused(given: tuple[str, ...]) -> None:
    bench, session, _ = begun(given)
    bench.tell(e.Received(session, result_of(bench, bench.task_of(session), round=0), "", 7))
    assert bench.finish is None
    assert [r.worker for r in bench.records(DeltaRejected)] == ["a/0"]


@MODES
def test_foreign_result_replaces_nothing(given: tuple[str, ...]) -> None:
    """Before, between and after the bytes of the worker's own."""
    bench, owner, liar = begun(given)
    task = bench.task_of(owner)
    own, forged = result_of(bench, task), result_of(bench, task, id=9)
    for event in (
        e.PayloadArrives(liar, forged),
        e.Received(liar, forged, "", 777),
        e.PayloadArrives(owner, own),
        e.Received(liar, forged, "", 778),
        e.Received(owner, own, "", 1),
    ):
        bench.tell(event)
        bench.controller.validate()
    assert [(r.worker, r.task) for r in bench.records(DeltaAccepted)] == [("a/0", task)]
    other = bench.task_of(liar)
    bench.tell(e.PayloadArrives(liar, result_of(bench, other)))
    bench.tell(e.Received(liar, result_of(bench, other), "", 2))
    assert dict(bench.measures[0].contributions) == {task: 1, other: 2}


@pytest.mark.parametrize("given", [EAGER, ("sync.overlap=streaming",)], ids=["eager", "streaming"])
def test_second_report_does_not_replace_the_counted(given: tuple[str, ...]) -> None:
    """The journal has the loss and tokens of the message that began to arrive; only its tensors belong to them."""
    bench, owner, other = begun(given)
    task, awaited = bench.task_of(owner), bench.task_of(other)
    counted, second = result_of(bench, task, id=3, loss=2.0), result_of(bench, task, id=4, loss=1.5)
    for event in (
        e.PayloadArrives(owner, counted),
        e.PayloadArrives(owner, second),
        e.Received(owner, second, "", 777),
        e.Received(owner, counted, "", 1),
        e.PayloadArrives(other, result_of(bench, awaited)),
        e.Received(other, result_of(bench, awaited), "", 2),
    ):
        bench.tell(event)
        bench.controller.validate()
    assert [(r.task, r.loss) for r in bench.records(DeltaAccepted)] == [(task, 2.0), (awaited, 2.0)]
    assert dict(bench.measures[0].contributions) == {task: 1, awaited: 2}


@pytest.mark.parametrize("kind", ["progress", "failure", "evaluation"])
def test_foreign_reports_are_counted_and_ban_the_machine(kind: str) -> None:
    bench, owner, liar = begun()
    task = bench.task_of(owner)
    report = {
        "progress": rm.Progress(task=task, round=1, step=2, loss=1.0),
        "failure": m.TaskFailed(task=task, kind="numerics", reason="it says so"),
        "evaluation": rm.EvalResult(task=task, version=1, loss=1.0, batches=1),
    }[kind]
    for _ in range(bench.policy.max_strikes):
        assert not bench.records(WorkerBanned)
        bench.tell(e.Received(liar, report))
    [banned] = bench.records(WorkerBanned)
    assert (banned.worker, banned.lasting) == ("b/0", True)
    assert f"{type(report).__name__} on task {task}, which it was not given" in banned.reason
    assert bench.controller.desk.workers[owner].train is not None
    again = bench.connect("c", identity="b2" * 32)
    assert any(to == again and isinstance(message, m.Refused) for to, message in bench.sent)


def test_report_on_a_task_of_an_earlier_connection_is_no_offence() -> None:
    bench, first, _ = begun()
    task = bench.task_of(first)
    second = bench.join("a", identity="a1" * 32)
    for _ in range(bench.policy.max_strikes):
        bench.tell(e.Received(second, result_of(bench, task)))
    assert not bench.records(WorkerBanned)
    assert not bench.records(DeltaAccepted)


def test_tasks_of_a_connection_are_remembered_until_it_ends() -> None:
    tasks = GivenTasks()
    for task in range(1, MOST_REMEMBERED + 2):
        tasks.give(1, rm.CancelTask(task=task, reason=""))
    report = rm.EvalResult(task=2, version=0, loss=1.0, batches=1)
    assert tasks.standing(1, report) is Standing.OWN
    assert tasks.standing(2, report) is Standing.FOREIGN
    assert tasks.standing(1, rm.EvalResult(task=1, version=0, loss=1.0, batches=1)) is Standing.STALE
    assert tasks.standing(2, m.TaskFailed(task=0, kind="data", reason="the role failed")) is Standing.OWN
    tasks.forget(1)
    assert tasks.standing(2, report) is Standing.STALE


def test_a_worker_that_only_tries_a_backend_takes_no_part() -> None:
    bench = Bench()
    session = bench.connect("n", trial=True)
    bench.tell(e.Received(session, rm.Ready(artifact="a" * 64, opt_state_round=0)))
    assert not bench.records(WorkerJoined)
    assert not bench.records(RoundStarted)


STREAMING = ("sync.overlap=streaming", "sync.fragments=2", "sync.delay=2", "sync.mixing=0.5", "eval.every=8")


def test_early_result_counts_once_and_not_before_its_round() -> None:
    """A worker trains ahead, and sends the result twice while the round before is open."""
    bench, fast, slow = begun(STREAMING)
    first, awaited = bench.task_of(fast), bench.task_of(slow)
    bench.tell(e.PayloadArrives(fast, result_of(bench, first)))
    bench.tell(e.Received(fast, result_of(bench, first), "", 1))
    early = bench.task_of(fast)
    train = bench.controller.desk.workers[fast].train
    assert train is not None
    assert (train.task, train.early) == (early, True)
    for attachment in (5, 6):
        message = result_of(bench, early, round=2, id=attachment)
        bench.tell(e.PayloadArrives(fast, message))
        bench.tell(e.Received(fast, message, "", attachment))
    assert [r.task for r in bench.records(DeltaAccepted)] == [first]
    bench.tell(e.PayloadArrives(slow, result_of(bench, awaited)))
    bench.tell(e.Received(slow, result_of(bench, awaited), "", 2))
    assert [r.task for r in bench.records(DeltaAccepted)] == [first, awaited, early]
    assert bench.controller.topology._attachments[early] == 5


def test_foreign_payload_that_begins_to_arrive_gives_no_time() -> None:
    """A worker whose own result comes in is not stuck; one that sends for another's task may be."""
    bench, owner, liar = begun(EAGER)
    bench.tell(e.PayloadArrives(liar, result_of(bench, bench.task_of(owner))))
    workers = bench.controller.desk.workers
    assert not workers[liar].arriving
    bench.tell(e.PayloadArrives(liar, result_of(bench, bench.task_of(liar))))
    assert workers[liar].arriving
