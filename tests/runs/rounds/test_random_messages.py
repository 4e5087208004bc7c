"""Whatever valid messages come, in whatever order, no machine raises: its process would end."""

from __future__ import annotations

import pytest
from controller_bench import Bench
from small_training import small_policy

from message_fuzz import RandomMessages, bombard
from planetary.fleet.controller.membership import Membership
from planetary.fleet.protocol import messages as m
from planetary.machine.events import Received
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker.lease_machine import LeaseMachine
from planetary.wire.message import Message

FROM_WORKERS = (
    *(m.Hello, m.WorkerStarted, m.WorkerExited, m.FetchBlob, rm.Ready, rm.RingState, rm.ReduceDone, rm.ReduceFailed),
    *(
        rm.Progress,
        rm.Progress,
        rm.TrainResult,
        rm.TrainResult,
        rm.TrainResult,
        rm.EvalResult,
        rm.EvalResult,
        m.TaskFailed,
    ),
    *(rm.Parameters, rm.TrainTask, rm.CountIn, m.Shutdown),
)
TO_WORKERS = (
    *(rm.TrainTask, rm.TrainTask, rm.EvalTask, rm.EvalTask, rm.Parameters, rm.Parameters, rm.CountIn, rm.CancelTask),
    *(rm.FinishTask, rm.RingState, rm.SendOuterState, rm.Reduce),
)
FLOAT32 = ("sync.compression=float32",)
MODES = {
    "star": (),
    "eager": ("sync.overlap=eager", *FLOAT32),
    "streaming": ("sync.overlap=streaming",),
    "decoupled": ("sync.overlap=decoupled", *FLOAT32),
    "measured": ("fabric.leases=measured",),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_patient", [False, True], ids=["banning", "patient"])
def test_no_message_of_a_worker_ends_the_gateway(mode: str, is_patient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random messages beside sound results, so that rounds go on; `is_patient`: nobody is banned for them."""
    if is_patient:
        monkeypatch.setattr(Membership, "violated", lambda *_: "")
    bench = Bench(workers=3, given=MODES[mode], rounds=6)
    sessions = [bench.join(name) for name in "abc"]
    tasks = [bench.task_of(session) for session in sessions]
    policy, workers = bench.policy, bench.controller.desk.workers
    source = RandomMessages(1, [*tasks, policy.inner_steps, policy.tokens_per_lease, 1 << 40], ["a/0", "b/0"])
    draw = source.random

    def tell(message: Message) -> None:
        while len(workers) < 3 and bench.finish is None:
            bench.join(f"late-{draw.randrange(10**9)}")
        session = draw.choice([*workers, 99])
        train = workers[session].train if session in workers else None
        if isinstance(message, rm.TrainResult) and train is not None and draw.random() < 0.4:
            message = rm.TrainResult(
                payload=bench.controller.topology.result,
                task=train.task,
                round=train.known_round,
                steps=train.steps,
                tokens=policy.tokens_per_lease * train.steps // policy.length.lease_steps,
                loss=2.0,
                grad_norm=1.0,
                seconds=1.0,
            )
        if draw.random() < 0.3:
            bench.tell(e.PayloadArrives(session, message))
        bench.tell(e.Received(session, message, draw.choice(("", "", "", "it is bad")), draw.randrange(1, 1000)))
        bench.controller.validate()
        while bench.steps:
            bench.tell(e.OuterStepDone(bench.steps.pop(0).round, 1.0))
        while bench.writes:
            bench.writes.pop()
            bench.tell(e.CheckpointDone(bench.controller.state.round + 1, "round", 0.1))
        if draw.random() < 0.1:
            bench.now += 30.0
            bench.tell(e.Tick())

    bombard(tell, FROM_WORKERS, source, 250)


def test_no_message_of_a_gateway_ends_a_worker() -> None:
    machine = LeaseMachine(rm.Ready(artifact="a" * 64, opt_state_round=0), progress_every_s=1.0)
    machine.connected(1, small_policy(rounds=3, workers=2).job("a" * 64, ""))
    bombard(lambda message: machine.handle(Received(1, message), 1.0), TO_WORKERS, RandomMessages(1), 500)


def test_a_token_that_nobody_checked_may_be_anything() -> None:
    """A gateway without TLS looks at no token."""
    bench = Bench()
    session = bench.connect("n", token="no token at all")
    assert any(to == session and isinstance(message, m.Welcome) for to, message in bench.sent)
