"""What journals of all kinds of run tell is folded in one place; each kind adds its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from planetary.core.errors import LocalProtocolError
from planetary.fleet.protocol.records import RunFinished, WorkerJoined, WorkerLeft, WorkerLost
from planetary.machine.journal import Record, replay
from planetary.runs.mixture.records import MixtureState
from planetary.runs.rounds.fold import TrainingFold
from planetary.runs.rounds.records import (
    DeltaAccepted,
    EvalFinished,
    LeaseAssigned,
    LeaseStarted,
    RoundClosed,
    RoundFinished,
    RoundStarted,
    TrainingStarted,
)
from planetary.runs.rounds.state import ControllerState

STARTED = TrainingStarted(run="r", rounds=3, config_hash="", model="", params=0)
KINDS = [ControllerState, lambda: MixtureState(steps_per_round=4)]


def joined(worker: str) -> WorkerJoined:
    return WorkerJoined(worker=worker, pid=1, node="n", backend="iree", target="cpu")


def finished(round_: int, tokens_total: int) -> RoundFinished:
    return RoundFinished(
        round=round_,
        workers=1,
        tokens=40,
        tokens_total=tokens_total,
        loss=2.5,
        seconds=1.0,
        compute_fraction=1.0,
        durable=True,
    )


def a_round(tokens_total: int) -> list[Record]:
    lease: Any = {"round": 1, "lease": 0, "task": 1, "worker": "a", "pid": 1, "node": "n"}
    return [
        RoundStarted(round=1, version=0, workers=1),
        LeaseAssigned(**lease),
        LeaseStarted(**lease),
        DeltaAccepted(**lease, tokens=40, loss=2.5, seconds=1.0),
        RoundClosed(round=1, contributions=1, why=""),
        finished(1, tokens_total),
    ]


@pytest.mark.parametrize("make", KINDS)
def test_every_kind_folds_members_losses_evaluations_and_the_end(make: type[TrainingFold]) -> None:
    state = replay(
        [
            STARTED,
            joined("a"),
            joined("b"),
            joined("c"),
            WorkerLost(worker="b", reason="cut", node="n", pid=1),
            WorkerLeft(worker="c", reason="drained by lab", node="n", pid=2, kind="drained"),
            EvalFinished(version=0, loss=4.0, batches=1),
            RunFinished(ok=False, reason="stopped by SIGINT", kind="stopped"),
        ],
        make(),
    )
    assert (state.run, state.rounds) == ("r", 3)
    assert list(state.members) == ["a"]
    assert (state.losses, state.left) == ({"b": 1}, {"c": "drained"})
    assert state.evals == {0: 4.0}
    assert state.ended is not None
    assert state.ended.kind == "stopped"


def test_a_finished_round_counts_its_contributions() -> None:
    state = replay([STARTED, *a_round(40)], ControllerState())
    assert (state.round, state.version, state.tokens_total, state.durable_round) == (1, 1, 40, 1)
    assert state.train_losses == {1: 2.5}


def test_finished_round_with_foreign_tokens_is_refused() -> None:
    """A finished round with other tokens than its contributions is refused."""
    state = ControllerState()
    *before, last = a_round(50)
    replay([STARTED, *before], state)
    kept = msgspec.json.encode(state)
    with pytest.raises(LocalProtocolError, match="ended with 50 tokens of the run; its contributions have 40"):
        state.apply(last)
    assert msgspec.json.encode(state) == kept
