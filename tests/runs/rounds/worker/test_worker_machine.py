"""The worker's side of the protocol, as transcripts."""

from __future__ import annotations

import msgspec
import pytest
from small_training import SPEC

from planetary.core.errors import (
    CompileError,
    LocalProtocolError,
    NumericsError,
    PeerError,
    PlanetaryError,
    ResourceError,
    TrustError,
)
from planetary.core.registry import Chosen
from planetary.core.schedules import Schedule
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker import events as w
from planetary.fleet.worker.machine import WorkerMachine, WorkerPhase
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker import events as rw
from planetary.runs.rounds.worker.lease_machine import LeaseMachine, TaskPhase
from planetary.runs.rounds.worker.ring_machine import RingMachine

JOB = rm.TrainingJob(run="r", artifact="a" * 64, buffers="", spec=SPEC, inner_state="persist", schedule=Schedule())
SLICE = rm.Slice("data", "ui8", 0, 44)


def machine(give_up_s: float = 0.0) -> WorkerMachine:
    return WorkerMachine("n/0", redial_first_s=0.1, redial_limit_s=1.0, give_up_s=give_up_s)


def loaded(job: rm.TrainingJob, *, opt_state_round: int = 0, device: str = "", verified: str = "") -> w.JobLoaded:
    found = rm.Ready(artifact=job.artifact, opt_state_round=opt_state_round, device=device, verified=verified)
    make = LeaseMachine if job.ring is None else RingMachine
    return w.JobLoaded(job, make(found, progress_every_s=0.5))


def train_task(task: int, round_: int = 1) -> rm.TrainTask:
    return rm.TrainTask(task=task, round=round_, version=0, lease=0, slice=SLICE, steps=4, first_step=0)


def starts(task: rm.TrainTask) -> rw.StartTraining:
    return rw.StartTraining(task, JOB.schedule)


def ready(worker: WorkerMachine) -> WorkerMachine:
    assert worker.handle(e.Tick(), 0.0) == [e.Dial(1)]
    assert worker.handle(e.Opened(1), 0.1) == []
    assert worker.handle(e.Received(1, JOB), 0.2) == [w.LoadJob(JOB)]
    expected = rm.Ready(artifact=JOB.artifact, opt_state_round=3)
    assert worker.handle(loaded(JOB, opt_state_round=3), 0.3) == [e.Send(1, expected)]
    return worker


def test_a_missing_artifact_is_fetched_and_loaded() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    worker.handle(e.Opened(1), 0.1)
    worker.handle(e.Received(1, JOB), 0.2)
    assert worker.handle(w.BlobMissing("a" * 64), 0.3) == [e.Send(1, m.FetchBlob(digest="a" * 64))]
    assert worker.handle(e.Received(1, m.BlobData(digest="a" * 64)), 0.4) == [w.LoadJob(JOB)]


def test_a_wrong_blob_ends_the_worker() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    worker.handle(e.Opened(1), 0.1)
    worker.handle(e.Received(1, JOB), 0.2)
    out = worker.handle(e.Received(1, m.BlobData(digest="a" * 64), "the digest is wrong"), 0.4)
    assert out == [e.Send(1, m.Goodbye(reason="the digest is wrong")), e.Exit(False, "the digest is wrong", TrustError)]


def test_wrong_device_is_reported_and_ends_the_worker() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    worker.handle(e.Opened(1), 0.1)
    worker.handle(e.Received(1, JOB), 0.2)
    out = worker.handle(w.DeviceIsWrong("'head' is off"), 0.4)
    refused = m.DeviceRefused(artifact=JOB.artifact, reason="'head' is off")
    assert out == [e.Send(1, refused), e.Exit(False, "'head' is off", CompileError)]


def test_the_check_on_the_device_is_reported() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    worker.handle(e.Opened(1), 0.1)
    worker.handle(e.Received(1, JOB), 0.2)
    out = worker.handle(loaded(JOB, device="a chip", verified="verified on a chip"), 0.4)
    ready = rm.Ready(artifact=JOB.artifact, opt_state_round=0, device="a chip", verified="verified on a chip")
    assert out == [e.Send(1, ready)]


