"""Contributions that are refused, and parameters that would have ruined a run: who pays for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from controller_bench import Bench

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import TaskAborted, WorkerLost
from planetary.machine.journal import replay
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.lease_ledger import LeaseLedger
from planetary.runs.rounds.records import (
    ContributionsJudged,
    DeltaAccepted,
    DeltaWithdrawn,
    EvalFinished,
    LeaseMark,
    RolledBack,
    RoundMerged,
    TrainingStarted,
)
from planetary.runs.rounds.state import ControllerState, contradiction
from planetary.sync.sanity import CAUTIOUS_RULE, MOST_RETREATS

LENGTH = 40
Loss = Callable[[str, int], float]  # (worker, version) -> held-out loss that it says


class Rounds(Bench):
    """Plays whole rounds: each worker's result, the outer step, the checkpoint, the evaluation."""

    def __init__(self, *names: str) -> None:
        super().__init__(len(names), rounds=LENGTH)
        self.names = {self.join(name): name for name in names}
        self.deltas_of: dict[str, list[float]] = {}  # of a worker whose deltas differ
        self.held_out: Loss = lambda worker, version: 5.0 - 0.05 * version

    @property
    def round(self) -> int:
        return self.controller.state.round

    def play(self, until: int) -> None:
        """Answer everything until a round is finished and evaluated, or the run goes back or ends."""
        for _ in range(200):
            if self.finish is not None or self.retreats():
                return
            if self.round >= until and until in self.controller.state.evals:
                return
            if not self.answer():
                raise AssertionError(f"nothing to do in round {self.round}")
        raise AssertionError(f"round {until} is never reached")

    def restored(self, round_: int) -> None:
        """The gateway is back at a round's parameters, as its checkpoint says."""
        trained = 0
        for record in self.records(RoundMerged):
            if record.round == round_:
                trained = record.tokens_total // self.policy.tokens_per_lease
        mark = LeaseMark(round_, trained * self.policy.tokens_per_lease, 10_000, LeaseLedger(next=trained))
        self.tell(e.ParametersRestored(mark, "d" * 64))

    def failed(self, name: str) -> None:
        """A worker's numbers became NaN in its task."""
        [session] = [session for session, of in self.names.items() if of == name]
        self.tell(
            e.Received(
                session,
                m.TaskFailed(task=self._training()[session], kind="numerics", reason="the loss became nan", step=1),
            )
        )

    def trains(self) -> set[str]:
        return {self.names[session] for session in self._training()}

    def lost(self) -> set[str]:
        return {record.worker.removesuffix("/0") for record in self.records(WorkerLost)}

    def state(self) -> ControllerState:
        """What the journal alone says."""
        started = TrainingStarted(run="sim", rounds=LENGTH, config_hash="c", model="m", params=8)
        return replay([started, *self.journal], ControllerState())

    def retreats(self) -> bool:
        return self.controller.guard.retreat is not None

    def _training(self) -> Mapping[int, int]:
        workers = self.controller.desk.workers.values()
        return {worker.session: worker.train.task for worker in workers if worker.train is not None}

    def answer(self) -> bool:
        for worker in list(self.controller.desk.workers.values()):
            if worker.evaluate is not None:
                flight, name = worker.evaluate, self.names[worker.session]
                loss = self.held_out(name, flight.version)
                batches = self.policy.held_out[flight.chunk].batches
                said: m.Message = rm.EvalResult(task=flight.task, version=flight.version, loss=loss, batches=batches)
                if math.isnan(loss):
                    said = m.TaskFailed(task=flight.task, kind="numerics", reason="the held-out loss is nan")
                self.tell(e.Received(worker.session, said))
                return True
        if self.writes:
            self.tell(e.CheckpointDone(self.writes.pop().mark.round, "folder", 0.1))
            return True
        if self.steps and self.steps[-1].round > self.round:
            self.tell(e.OuterStepDone(self.steps.pop().round, 1.0))
            return True
        for session, task in self._training().items():
            name = self.names[session]
            self.deltas[task] = self.deltas_of.get(name, [1.0, 0.0])
            result = rm.TrainResult(
                task=task,
                round=self.round + 1,
                steps=self.policy.inner_steps,
                tokens=self.policy.tokens_per_lease,
                loss=3.0,
                grad_norm=0.5,
                seconds=0.1,
            )
            self.tell(e.Received(session, result, "", task))
            return True
        due = self.controller.next_deadline()
        assert due is not None
        self.now = max(self.now, due)
        self.tell(e.Tick())
        return True


