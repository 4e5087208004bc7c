"""A worker that stands still while rounds are short: its queue has an end, and it is restarted in time."""

from __future__ import annotations

import msgspec
from controller_bench import Bench

from planetary.fleet.protocol.records import WorkerLost
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.records import LeaseReturned
from planetary.runs.rounds.sessions import MOST_UNANSWERED, Trainer

DEADLINE_S = 2.0


class ShortRounds(Bench):
    """Rounds that close after two seconds with one of two leases trained; nothing is evaluated."""

    def __init__(self) -> None:
        super().__init__(2, rounds=40)
        limits = msgspec.structs.replace(self.policy.round, quorum=1, deadline_s=DEADLINE_S)
        self.policy = msgspec.structs.replace(self.policy, round=limits, held_out=())
        self.controller.desk.use_policy(self.policy)
        self._left = 0  # messages whose payloads have left
        self.busy, self.still = self.join("busy"), self.join("still")

    def worker(self, session: int) -> Trainer | None:
        return self.controller.desk.workers.get(session)

    def play(self, until: int) -> None:
        """Let only the busy worker train."""
        while self.controller.state.round < until:
            self._send_payloads()
            train = self.controller.desk.workers[self.busy].train
            if self.writes:
                self.tell(e.CheckpointDone(self.writes.pop().mark.round, "folder", 0.1))
            elif self.steps and self.steps[-1].round > self.controller.state.round:
                self.tell(e.OuterStepDone(self.steps.pop().round, 1.0))
            elif train is not None:
                steps, tokens = self.policy.inner_steps, self.policy.tokens_per_lease
                result = rm.TrainResult(
                    task=train.task, round=train.round, steps=steps, tokens=tokens, loss=3.0, grad_norm=0.5, seconds=0.1
                )
                self.tell(e.Received(self.busy, result, "", train.task))
            else:
                due = self.controller.next_deadline()
                assert due is not None
                self.now = max(self.now, due)
                self.tell(e.Tick())
            self.controller.validate()

    def _send_payloads(self) -> None:
        """Let everything that is in flight leave the gateway."""
        while self._left < len(self.sent):
            session, message = self.sent[self._left]
            self._left += 1
            if isinstance(message, rm.Parameters):
                self.tell(e.PayloadSent(session, message))

    def versions_sent_to(self, session: int) -> int:
        return sum(isinstance(message, rm.Parameters) for to, message in self.sent if to == session)


def test_a_worker_without_a_sign_in_three_leases_connects_again() -> None:
    bench = ShortRounds()
    bench.play(8)
    [lost] = bench.records(WorkerLost)
    assert lost.worker == "still/0"
    assert lost.reason == "no sign of it in 3 leases in a row: it has to connect again"
    returned = [record for record in bench.records(LeaseReturned) if record.worker == "still/0"]
    assert len(returned) == MOST_UNANSWERED
    assert bench.versions_sent_to(bench.still) == MOST_UNANSWERED  # one for each of the leases


def test_any_report_is_a_sign_and_a_late_one_too() -> None:
    bench = ShortRounds()
    for round_ in range(1, 9):
        bench.play(round_)
        task = bench.task_of(bench.still)
        bench.tell(e.Received(bench.still, rm.Progress(task=task, round=round_, step=0, loss=3.0)))
    assert not bench.records(WorkerLost)


def test_silent_evaluator_gets_no_more_until_it_ends() -> None:
    """An unresponsive worker in an evaluation gets no more until that ends."""
    bench = ShortRounds()
    bench.play(1)
    still = bench.controller.desk.workers[bench.still]
    still.unanswered = MOST_UNANSWERED
    assert [worker.worker for worker in bench.controller.desk.ready_workers()] == ["busy/0"]
    bench.tell(e.Received(bench.still, rm.EvalResult(task=10**6, version=1, loss=3.0, batches=1)))
    assert [worker.worker for worker in bench.controller.desk.ready_workers()] == ["busy/0", "still/0"]


def test_silence_adds_up_until_the_process_is_restarted() -> None:
    """Time without a sign adds up over leases and connections until the process is restarted."""
    bench = ShortRounds()
    while not any("made no progress" in record.reason for record in bench.records(WorkerLost)):
        assert bench.controller.state.round < 20
        bench.play(bench.controller.state.round + 1)
        if bench.worker(bench.still) is None and "connect again" in bench.records(WorkerLost)[-1].reason:
            bench.still = bench.join("still")
    assert bench.policy.stall_floor_s <= bench.now < 2 * bench.policy.stall_floor_s
    assert len(bench.records(WorkerLost)) > 2
