"""The part of the state that every training has: rounds, losses, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.fleet.protocol.run_fold import RunFold
from planetary.machine.journal import Record
from planetary.runs.rounds.records import (
    CheckpointWritten,
    EvalFinished,
    RoundFinished,
    TrainingResumed,
    TrainingStarted,
)

DOUBTED_ROUNDS = 10  # newest rounds in which refused contributions add up


class NewestWork(msgspec.Struct):
    """The newest task and contribution of a worker.

    Attributes:
        round: of the task; 0: it had none.
        loss, transfer_s, version_lag: of the contribution; None: there is none.
        contributed_at: Unix time in seconds of that; None: there is none.
    """

    round: int = 0
    loss: float | None = None
    transfer_s: float | None = None
    version_lag: int | None = None
    contributed_at: float | None = None


class TrainingFold(RunFold):
    """Base of the state of a training.

    Attributes:
        rounds: planned rounds.
        round: the last finished one.
        counts: unit of numbers of tokens.
        tokens_total: target tokens of the finished rounds.
        opened: newest round that began since the run was started or resumed; 0: none.
        step: digest of the artifact that workers run.
        checkpoint_round: round of the newest checkpoint; 0: there is none.
        checkpoint_at: Unix time in seconds of that; 0 in a live run; None: there is none.
        evals: held-out loss, by version.
        train_losses: mean training loss, by round.
        newest: newest work of each worker that the kind of run tells of.
    """

    rounds: int = 0
    round: int = 0
    counts: str = "tokens"
    tokens_total: int = 0
    opened: int = 0
    step: str = ""
    checkpoint_round: int = 0
    checkpoint_at: float | None = None
    evals: dict[int, float] = msgspec.field(default_factory=dict)
    train_losses: dict[int, float] = msgspec.field(default_factory=dict)
    newest: dict[str, NewestWork] = msgspec.field(default_factory=dict)

    @property
    def reducing(self) -> int:
        """The round whose results are reduced while a later one is trained; 0: none."""
        return 0

    def slowness(self, worker: str) -> str:
        """Return why a worker is slower than the others; "": it is not."""
        return ""

    def apply(self, record: Record) -> None:
        super().apply(record)
        match record:
            case TrainingStarted() | TrainingResumed():
                self.rounds, self.opened = record.rounds, 0
                if isinstance(record, TrainingStarted):
                    self.step, self.counts = record.model, record.counts
            case RoundFinished():
                self.round, self.tokens_total = record.round, record.tokens_total
                self.train_losses[record.round] = record.loss
            case EvalFinished():
                self.evals[record.version] = record.loss
            case CheckpointWritten():
                self.checkpoint_round, self.checkpoint_at = record.round, record.t
            case _:
                pass


def refused_of_late(rounds: Sequence[int], reason: str) -> tuple[int, str]:
    """Return in how many rounds of late a worker's results were refused, and that in words.

    `rounds` has all rounds with a refusal, ascending, of which the last is for `reason`.
    """
    recent = [round_ for round_ in rounds if round_ > rounds[-1] - DOUBTED_ROUNDS]
    return len(recent), f"its results were refused in {len(recent)} rounds; the last time: {reason}"