def test_tasks_are_done_in_the_order_of_arrival() -> None:
    worker = ready(machine())
    assert worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0) == [rw.UseParameters(0)]
    assert worker.handle(e.Received(1, train_task(7)), 1.1) == [starts(train_task(7))]
    evaluate = rm.EvalTask(task=9, version=1, slice=SLICE, batches=1)
    assert worker.handle(e.Received(1, rm.Parameters(version=1)), 1.2) == []
    assert worker.handle(e.Received(1, evaluate), 1.3) == []
    out = worker.handle(rw.TrainingDone(7, 1, 4, 40, 1.5, 0.5, 2.0), 2.0)
    result = rm.TrainResult(task=7, round=1, steps=4, tokens=40, loss=1.5, grad_norm=0.5, seconds=2.0)
    assert out == [e.Send(1, result, e.EndParametersOf(7)), rw.UseParameters(1), rw.StartEvaluating(evaluate)]


def test_coded_version_is_read_beside_the_trained_lease() -> None:
    """But not where a task that was sent before it begins from an older one."""
    worker = machine()
    job = msgspec.structs.replace(JOB, compression=rm.Compression(up="sign", down="sign"))
    for event in (e.Tick(), e.Opened(1), e.Received(1, job), loaded(job), e.Received(1, rm.Parameters(version=0))):
        worker.handle(event, 0.1)
    assert worker.handle(e.Received(1, train_task(7)), 1.1) == [starts(train_task(7))]
    for version in (1, 2):
        assert worker.handle(e.Received(1, rm.Parameters(version=version)), 1.2) == [rw.TakeAhead(version)]
    evaluate = rm.EvalTask(task=9, version=2, slice=SLICE, batches=1)
    assert worker.handle(e.Received(1, evaluate), 1.3) == []
    assert worker.handle(e.Received(1, rm.Parameters(version=3)), 1.4) == []
    out = worker.handle(rw.TrainingDone(7, 1, 4, 40, 1.5, 0.5, 2.0), 2.0)
    assert out[1:] == [rw.UseParameters(1), rw.UseParameters(2), rw.StartEvaluating(evaluate)]


def test_progress_is_reported_at_the_start_and_then_now_and_then() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, train_task(7)), 1.0)
    assert worker.handle(rw.StepDone(7, 0, None), 1.0) == [e.Send(1, rm.Progress(task=7, round=1, step=0))]
    assert worker.handle(rw.StepDone(7, 1, 3.0), 1.2) == []
    assert worker.handle(rw.StepDone(7, 2, 2.0), 1.6) == [e.Send(1, rm.Progress(task=7, round=1, step=2, loss=2.0))]


def test_a_cancelled_task_is_stopped_and_not_answered() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, train_task(7)), 1.0)
    worker.handle(e.Received(1, train_task(8, 2)), 1.1)
    assert worker.handle(e.Received(1, rm.CancelTask(task=7, reason="late")), 1.2) == [rw.StopTask(7)]
    assert worker.handle(rw.TrainingDone(7, 1, 4, 40, 1.5, 0.5, 2.0), 1.3) == [starts(train_task(8, 2))]


def test_a_queued_task_is_cancelled_without_a_word() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, train_task(7)), 1.0)
    worker.handle(e.Received(1, train_task(8, 2)), 1.1)
    assert worker.handle(e.Received(1, rm.CancelTask(task=8, reason="late")), 1.2) == []
    out = worker.handle(rw.TaskBroke(7, "numerics", "the loss became nan", 2), 1.3)
    assert out == [e.Send(1, m.TaskFailed(task=7, kind="numerics", reason="the loss became nan", step=2))]


def test_a_lost_connection_stops_the_task_and_is_made_again() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, train_task(7)), 1.0)
    assert worker.handle(e.Closed(1, "reset"), 2.0) == [rw.StopTask(7)]
    again = worker.next_deadline()
    assert again is not None
    assert 2.0 < again <= 2.1
    assert worker.handle(rw.TaskStopped(7), 2.01) == []
    assert worker.handle(e.Tick(), again) == [e.Dial(2)]
    # Late messages of the old connection are dropped.
    assert worker.handle(e.Received(1, train_task(9)), again) == []
    worker.handle(e.Opened(2), 3.0)
    # The artifact is on the device already.
    assert worker.handle(e.Received(2, JOB), 3.1) == [e.Send(2, rm.Ready(artifact=JOB.artifact, opt_state_round=3))]


