"""A run that no worker can train, or that cannot be saved, always ends, with a kind and a reason."""

from __future__ import annotations

import pytest
from controller_bench import ROUNDS, Bench
from small_training import small_training

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import RunFinished, TaskAborted, WorkerLost, WorkerRefused
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.records import CheckpointFailed, CheckpointWritten, RoundMerged, RoundStarted, RunPaused
from planetary.simulation.rounds.cluster import SimCluster


@pytest.mark.parametrize(
    ("reported", "kind"), [("numerics", "numerics"), ("data", "data"), ("resource", "resource"), ("internal", "peer")]
)
def test_run_ends_with_the_last_failure_of_all_workers(reported: str, kind: str) -> None:
    bench = Bench(workers=2)
    sessions = [bench.join("a"), bench.join("b")]
    while bench.finish is None:
        for session in sessions:
            reason = "the loss became nan at inner step 2 of 4"
            failed = m.TaskFailed(task=bench.task_of(session), kind=reported, reason=reason, step=2)  # type: ignore[arg-type]
            bench.tell(e.Received(session, failed))
        assert len(bench.records(TaskAborted)) <= 2 * bench.policy.max_strikes
    assert (bench.finish.ok, bench.finish.kind) == (False, kind)
    assert "no usable worker is left" in bench.finish.reason
    assert "at inner step 2 of 4" in bench.finish.reason
    assert {(r.worker, r.step) for r in bench.records(TaskAborted)} == {("a/0", 2), ("b/0", 2)}
    assert {to for to, message in bench.sent if isinstance(message, m.Shutdown)} == set(sessions)
    assert bench.records(RunFinished)[0].kind == kind
    assert [message.ok for _, message in bench.sent if isinstance(message, m.Shutdown)] == [False, False]


def test_unsendable_message_ends_the_run() -> None:
    bench = Bench()
    for _ in range(bench.policy.max_strikes):
        assert bench.finish is None
        bench.tell(e.SendFailed(bench.join("a"), "cannot read the token file train.u8: No such file or directory"))
    assert bench.finish is not None
    assert (bench.finish.ok, bench.finish.kind) == (False, "data")
    assert "the data of a/0 cannot be sent: cannot read the token file train.u8" in bench.finish.reason
    assert len(bench.records(WorkerLost)) == bench.policy.max_strikes


def test_one_message_that_cannot_be_sent_is_no_reason_to_end() -> None:
    bench = Bench()
    bench.tell(e.SendFailed(bench.join("a"), "reading failed: Input/output error"))
    session = bench.join("a")
    assert bench.task_of(session) > 0
    assert bench.finish is None


UNKNOWN = e.CompileFailed("cpu", "host", "", "unknown cuda target 'sm_91'")


def test_uncompilable_first_worker_is_refused_and_others_train() -> None:
    """A first worker whose target cannot be compiled is refused and the others train."""
    bench = Bench()
    first = bench.connect("odd")
    bench.tell(UNKNOWN)
    (refused,) = bench.records(WorkerRefused)
    assert refused.worker == "odd/0"
    assert "unknown cuda target 'sm_91'" in refused.reason
    assert (first, m.Shutdown(reason=refused.reason, ok=False, kind="compile")) in bench.sent
    bench.tell(e.Closed(first, "the connection ended"))
    assert bench.finish is None
    assert bench.controller.stalls.why == "waiting for a worker that can train: odd/0 cannot"
    session = bench.join("good")
    assert len(bench.records(RoundStarted)) == 1
    assert bench.task_of(session) > 0


def test_untrainable_run_ends_at_its_deadline_with_a_reason() -> None:
    bench = Bench()
    session = bench.connect("odd")
    bench.tell(UNKNOWN)
    bench.tell(e.Closed(session, "the connection ended"))
    bench.now += bench.policy.abandon_after_s - 1.0
    bench.tell(e.Tick())
    assert bench.finish is None
    bench.now += 1.0
    bench.tell(e.Tick())
    assert bench.finish is not None
    assert (bench.finish.ok, bench.finish.kind) == (False, "deserted")
    assert "no worker was connected for 120 s; the last failure: " in bench.finish.reason
    assert "unknown cuda target 'sm_91'" in bench.finish.reason


