"""A number that cannot be true reaches no round, journal or other worker, and costs its sender the place in the run."""

from __future__ import annotations

import pytest
from controller_bench import Bench

from planetary.fleet.controller.reported_values import LARGEST, MOST, impossible_value
from planetary.fleet.protocol.records import WorkerBanned, WorkerLost
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.records import (
    DeltaAccepted,
    DeltaRejected,
    DigestsDiffered,
    LeaseStarted,
    ReduceRetried,
    RoundClosed,
    TopologyReplaced,
)

EAGER = ("sync.overlap=eager", "sync.compression=float32")
RING = ("sync.topology=ring",)
LIAR = "b2" * 32


def result(bench: Bench, session: int, **fields: object) -> rm.TrainResult:
    """The sound result of a worker's lease of the first round, but for `fields`."""
    sound = {
        "payload": bench.controller.topology.result,
        "task": bench.task_of(session),
        "round": 1,
        "steps": bench.policy.inner_steps,
        "tokens": bench.policy.tokens_per_lease,
        "loss": 2.0,
        "grad_norm": 1.0,
        "seconds": 1.0,
    }
    return rm.TrainResult(**{**sound, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", 1.7e308),
        ("loss", -1.7e308),
        ("loss", float("nan")),
        ("grad_norm", float("inf")),
        ("grad_norm", -1.0),
        ("seconds", -1.0),
        ("seconds", 1e300),
        ("through", 10**30),
    ],
)
@pytest.mark.parametrize("given", [(), EAGER, RING], ids=["star", "eager", "ring"])
def test_impossible_number_of_a_result_is_not_counted(given: tuple[str, ...], field: str, value: float) -> None:
    """A loss of 1.7e308 made the round's mean infinite, which the journal cannot hold: no resume could read it."""
    bench = Bench(workers=2, given=given)
    liar, _ = bench.join("b", identity=LIAR), bench.join("a", identity="a1" * 32)
    for number in range(bench.policy.max_strikes):
        liar = bench.join("b", identity=LIAR) if number else liar
        message = result(bench, liar, **{field: value})
        bench.tell(e.PayloadArrives(liar, message))
        bench.tell(e.Received(liar, message, "", 7))
        bench.controller.validate()
        assert liar not in bench.controller.desk.workers
    assert not bench.records(DeltaAccepted)
    assert f"with {field}" in bench.records(WorkerLost)[0].reason
    [banned] = bench.records(WorkerBanned)
    assert (banned.worker, banned.identity, banned.lasting) == ("b/0", LIAR, True)
    assert bench.finish is None


@pytest.mark.parametrize("fields", [{"tokens": 10**6}, {"steps": 1}, {"tokens": 0}, {"steps": 0, "tokens": 0}])
def test_more_or_less_than_the_lease_is_rejected(fields: dict[str, int]) -> None:
    bench = Bench(workers=1)
    liar = bench.join("b", identity=LIAR)
    bench.tell(e.Received(liar, result(bench, liar, **fields), "", 7))
    assert [record.worker for record in bench.records(DeltaRejected)] == ["b/0"]
    assert not bench.records(DeltaAccepted)


@pytest.mark.parametrize("step", [-1, 5, 10**9])
def test_step_beyond_its_task_is_refused(step: int) -> None:
    bench = Bench(workers=1)
    liar = bench.join("b", identity=LIAR)
    bench.tell(e.Received(liar, rm.Progress(task=bench.task_of(liar), round=1, step=step, loss=1.0)))
    assert f"step {step} of a task of 4 steps" in bench.records(WorkerLost)[0].reason
    assert not bench.records(LeaseStarted)


@pytest.mark.parametrize("fields", [{"batches": 10**6}, {"version": 3}, {"loss": -1.7e308}])
def test_held_out_loss_of_something_else_is_refused(fields: dict[str, object]) -> None:
    bench = Bench(workers=1)
    liar = bench.join("b", identity=LIAR)
    bench.tell(e.Received(liar, result(bench, liar), "", 1))
    bench.tell(e.OuterStepDone(bench.steps[-1].round, 1.0))
    flight = bench.controller.desk.workers[liar].evaluate
    assert flight is not None
    sound = {"task": flight.task, "version": 1, "loss": 1.0, "batches": bench.policy.held_out[flight.chunk].batches}
    bench.tell(e.Received(liar, rm.EvalResult(**{**sound, **fields})))  # type: ignore[arg-type]
    assert [record.worker for record in bench.records(WorkerLost)] == ["b/0"]


@pytest.mark.parametrize("fields", [{"in_ring": True}, {"artifact": "b" * 64}])
def test_worker_that_is_ready_for_another_job_connects_again(fields: dict[str, object]) -> None:
    """It loaded for ever, and a hub waited for the loss of its only worker that evaluates."""
    bench = Bench(workers=1)
    session = bench.connect("b")
    sound = {"artifact": "a" * 64, "opt_state_round": 0}
    bench.tell(e.Received(session, rm.Ready(**{**sound, **fields})))  # type: ignore[arg-type]
    assert session not in bench.controller.desk.workers
    assert bench.controller.desk.workers[bench.join("b")].ready


def test_no_honest_number_is_impossible() -> None:
    for message in (
        rm.TrainResult(task=1, round=1, steps=MOST, tokens=MOST, loss=-LARGEST, grad_norm=3.4e38, seconds=0.0),
        rm.Ready(artifact="a", opt_state_round=0, outer_version=-1),
        rm.Progress(task=2**62, round=1, step=0),
    ):
        assert impossible_value(message) == ""


# --- a ring: who may say how a reduction ended ------------------------------------------------------------------------


