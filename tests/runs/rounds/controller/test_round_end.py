"""A gateway that dies between a checkpoint and the record of its round loses neither the round nor its metrics."""

from __future__ import annotations

import msgspec
import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS
from small_training import small_training

from planetary.core.errors import LocalProtocolError
from planetary.machine.journal import replay
from planetary.runs.rounds.controller.round_end import finished_by_checkpoint
from planetary.runs.rounds.metrics_file import unreported
from planetary.runs.rounds.records import RoundClosed, RoundMerged, RoundsRecord, RoundStarted
from planetary.runs.rounds.state import ControllerState
from planetary.simulation.rounds.cluster import SimCluster


def journal_until_closed(round_: int, *, overlap: bool = False) -> tuple[list[RoundsRecord], RoundMerged]:
    """The journal of a calm run up to the closing of a round, and the round's real end."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS, ring=overlap, overlap=overlap), WORKERS)
    assert cluster.run(LIMIT_S)
    journal = cluster.journal
    [closed] = [i for i, r in enumerate(journal) if isinstance(r, RoundClosed) and r.round == round_]
    [finished] = [r for r in journal if isinstance(r, RoundMerged) and r.round == round_]
    stamped = [msgspec.structs.replace(r, t=0.5 * i) for i, r in enumerate(journal[: closed + 1])]
    return stamped, finished


def test_checkpoint_ends_the_round_left_open_by_the_journal() -> None:
    journal, finished = journal_until_closed(3)
    state = replay(journal, ControllerState())
    late = finished_by_checkpoint(journal, state.open, state.tokens_total, 3)
    assert late is not None
    [start] = [r for r in journal if isinstance(r, RoundStarted) and r.round == 3]
    assert late.seconds == journal[-1].t - start.t
    assert finished.delta_norm is not None
    assert late.delta_norm is None  # only the gateway that took the step knew it
    for one in late.contributions:
        assert one.seconds is not None
        assert one.transfer_s is not None
        assert one.share == pytest.approx((one.seconds + one.transfer_s) / late.seconds)
    assert without_time(late) == msgspec.structs.replace(without_time(finished), delta_norm=None, merged=None)


def without_time(record: RoundMerged) -> RoundMerged:
    """The record without what follows from the time that the round took."""
    contributions = tuple(msgspec.structs.replace(one, share=None) for one in record.contributions)
    return msgspec.structs.replace(record, t=0.0, seconds=0.0, compute_fraction=0.0, contributions=contributions)


def test_overlapping_round_counts_from_the_previous_end() -> None:
    journal, finished = journal_until_closed(3, overlap=True)
    state = replay(journal, ControllerState())
    assert state.closing is not None
    assert state.open is not None
    assert (state.closing.round, state.open.round) == (3, 4)
    late = finished_by_checkpoint(journal, state.closing, state.tokens_total, 3)
    assert late is not None
    [before] = [r for r in journal if isinstance(r, RoundMerged) and r.round == 2]
    assert late.seconds == journal[-1].t - before.t
    assert (late.tokens_total, late.loss) == (finished.tokens_total, finished.loss)


def test_checkpoint_ignores_the_round_in_training() -> None:
    """A checkpoint remembers nothing of the round that is trained meanwhile."""
    journal, _ = journal_until_closed(3, overlap=True)
    state = replay(journal, ControllerState())
    assert state.open is not None
    under_way = sorted([*state.open.holders, *state.open.orphans, *(c.lease for c in state.open.contributions)])
    assert under_way
    mark = state.mark()
    assert mark.round == 3
    assert mark.ledger.held == []
    assert mark.ledger.returned == under_way
    assert state.ledger.trained >= mark.ledger.trained == 3 * WORKERS
    with pytest.raises(LocalProtocolError, match="round 5 cannot start"):
        state.apply(RoundStarted(round=5, version=2, workers=3))  # one reduction at a time
    with pytest.raises(LocalProtocolError, match="round 2 is not under way"):
        state.apply(RoundClosed(round=2, contributions=3, why=""))


def test_missing_lines_are_those_of_the_last_round_ends() -> None:
    """Lines that were not written are those of the last end of each round."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)
    assert cluster.run(LIMIT_S)
    lines = unreported(cluster.journal, {1, 3}, 4, 4)
    assert [line.round for line in lines] == [2, 4]
    wrong = [msgspec.structs.replace(r, loss=0.5) for r in cluster.journal if isinstance(r, RoundMerged)]
    assert unreported([*wrong, *cluster.journal], {1, 3}, 4, 4) == lines


def test_a_round_without_its_checkpoint_is_not_finished() -> None:
    journal, _ = journal_until_closed(3)
    state = replay(journal, ControllerState())
    assert finished_by_checkpoint(journal, state.open, state.tokens_total, 2) is None
    assert finished_by_checkpoint(journal, None, 0, 3) is None
    open_ = replay(journal[:-1], ControllerState())
    assert finished_by_checkpoint(journal[:-1], open_.open, open_.tokens_total, 3) is None
