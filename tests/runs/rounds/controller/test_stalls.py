"""A start is no stall while workers prepare; a wait that lasts after it is one, and is reported once."""

from __future__ import annotations

import math

import msgspec
import pytest
from controller_bench import Bench

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import Stalled
from planetary.runs.rounds import events as re
from planetary.runs.rounds import messages as rm


class SlowBench(Bench):
    """Its compiler answers when the test asks it to, and time passes by `wait`."""

    def compile(self, instruction: e.Compile) -> None:
        pass

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at every deadline of the controller."""
        end = self.now + seconds
        while (due := self.controller.next_deadline() or math.inf) <= end:
            self.now = max(self.now, due)
            self.tell(e.Tick())
        self.now = end
        self.tell(e.Tick())

    @property
    def startup_s(self) -> float:
        return self.policy.startup_grace_s

    @property
    def grace_s(self) -> float:
        return self.policy.round.grace_s


def test_a_slow_but_normal_start_is_no_stall() -> None:
    bench = SlowBench(workers=2)
    bench.wait(0.9 * bench.startup_s)  # until the processes have started
    first, second = bench.connect("a"), bench.connect("b")
    bench.wait(20 * bench.startup_s)  # compiling
    bench.tell(e.Compiled("cpu", "host", "", "a" * 64, 1, 1.0, "verified"))
    for session in (first, second):
        bench.wait(0.6 * bench.startup_s)  # loading
        bench.tell(e.Received(session, m.FetchBlob(digest="a" * 64)))
    bench.wait(0.6 * bench.startup_s)
    assert "to load the training step" in bench.controller.stalls.why
    for session in (first, second):
        bench.tell(e.Received(session, rm.Ready(artifact="a" * 64, opt_state_round=0)))
    assert bench.controller.state.open is not None
    assert bench.records(Stalled) == []


def test_gateway_without_workers_is_stalled_after_the_start() -> None:
    bench = SlowBench()
    bench.wait(bench.startup_s + 0.9 * bench.grace_s)
    assert bench.records(Stalled) == []
    bench.wait(100 * bench.grace_s)
    assert [record.why for record in bench.records(Stalled)] == ["waiting for a worker to connect"]


def test_a_worker_that_does_not_finish_loading_is_a_stall() -> None:
    bench = SlowBench()
    bench.connect("a")
    bench.tell(e.Compiled("cpu", "host", "", "a" * 64, 1, 1.0, "verified"))
    bench.wait(bench.startup_s + 0.9 * bench.grace_s)
    assert bench.records(Stalled) == []
    bench.wait(0.2 * bench.grace_s)
    assert [record.why for record in bench.records(Stalled)] == ["waiting for a/0 to load the training step"]


def test_grace_begins_when_the_last_preparing_worker_is_lost() -> None:
    bench = SlowBench()
    session = bench.connect("a")
    bench.wait(2 * bench.startup_s)
    bench.tell(e.Closed(session, "the connection broke"))
    assert bench.records(Stalled) == []
    bench.wait(0.9 * bench.grace_s)
    assert bench.records(Stalled) == []
    bench.wait(0.2 * bench.grace_s)
    assert [record.why for record in bench.records(Stalled)] == ["waiting for a worker to connect"]


def test_loss_of_all_ready_workers_stalls_after_the_grace() -> None:
    bench = SlowBench()
    session = bench.connect("a")
    bench.tell(e.Compiled("cpu", "host", "", "a" * 64, 1, 1.0, "verified"))
    bench.tell(e.Received(session, rm.Ready(artifact="a" * 64, opt_state_round=0)))
    bench.wait(2 * bench.startup_s)
    bench.tell(e.Closed(session, "the connection broke"))
    bench.wait(0.9 * bench.grace_s)
    assert bench.records(Stalled) == []
    bench.wait(2 * bench.grace_s)
    assert len(bench.records(Stalled)) == 1


def test_a_long_evaluation_has_time_for_its_batches() -> None:
    """Nothing is heard of an evaluation before its end, and it may be longer than the pause between two steps may."""
    bench = Bench()
    more = tuple(msgspec.structs.replace(one, set="notes", batches=300) for one in bench.policy.held_out)
    bench.policy = msgspec.structs.replace(
        bench.policy, held_out=(msgspec.structs.replace(bench.policy.held_out[0], more=more),)
    )
    bench.controller.desk.use_policy(bench.policy)
    [session] = [bench.join("slow")]
    worker, steps = bench.controller.desk.workers[session], bench.policy.inner_steps
    train = worker.train
    assert train is not None
    tokens = bench.policy.tokens_per_lease
    result = rm.TrainResult(
        task=train.task, round=1, steps=steps, tokens=tokens, loss=3.0, grad_norm=0.5, seconds=2.0 * steps
    )
    bench.now += 2.0 * steps
    bench.tell(e.Received(session, result, "", train.task))
    bench.tell(re.OuterStepDone(1, 1.0))
    bench.tell(re.CheckpointDone(1, "folder", 0.1))
    assert worker.evaluate is not None
    for number, message in bench.sent:
        if isinstance(message, rm.Parameters):
            bench.tell(e.PayloadSent(number, message))
    wait = bench.controller.training.leases.wait(worker)
    batches = bench.policy.held_out[0].batches + 300
    assert wait is not None
    assert wait.until - wait.since == pytest.approx((bench.policy.stall_steps + batches) * 2.0, rel=0.02)