def reducing(workers: int = 3) -> tuple[Bench, list[int]]:
    """A ring whose workers are asked to reduce the first round."""
    bench = Bench(workers=workers, given=RING)
    sessions = [bench.join(name, identity=name * 64) for name in "abcde"[:workers]]
    for session in sessions:
        state = [message for to, message in bench.sent if to == session and isinstance(message, rm.RingState)][-1]
        assert state.version == 0
        bench.tell(e.Received(session, result(bench, session)))
    assert len([1 for _, message in bench.sent if isinstance(message, rm.Reduce)]) == workers
    return bench, sessions


def done(bench: Bench, session: int, digest: str) -> None:
    attempt = [message for to, message in bench.sent if to == session and isinstance(message, rm.Reduce)][-1]
    bench.tell(e.Received(session, rm.ReduceDone(round=1, attempt=attempt.attempt, digest=digest)))


def failed(bench: Bench, session: int, kind: str = "peer") -> None:
    attempt = [message for to, message in bench.sent if to == session and isinstance(message, rm.Reduce)][-1]
    reason = "2 of 3 workers took part"
    bench.tell(e.Received(session, rm.ReduceFailed(round=1, attempt=attempt.attempt, kind=kind, reason=reason)))  # type: ignore[arg-type]


def test_lone_word_of_a_finished_reduction_is_not_believed() -> None:
    """The state that it named would have become everybody's."""
    bench, (first, second, liar) = reducing()
    failed(bench, first)
    failed(bench, second)
    done(bench, liar, "f" * 32)
    assert bench.finish is None
    assert not bench.records(RoundClosed)
    assert len(bench.records(ReduceRetried)) == 1
    orders = [(to, message) for to, message in bench.sent if isinstance(message, rm.Reduce) and message.attempt == 2]
    assert [to for to, _ in orders] == [first, second], "the others reduce their results without it"
    assert {message.contributions for _, message in orders} == {2}


def test_answer_about_another_attempt_ends_no_wait() -> None:
    """The others had said that the reduction succeeded, and nothing ended the wait for the third."""
    bench, (first, second, liar) = reducing()
    done(bench, first, "e" * 32)
    bench.tell(e.Received(liar, rm.ReduceDone(round=1, attempt=2**31, digest="e" * 32)))
    done(bench, second, "e" * 32)
    assert liar in bench.controller.desk.workers
    wait = bench.controller.topology.wait(liar)
    assert wait is not None
    bench.now = wait.until
    bench.tell(e.Tick())
    assert [record.worker for record in bench.records(WorkerLost)] == ["c/0"]
    assert not bench.records(ReduceRetried), "two of two agree"


def test_two_that_differ_go_on_in_a_star() -> None:
    """The one that came first was believed."""
    bench, (liar, honest) = reducing(2)
    done(bench, liar, "f" * 32)
    done(bench, honest, "e" * 32)
    [replaced] = bench.records(TopologyReplaced)
    assert "a/0 and b/0 after round 1 differ, and none is that of most" in replaced.why
    assert bench.finish is None


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_word_of_an_outer_step_that_is_not_finite_ends_no_run(liars: int) -> None:
    """One is outvoted; where most say so, the gateway of a star takes the step and sees."""
    bench, sessions = reducing()
    for number, session in enumerate(sessions):
        failed(bench, session, "numerics") if number < liars else done(bench, session, "e" * 32)
    assert bench.finish is None
    assert len(bench.records(TopologyReplaced)) == (liars > 1)
    assert bool(bench.records(RoundClosed) or bench.controller.topology.busy) == (liars == 1)


def test_worker_whose_state_differs_often_is_banned() -> None:
    bench, sessions = reducing()
    for round_ in range(1, bench.policy.max_strikes + 1):
        for number, session in enumerate(sessions):
            attempt = [m_ for to, m_ in bench.sent if to == session and isinstance(m_, rm.Reduce)][-1]
            digest = "f" * 32 if number == 2 else "e" * 32
            bench.tell(e.Received(session, rm.ReduceDone(round=round_, attempt=attempt.attempt, digest=digest)))
        collect(bench, round_)
        for session in sessions if round_ < bench.policy.max_strikes else ():
            bench.tell(e.Received(session, result(bench, session, round=round_ + 1)))
    assert len(bench.records(DigestsDiffered)) == bench.policy.max_strikes
    assert [record.worker for record in bench.records(WorkerBanned)] == ["c/0"]


def collect(bench: Bench, round_: int) -> None:
    """Give the gateway the outer state, write the checkpoint and evaluate, until the next round has begun."""
    for session in [to for to, message in bench.sent if isinstance(message, rm.SendOuterState)][-1:]:
        bench.tell(e.Received(session, rm.RingState(version=round_, digest="e" * 32), "", 100 + round_))
    while bench.writes:
        bench.tell(e.CheckpointDone(bench.writes.pop().mark.round, "folder", 0.1))
    for _ in range(10):
        for worker in list(bench.controller.desk.workers.values()):
            if worker.evaluate is not None:
                flight, batches = worker.evaluate, bench.policy.held_out[worker.evaluate.chunk].batches
                loss = rm.EvalResult(task=flight.task, version=flight.version, loss=3.0, batches=batches)
                bench.tell(e.Received(worker.session, loss))


def test_outer_state_that_never_comes_has_a_deadline() -> None:
    bench, sessions = reducing()
    for session in sessions:
        done(bench, session, "e" * 32)
    [asked] = [to for to, message in bench.sent if isinstance(message, rm.SendOuterState)]
    bench.now += bench.policy.first_step_s
    bench.tell(e.Tick())
    assert "did not send its outer state" in bench.records(WorkerLost)[0].reason
    assert asked not in bench.controller.desk.workers