def test_refused_results_do_not_count_and_others_end_the_round() -> None:
    bench = Rounds("a", "b", "c", "liar")
    bench.deltas_of["liar"] = [1e6, 0.0]
    bench.play(1)
    [judged] = bench.records(ContributionsJudged)
    assert [measure.worker for measure in judged.measures if measure.refused] == ["liar/0"]
    [withdrawn] = bench.records(DeltaWithdrawn)
    assert "times as long" in withdrawn.reason
    [finished] = bench.records(RoundMerged)
    assert finished.loss == 3.0
    assert contradiction(bench.state()) == ""
    assert bench.state().refusals == {"liar/0": [1]}


def test_who_is_refused_in_three_rounds_is_not_used_any_more() -> None:
    bench = Rounds("a", "b", "c", "liar")
    bench.deltas_of["liar"] = [-1.0, 0.0]
    bench.play(6)
    assert bench.lost() == {"liar"}
    assert len(bench.records(DeltaWithdrawn)) == bench.policy.max_strikes
    [reason] = [r.reason for r in bench.records(WorkerLost)]
    assert "its results were refused in 3 rounds" in reason
    assert "cosine" in reason


def test_single_refusal_costs_only_the_refused_work() -> None:
    bench = Rounds("a", "b", "c")
    bench.deltas_of["c"] = [-1.0, 0.0]
    bench.play(1)
    del bench.deltas_of["c"]
    bench.play(4)
    assert bench.lost() == set()
    counted = [r for r in bench.records(DeltaAccepted) if r.worker == "c/0"]
    assert len(counted) >= 4


def test_ruinous_round_is_taken_back_and_the_next_are_cautious() -> None:
    """A round with a ruinous loss is taken back and the next ones are cautious."""
    bench = Rounds("a", "b")
    bench.held_out = lambda worker, version: 50.0 if version == 3 else 5.0 - 0.05 * version
    bench.play(4)
    assert [restore.newest for restore in bench.restores] == [2]
    assert bench.round >= 3
    bench.restored(2)
    [back] = bench.records(RolledBack)
    assert (back.mark.round, back.bad) == (2, 3)
    assert "the held-out loss of round 3 is 50, it was" in back.reason
    assert bench.lost() == set()
    bench.held_out = lambda worker, version: 5.0 - 0.05 * version
    bench.play(4)
    assert [r.rule for r in bench.records(ContributionsJudged) if r.round == 3] == ["mean", CAUTIOUS_RULE]
    assert contradiction(bench.state()) == ""


def test_the_last_round_is_taken_back_like_any_other() -> None:
    bench = Rounds("a")
    bench.held_out = lambda worker, version: 50.0 if version == LENGTH else 5.0 - 0.05 * version
    bench.play(LENGTH)
    assert bench.finish is None
    bench.tell(e.Tick())
    assert bench.finish is None
    bench.restored(LENGTH - 1)
    bench.held_out = lambda worker, version: 3.0
    while bench.finish is None:
        assert bench.answer()
    assert (bench.finish.ok, bench.finish.kind) == (True, "done")
    assert [r.round for r in bench.records(RoundMerged)][-2:] == [LENGTH, LENGTH]