def test_pauses_between_attempts_grow_to_their_limit() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    now, pauses = 0.0, []
    for session in range(1, 9):
        worker.handle(e.Closed(session, "refused"), now)
        deadline = worker.next_deadline()
        assert deadline is not None
        pauses.append(deadline - now)
        now = deadline
        assert worker.handle(e.Tick(), now) == [e.Dial(session + 1)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.11
    assert 0.75 <= pauses[-1] <= 1.0


def test_it_gives_up_when_told_so() -> None:
    worker = machine(give_up_s=5.0)
    worker.handle(e.Tick(), 0.0)
    assert worker.handle(e.Closed(1, "refused"), 1.0) == []
    worker.handle(e.Tick(), 2.0)
    (end,) = worker.handle(e.Closed(2, "connection refused"), 6.0)
    assert isinstance(end, e.Exit)
    assert not end.ok
    assert "for 6 s; last attempt: connection refused" in end.reason


def test_a_refusal_for_good_and_a_shutdown_end_it() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    assert worker.handle(e.Closed(1, "wrong token", refused=True), 0.1) == [e.Exit(False, "wrong token", TrustError)]
    other = ready(machine())
    assert other.handle(e.Received(1, m.Shutdown(reason="done")), 1.0) == [e.Exit(True, "done")]
    assert other.handle(e.Tick(), 2.0) == []
    assert other.next_deadline() is None


@pytest.mark.parametrize(
    ("kind", "error"),
    [("compile", CompileError), ("numerics", NumericsError), ("resource", ResourceError), ("", PeerError)],
)
def test_a_worker_that_is_not_wanted_ends_as_what_it_failed_with(kind: str, error: type[PlanetaryError]) -> None:
    worker = ready(machine())
    told = m.Shutdown(reason="of no use", ok=False, kind=kind)
    assert worker.handle(e.Received(1, told), 1.0) == [e.Exit(False, "of no use", error)]


def test_worker_turned_away_twice_ends_in_the_same_way() -> None:
    """A worker that comes back after it was turned away ends in the same way."""
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    closed = e.Closed(1, "not used any more", refused=True, kind="compile")
    assert worker.handle(closed, 0.1) == [e.Exit(False, "not used any more", CompileError)]


# --- ring -------------------------------------------------------------------------------------------------------


OUTER = Chosen("nesterov", {"learning_rate": 0.7, "momentum": 0.9})


def ring_job(*, port: int = 1, overlap: bool = False) -> rm.RingJob:
    return rm.RingJob(port=port, connections=1, precision="f32", outer=OUTER, gather_s=5.0, overlap=overlap)


def ring_worker(*, overlap: bool) -> WorkerMachine:
    worker, job = machine(), msgspec.structs.replace(JOB, ring=ring_job(overlap=overlap))
    worker.handle(e.Tick(), 0.0)
    worker.handle(e.Opened(1), 0.1)
    worker.handle(e.Received(1, job), 0.2)
    worker.handle(loaded(job), 0.3)
    assert worker.handle(e.Received(1, rm.RingState(version=0, digest="d0")), 0.4) == [rw.UseOuterState(0, (0,))]
    return worker


def reduce(round_: int) -> rm.Reduce:
    return rm.Reduce(round=round_, attempt=round_, group=1, peers=2, own={7: 40}, contributions=1, tokens=40)


def test_reduction_ends_during_the_next_older_round() -> None:
    """A reduction ends while the next round is trained from the older version."""
    worker = ring_worker(overlap=True)
    assert worker.handle(e.Received(1, train_task(7)), 1.0) == [
        rw.UseParameters(0),
        starts(train_task(7)),
    ]
    out = worker.handle(rw.TrainingDone(7, 1, 4, 40, 1.5, 0.5, 2.0), 2.0)
    assert out[0] == rw.HoldEndParameters(7, 1, 40)
    assert worker.handle(e.Received(1, reduce(1)), 2.1) == [rw.StartReduce(reduce(1))]
    # The same parameters are in use still; the reduction is not waited for.
    assert worker.handle(e.Received(1, train_task(8, 2)), 2.2) == [starts(train_task(8, 2))]
    assert worker.handle(rw.ReduceSucceeded(1, 1, "d1", 5, 5), 2.3) == [
        rw.UseOuterState(1, (1, 0)),
        e.Send(1, rm.ReduceDone(round=1, attempt=1, digest="d1", sent_bytes=5, received_bytes=5)),
    ]
    out = worker.handle(rw.TrainingDone(8, 2, 4, 40, 1.5, 0.5, 2.0), 3.0)
    assert out[0] == rw.HoldEndParameters(8, 2, 40)
    later = msgspec.structs.replace(train_task(9, 3), version=1)
    assert worker.handle(e.Received(1, later), 3.1) == [rw.UseParameters(1), starts(later)]
    # Two versions are kept, and what the queue needs.
    queued = rm.EvalTask(task=10, version=1, slice=SLICE, batches=1)
    assert worker.handle(e.Received(1, queued), 3.2) == []
    worker.handle(e.Received(1, reduce(2)), 3.3)
    assert worker.handle(rw.ReduceSucceeded(2, 2, "d2", 5, 5), 3.4)[0] == rw.UseOuterState(2, (2, 1))
    worker.handle(e.Received(1, reduce(3)), 3.5)
    assert worker.handle(rw.ReduceSucceeded(3, 3, "d3", 5, 5), 3.6)[0] == rw.UseOuterState(3, (3, 1, 2))


def test_a_task_waits_for_the_version_that_it_names() -> None:
    worker = ring_worker(overlap=False)
    worker.handle(e.Received(1, reduce(1)), 1.0)
    task = msgspec.structs.replace(train_task(8, 2), version=1)
    assert worker.handle(e.Received(1, task), 1.1) == []
    out = worker.handle(rw.ReduceSucceeded(1, 1, "d1", 5, 5), 1.2)
    assert out[0] == rw.UseOuterState(1, (1,))
    assert out[2:] == [rw.UseParameters(1), starts(task)]


def test_outer_states_and_reductions_do_not_wait_for_tasks() -> None:
    worker = ring_worker(overlap=True)
    worker.handle(e.Received(1, train_task(7)), 1.0)
    worker.handle(e.Received(1, rm.EvalTask(task=9, version=0, slice=SLICE, batches=1)), 1.1)
    assert worker.handle(e.Received(1, rm.SendOuterState(version=0)), 1.2) == [
        e.Send(1, rm.RingState(version=0, digest="d0"), e.OuterStateOf(0))
    ]
    assert worker.handle(e.Received(1, reduce(1)), 1.3) == [rw.StartReduce(reduce(1))]
    # What the ring does has an order of its own.
    assert worker.handle(e.Received(1, rm.RingState(version=5, digest="d5")), 1.4) == []
    out = worker.handle(rw.ReduceBroke(1, 1, "peer", "lost"), 1.5)
    assert out[1:] == [rw.UseOuterState(5, (5, 0))]  # version 0 is what the queued evaluation needs


def test_lost_connection_leaves_the_ring_and_keeps_the_state() -> None:
    worker = ring_worker(overlap=True)
    worker.handle(e.Received(1, train_task(7)), 1.0)
    worker.handle(e.Received(1, reduce(1)), 1.1)
    assert worker.handle(e.Closed(1, "reset"), 2.0) == [rw.LeaveRing(), rw.StopTask(7)]
    assert worker.handle(rw.ReduceSucceeded(1, 1, "d1", 5, 5), 2.1) == []  # no longer asked for


def test_a_later_job_moves_the_ring_to_its_master() -> None:
    """A gateway that restarts may lead the ring on another port."""
    worker = ring_worker(overlap=False)
    worker.handle(e.Closed(1, "reset"), 1.0)
    worker.handle(e.Tick(), 2.0)
    worker.handle(e.Opened(2), 2.1)
    ring = ring_job(port=7)
    follow, ready = worker.handle(e.Received(2, msgspec.structs.replace(JOB, ring=ring)), 2.2)
    assert follow == rw.FollowRing(ring)
    assert isinstance(ready, e.Send)
    assert isinstance(ready.message, rm.Ready)


def test_a_role_that_was_made_for_the_job_before_is_not_taken() -> None:
    worker = machine()
    worker.handle(e.Tick(), 0.0)
    worker.handle(e.Opened(1), 0.1)
    other = msgspec.structs.replace(JOB, artifact="b" * 64)
    worker.handle(e.Received(1, JOB), 0.2)
    assert worker.handle(e.Received(1, other), 0.3) == [w.LoadJob(other)]
    assert worker.handle(loaded(JOB), 0.4) == []
    assert worker.phase is WorkerPhase.LOADING
    assert worker.handle(loaded(other), 0.5) == [e.Send(1, rm.Ready(artifact="b" * 64, opt_state_round=0))]
    worker.validate()
    assert worker.phase is WorkerPhase.IN_ROLE


def test_a_contradiction_of_worker_and_role_is_found() -> None:
    worker = ready(machine())
    worker.validate()
    worker.phase = WorkerPhase.LOADING
    with pytest.raises(LocalProtocolError, match="worker n/0 is in no possible state: loading with the role"):
        worker.validate()
    role = LeaseMachine(rm.Ready(artifact="a" * 64, opt_state_round=0), progress_every_s=0.5)
    role.connected(1, JOB)
    role.handle(e.Received(1, train_task(7)), 0.0)
    role.validate()
    assert role.phase is TaskPhase.WORKING
    role.phase = TaskPhase.IDLE
    with pytest.raises(LocalProtocolError, match="idle with task 7"):
        role.validate()


def streaming_task(task: int, mixes: int) -> rm.TrainTask:
    return msgspec.structs.replace(train_task(task), version=0, after=task - 1, mixes=mixes)


def test_a_task_pauses_for_the_version_that_it_mixes_in() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    task = streaming_task(7, mixes=1)
    assert worker.handle(e.Received(1, task), 1.1) == [rw.UseParameters(0, after=6), starts(task)]
    assert worker.handle(rw.TrainingPaused(7), 1.2) == []
    assert worker.handle(e.Received(1, rm.Parameters(version=1, since=0)), 1.3) == [rw.MixIn(task)]
    out = worker.handle(rw.TrainingDone(7, 1, 4, 40, 1.5, 0.5, 2.0), 2.0)
    assert [type(i) for i in out] == [e.Send]


def test_a_version_that_comes_before_the_pause_waits_for_it() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    task = streaming_task(7, mixes=1)
    worker.handle(e.Received(1, task), 1.1)
    assert worker.handle(e.Received(1, rm.Parameters(version=1, since=0)), 1.2) == []
    assert worker.handle(rw.TrainingPaused(7), 1.3) == [rw.MixIn(task)]


def test_a_paused_task_that_is_cancelled_ends() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    task = streaming_task(7, mixes=1)
    worker.handle(e.Received(1, task), 1.1)
    worker.handle(rw.TrainingPaused(7), 1.2)
    out = worker.handle(e.Received(1, rm.CancelTask(task=7, reason="the run went back")), 1.3)
    assert out == [rw.StopTask(7), rw.EndPaused(task)]
    assert worker.handle(rw.TaskStopped(7), 1.4) == []
    again = train_task(8)
    assert worker.handle(e.Received(1, again), 1.5) == [rw.UseParameters(0), starts(again)]


def test_a_paused_task_ends_where_the_gateway_goes_on_without_it() -> None:
    """Another task came in place of the version: it waited behind the pause, and the pause for ever."""
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    task, other = streaming_task(7, mixes=1), train_task(8)
    worker.handle(e.Received(1, task), 1.1)
    assert worker.handle(e.Received(1, other), 1.2) == []
    assert worker.handle(rw.TrainingPaused(7), 1.3) == [rw.StopTask(7), rw.EndPaused(task)]
    worker.validate()
    assert worker.handle(rw.TaskStopped(7), 1.4) == [rw.UseParameters(0), starts(other)]


def test_a_paused_task_ends_with_its_connection() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    worker.handle(e.Received(1, streaming_task(7, mixes=1)), 1.1)
    worker.handle(rw.TrainingPaused(7), 1.2)
    out = worker.handle(e.Closed(1, "gone"), 1.3)
    assert [type(i) for i in out][:2] == [rw.StopTask, rw.EndPaused]


def done(task: int, round_: int) -> rw.TrainingDone:
    return rw.TrainingDone(task, round_, 4, 40, 1.5, 0.5, 2.0, digest="d")


def given_rounds(out: list) -> list[int]:
    return [i.message.round for i in out if isinstance(i, e.Send) and isinstance(i.message, rm.TrainResult)]


def test_a_task_under_way_is_counted_in_a_later_round() -> None:
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    worker.handle(e.Received(1, train_task(7)), 1.1)
    assert worker.handle(e.Received(1, rm.CountIn(task=7, round=2)), 1.2) == [rw.CountTaskIn(7, 2)]
    assert given_rounds(worker.handle(done(7, 2), 2.0)) == [2]


def test_a_result_whose_round_closed_meanwhile_is_given_again() -> None:
    """Whether the word comes while the result is made, or after it was sent."""
    worker = ready(machine())
    worker.handle(e.Received(1, rm.Parameters(version=0)), 1.0)
    worker.handle(e.Received(1, train_task(7)), 1.1)
    worker.handle(e.Received(1, rm.CountIn(task=7, round=2)), 1.2)
    assert worker.handle(done(7, 1), 1.3) == [rw.GiveAgain(7, 2)]
    assert given_rounds(worker.handle(done(7, 2), 1.4)) == [2]
    assert worker.handle(e.Received(1, rm.CountIn(task=7, round=3)), 1.5) == [rw.GiveAgain(7, 3)]
    assert given_rounds(worker.handle(done(7, 3), 1.6)) == [3]
    assert worker.handle(e.Received(1, rm.CountIn(task=6, round=3)), 1.7) == []
