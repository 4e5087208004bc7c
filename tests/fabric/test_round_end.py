"""A gateway that dies between a checkpoint and the record of its round loses neither the round nor its metrics."""

from __future__ import annotations

import msgspec
from fault_schedules import LIMIT_S, ROUNDS, WORKERS

from planetary.fabric.records import AnyRecord, RoundClosed, RoundFinished, RoundStarted
from planetary.fabric.round_end import finished_by_checkpoint
from planetary.fabric.state import replay
from planetary.testing.cluster import SimCluster, policy


def journal_until_closed(round_: int) -> tuple[list[AnyRecord], RoundFinished]:
    """The journal of a calm run up to the closing of a round, and the round's real end."""
    cluster = SimCluster(0, policy(rounds=ROUNDS, workers=WORKERS), WORKERS)
    assert cluster.run(LIMIT_S)
    journal = cluster.disk.journal
    [closed] = [i for i, r in enumerate(journal) if isinstance(r, RoundClosed) and r.round == round_]
    [finished] = [r for r in journal if isinstance(r, RoundFinished) and r.round == round_]
    stamped = [msgspec.structs.replace(r, t=0.5 * i) for i, r in enumerate(journal[: closed + 1])]
    return stamped, finished


def test_the_checkpoint_ends_the_round_that_the_journal_leaves_open() -> None:
    journal, finished = journal_until_closed(3)
    state = replay(journal)
    late = finished_by_checkpoint(journal, state.open, state.tokens_total, 3)
    assert late is not None
    [start] = [r for r in journal if isinstance(r, RoundStarted) and r.round == 3]
    assert late.seconds == journal[-1].t - start.t
    same = msgspec.structs.replace(late, t=finished.t, seconds=finished.seconds, compute_fraction=0.0)
    assert same == msgspec.structs.replace(finished, compute_fraction=0.0)


def test_a_round_without_its_checkpoint_is_not_finished() -> None:
    journal, _ = journal_until_closed(3)
    state = replay(journal)
    assert finished_by_checkpoint(journal, state.open, state.tokens_total, 2) is None
    assert finished_by_checkpoint(journal, None, 0, 3) is None
    open_ = replay(journal[:-1])
    assert finished_by_checkpoint(journal[:-1], open_.open, open_.tokens_total, 3) is None