def test_nan_that_follows_from_the_parameters_is_nobodys_fault() -> None:
    """Training from version 2, and its evaluation, give NaN."""
    bench = Rounds("a", "b")
    bench.play(1)
    bench.held_out = lambda worker, version: math.nan if version == 2 else 4.9
    while not bench.retreats():
        for name in sorted(bench.trains() if bench.round == 2 else ()):
            if not bench.retreats():
                bench.failed(name)
        assert bench.retreats() or bench.answer()
    assert {r.kind for r in bench.records(TaskAborted)} == {"numerics"}
    assert bench.lost() == set()
    assert [restore.newest for restore in bench.restores] == [1]
    bench.restored(1)
    assert bench.records(RolledBack)[0].bad == 2
    assert "every worker that begins from the parameters of round 2 gets NaN" in bench.records(RolledBack)[0].reason
    bench.held_out = lambda worker, version: 4.8
    bench.play(3)
    assert bench.lost() == set()


def test_lone_nan_waits_until_others_show_the_fault() -> None:
    """Who alone gets NaN waits until others have shown whose fault it is."""
    bench = Rounds("a", "b", "c")
    bench.play(2)
    bench.held_out = lambda worker, version: 4.9
    failures: dict[int, int] = {}  # round -> how often it was given work and failed
    while "a" not in bench.lost():
        if "a" in bench.trains() and bench.round >= 2:
            failures[bench.round] = failures.get(bench.round, 0) + 1
            bench.failed("a")
        else:
            assert bench.answer()
    assert sum(failures.values()) <= 2 * bench.policy.max_strikes
    assert len(bench.records(TaskAborted)) == sum(failures.values())
    [reason] = [r.reason for r in bench.records(WorkerLost)]
    assert "3 failed tasks in a row" in reason
    assert bench.restores == []


def test_nan_after_a_known_loss_is_the_workers_own() -> None:
    bench = Rounds("a", "b", "c")
    bench.play(2)
    for _ in range(bench.policy.max_strikes):
        for _ in range(50):
            if "a" in bench.trains():
                break
            assert bench.answer()
        bench.failed("a")
    assert bench.lost() == {"a"}
    assert bench.restores == []


def test_run_with_the_same_end_every_time_stops_with_the_reason() -> None:
    bench = Rounds("a", "b")
    bench.held_out = lambda worker, version: 5.0 if version < 2 else 9.0 * version
    for _ in range(MOST_RETREATS):
        bench.play(10)
        assert bench.retreats()
        bench.restored(1)
    bench.play(20)
    assert bench.finish is not None
    assert (bench.finish.ok, bench.finish.kind) == (False, "numerics")
    assert f"though the run went back {MOST_RETREATS} times" in bench.finish.reason
    assert "learning_rate is too high" in bench.finish.reason


def test_the_gateway_that_cannot_go_back_ends_the_run() -> None:
    bench = Rounds("a")
    bench.held_out = lambda worker, version: 5.0 if version < 2 else 90.0
    bench.play(10)
    bench.tell(e.RestoreFailed("removing the checkpoints after round 1 failed: Input/output error"))
    assert bench.finish is not None
    assert bench.finish.kind == "resource"
    assert "Input/output error" in bench.finish.reason


def test_false_held_out_loss_is_found_by_others() -> None:
    """A false held-out loss is found out by others and the run does not go back."""
    bench = Rounds("a", "b", "c", "liar")
    bench.held_out = lambda worker, version: 500.0 if worker == "liar" else 5.0 - 0.05 * version
    bench.play(12)
    assert bench.restores == []
    assert all(record.loss <= 5.0 for record in bench.records(EvalFinished))
    assert {name for record in bench.records(EvalFinished) for name in record.wrong} == {"liar/0"}
    assert bench.lost() == {"liar"}
    assert bench.state().refusals.keys() == {"liar/0"}


def test_best_checkpoint_is_kept_and_the_rise_is_reported() -> None:
    """The checkpoint of the best loss is kept and the last line says that it rose."""
    bench = Rounds("a")
    bench.held_out = lambda worker, version: 4.0 if version == 5 else 4.5
    bench.play(8)
    while not bench.writes:
        assert bench.answer()
    assert 5 in bench.writes[-1].protected
    bench.play(LENGTH)
    while bench.finish is None:
        assert bench.answer()
    assert bench.finish.ok
    assert "the held-out loss ended at 4.5000, it was 4.0000 after round 5" in bench.finish.reason
