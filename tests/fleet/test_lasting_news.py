from __future__ import annotations

from small_training import small_training

from planetary.fleet.protocol.records import RunFinished
from planetary.runs.rounds.lease_ledger import LeaseLedger
from planetary.runs.rounds.news import TrainingNews
from planetary.runs.rounds.records import (
    CheckpointFailed,
    CheckpointWritten,
    LeaseMark,
    RolledBack,
    RoundClosed,
    RunPaused,
)
from planetary.simulation.rounds.cluster import SimCluster

FULL = "writing failed: No space left on device"
END = RunFinished(ok=True, reason="all 9 rounds are done", kind="done")


def written(round_: int) -> CheckpointWritten:
    return CheckpointWritten(round=round_, path=f"round-{round_}", seconds=0.1)


def test_a_disk_that_is_full_is_told_once_until_there_is_room() -> None:
    news = TrainingNews()
    assert news.of(written(3)) == ""
    told = news.of(CheckpointFailed(round=4, reason=FULL))
    assert "the checkpoint of round 4 could not be written: writing failed: No space left" in told
    assert "the newest is of round 3" in told
    assert news.of(CheckpointFailed(round=5, reason=FULL)) == ""
    assert news.of(written(6)) == "checkpoints are written again, beginning with that of round 6"
    assert news.of(written(7)) == ""
    assert news.of(END) == ""
    assert "the newest is of round 7" in news.of(CheckpointFailed(round=8, reason=FULL))
    assert news.of(END) == "the last checkpoints could not be written: the newest is of round 7"


def test_a_run_that_pauses_says_so_and_for_what_it_waits() -> None:
    news = TrainingNews()
    news.of(written(3))
    news.of(CheckpointFailed(round=4, reason=FULL))
    told = news.of(RunPaused(round=5, reason=FULL))
    assert told.startswith("the checkpoint of round 5 could not be written either: writing failed: No space left")
    assert told.endswith("The run pauses until there is room; the newest is of round 3")
    assert news.of(written(5)) == "checkpoints are written again, beginning with that of round 5"


def test_without_any_checkpoint_it_says_so() -> None:
    assert news_of_first_failure().endswith("there is none yet")


def news_of_first_failure() -> str:
    return TrainingNews().of(CheckpointFailed(round=1, reason=FULL))


def test_only_going_back_from_damage_is_kept() -> None:
    """Going back from damage is kept and going back for a lost worker is not."""
    news, mark = TrainingNews(), LeaseMark(2, 100, 5, LeaseLedger())
    assert news.of(RolledBack(mark=mark, reason="every worker was lost")) == ""
    told = news.of(RolledBack(mark=mark, reason="the held-out loss of round 3 is 50, it was 4", bad=3))
    assert told == "the run went back to round 2: the held-out loss of round 3 is 50, it was 4"
    assert news.of(RoundClosed(round=3, contributions=1, why="")) == ""


def test_a_run_on_a_full_disk_says_so_in_its_notes() -> None:
    cluster = SimCluster(0, small_training(rounds=3, workers=2, checkpoint_every=3), 2)
    cluster.disk.full = 10**9
    assert cluster.run(600.0), "hangs"
    assert cluster.gateway is not None
    *_, first, last = [note for note in cluster.gateway.notes if "checkpoint" in note]
    assert "the checkpoint of round 3 could not be written" in first
    assert "No space left on device" in first
    assert last == "the last checkpoints could not be written: there is none yet"