def test_uncompilable_local_run_ends_at_once() -> None:
    bench = Bench(local=True)
    bench.join("a")
    bench.tell(UNKNOWN)
    assert bench.finish is not None
    assert bench.finish.kind == "compile"
    assert "unknown cuda target 'sm_91'" in bench.finish.reason


def test_wrong_device_takes_no_part_and_others_go_on() -> None:
    bench = Bench(workers=2)
    wrong = bench.connect("wrong")
    bench.join("right")
    assert not bench.records(RoundStarted), "the first round waits for both"
    bench.tell(e.Received(wrong, m.DeviceRefused(artifact="a" * 64, reason="'head' is off")))
    assert [(r.worker, r.reason) for r in bench.records(WorkerRefused)] == [("wrong/0", "'head' is off")]
    assert (wrong, m.Shutdown(reason="'head' is off", ok=False, kind="compile")) in bench.sent
    assert bench.finish is None
    assert len(bench.records(RoundStarted)) == 1
    again = bench.connect("wrong")
    assert any(to == again and isinstance(msg, m.Refused) and "'head' is off" in msg.reason for to, msg in bench.sent)


def test_a_run_whose_only_device_is_wrong_fails_with_the_reason() -> None:
    bench = Bench(local=True)
    bench.tell(e.Received(bench.connect("wrong"), m.DeviceRefused(artifact="a" * 64, reason="'head' is off")))
    assert bench.finish is not None
    assert (bench.finish.ok, bench.finish.kind) == (False, "compile")
    assert "'head' is off" in bench.finish.reason


def test_a_backend_that_is_only_tried_may_be_wrong() -> None:
    bench = Bench()
    tried = bench.connect("n", trial=True)
    bench.tell(e.Received(tried, m.DeviceRefused(artifact="a" * 64, reason="'head' is off")))
    assert [r.reason for r in bench.records(WorkerRefused)] == ["'head' is off"]
    assert bench.finish is None, "the machine goes on with another backend"
    assert bench.task_of(bench.join("n")) > 0


def test_full_disk_at_the_last_checkpoint_is_no_success() -> None:
    """A disk that stays full when the last checkpoint is due is no success."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=2, checkpoint_every=ROUNDS), 2)
    cluster.disk.full = 10**9
    assert cluster.run(600.0), "hangs"
    journal = cluster.journal
    assert [r.round for r in journal if isinstance(r, RoundMerged)] == [1, 2, 3]
    tries = [r.round for r in journal if isinstance(r, CheckpointFailed)]
    assert tries == [3] * cluster.policy.last_checkpoint_tries
    end = journal[-1]
    assert isinstance(end, RunFinished)
    assert (end.ok, end.kind, cluster.controller.state.round) == (False, "resource", 3)
    assert "could not be kept; round 0 is the newest that is: writing the checkpoint of round 3" in end.reason
    assert "No space left on device" in end.reason


def test_room_that_comes_back_saves_the_last_round() -> None:
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=2, checkpoint_every=ROUNDS), 2)
    cluster.disk.full = cluster.policy.last_checkpoint_tries - 1
    assert cluster.run(600.0), "hangs"
    journal = cluster.journal
    assert [r.round for r in journal if isinstance(r, CheckpointWritten)] == [3]
    end = journal[-1]
    assert isinstance(end, RunFinished)
    assert (end.ok, end.kind) == (True, "done")
    assert [r.durable for r in journal if isinstance(r, RoundMerged)] == [False, False, True]


@pytest.mark.parametrize("mode", [{}, {"ring": True}, {"overlap": True}], ids=["star", "ring", "overlap"])
def test_run_pauses_when_the_next_checkpoint_fails_too(mode: dict[str, bool]) -> None:
    """It waits as long as it must, loses no round, and goes on by itself when there is room."""
    cluster = SimCluster(0, small_training(rounds=6, workers=2, **mode), 2)
    stalls, paused_s = set(), 120.0

    def follow() -> None:
        if cluster.gateway is None or cluster.gateway.controller is None:
            return
        paused = [r for r in cluster.gateway.notes if "pauses until there is room" in r]
        if paused and cluster.disk.full > 10**6:
            stalls.add(cluster.gateway.status().message)
            if not stops:
                stops.append(cluster.world.now)
                cluster.world.after(paused_s, lambda: setattr(cluster.disk, "full", 0))

    stops: list[float] = []
    cluster.disk.full = 10**9
    assert cluster.run(600.0, follow), "hangs"
    journal = cluster.journal
    assert cluster.finished is not None
    assert cluster.finished.ok
    assert [r.round for r in journal if isinstance(r, CheckpointFailed)] == [1, 2]
    assert [r.round for r in journal if isinstance(r, RunPaused)] == [2]
    assert [r.round for r in journal if isinstance(r, CheckpointWritten)] == [2, 3, 4, 5, 6]
    [second] = [r for r in journal if isinstance(r, RoundMerged) and r.round == 2]
    assert second.t > stops[0] + paused_s
    assert any(text.startswith("the run waits until its checkpoint can be written: ") for text in stalls)
    assert cluster.gateway is not None
    assert "checkpoints are written again, beginning with that of round 2" in cluster.gateway.notes
    assert cluster.gateway.status().checkpoint_round == 6


def test_a_paused_run_can_be_stopped() -> None:
    cluster = SimCluster(0, small_training(rounds=6, workers=2), 2)

    def follow() -> None:
        gateway = cluster.gateway
        if gateway is not None and any("pauses until" in note for note in gateway.notes):
            gateway.stop("stopped by SIGTERM")

    cluster.disk.full = 10**9
    assert cluster.run(600.0, follow), "hangs"
    assert cluster.finished is not None
    assert cluster.finished.kind == "stopped"


def _until_a_checkpoint_is_being_written(bench: Bench) -> None:
    session = bench.join("a")
    result = rm.TrainResult(
        task=bench.task_of(session),
        round=1,
        steps=bench.policy.inner_steps,
        tokens=bench.policy.tokens_per_lease,
        loss=2.0,
        grad_norm=1.0,
        seconds=0.1,
    )
    bench.tell(e.Received(session, result, "", 1))
    bench.tell(e.OuterStepDone(1, 1.0))
    assert not bench.records(RoundMerged), "the checkpoint is still being written"


def test_stop_waits_for_the_checkpoint_under_way() -> None:
    """A stop waits for the checkpoint under way so that the journal names the same round."""
    bench = Bench()
    _until_a_checkpoint_is_being_written(bench)
    bench.tell(e.StopRequested("stopped by SIGTERM"))
    assert bench.finish is None
    bench.tell(e.CheckpointDone(1, "round-1", 0.1))
    assert bench.finish == e.Finish(False, "stopped by SIGTERM", "stopped")
    assert [r.round for r in bench.records(CheckpointWritten)] == [1]
    assert [(r.round, r.durable) for r in bench.records(RoundMerged)] == [(1, True)]
    assert (len(bench.records(RunFinished)), bench.controller.state.round) == (1, 1)


@pytest.mark.parametrize(
    ("local", "for_good", "goes_home"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_stopped_run_keeps_its_workers_for_a_resume(local: bool, for_good: bool, goes_home: bool) -> None:
    """Workers of other machines dial again, unless the run was cancelled; those of `planetary train` end with it."""
    bench = Bench(local=local)
    session = bench.join("a")
    before = len(bench.sent)
    bench.tell(e.StopRequested("stopped by SIGTERM", for_good))
    sent = [message for to, message in bench.sent[before:] if to == session]
    assert any(isinstance(message, m.Shutdown) for message in sent) is goes_home


def test_a_second_stop_does_not_wait() -> None:
    bench = Bench()
    _until_a_checkpoint_is_being_written(bench)
    bench.tell(e.StopRequested("stopped by SIGTERM"))
    bench.tell(e.StopRequested("stopped by SIGTERM"))
    assert bench.finish == e.Finish(False, "stopped by SIGTERM", "stopped")
    assert not bench.records(RoundMerged)


@pytest.mark.parametrize("name", ["a\n12:00:00 gateway INFO forged", "\x1b[2J", "a b", "x" * 200])
def test_workers_name_for_a_terminal_is_refused(name: str) -> None:
    bench = Bench()
    session = bench.connect(name)
    [refused] = [message for to, message in bench.sent if to == session]
    assert isinstance(refused, m.Refused)
    assert refused.code == "name"
    assert "choose another --node-name" in refused.reason
    assert bench.records(WorkerLost) == []
    assert not bench.controller.desk.workers
