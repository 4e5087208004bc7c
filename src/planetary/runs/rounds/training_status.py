"""The status of a training, and how its files are read: of rounds, of reinforcement learning, of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from planetary.fleet.protocol.kind_reader import KindReader
from planetary.fleet.protocol.progress import ended_as, seen_worker
from planetary.fleet.protocol.status import Gauge, RunState, RunStatus, WorkerStatus
from planetary.runs.rounds.fold import NewestWork, TrainingFold
from planetary.runs.rounds.metrics import Figure, KindMetrics, KindPicture, KindReport, RoundMetrics, figures_of

_ROUNDS_FOR_SPEED = 3  # the duration of the newest rounds predicts that of the next


class TrainerStatus(WorkerStatus, frozen=True, kw_only=True):
    """One worker that trains."""

    round: int = 0  # round under work; 0: none yet
    step: int = 0  # finished inner steps of the task, or since the previous round's end
    loss: float | None = None  # loss of that inner step
    # Of the newest contribution; None before the first, and where the kind of run does not measure it
    last_contribution_at: float | None = None  # Unix time in seconds
    step_s: float | None = None  # seconds of an inner step
    transfer_s: float | None = None  # time for the parameters to leave the gateway, and for the result to arrive
    share: float | None = None  # fraction of the round's time in inner steps and transfers
    version_lag: int | None = None  # staleness of the parameters, in versions
    slow: str = ""  # why it is slower than the others; "": it is not


_OF_WORKERS = (
    ("round", "worker_round", "Round that the worker works on."),
    ("step", "worker_step", "Inner steps finished in the worker's task."),
    ("loss", "worker_loss", "Training loss of the worker's newest inner step, nats per token."),
    ("step_s", "worker_step_seconds", "Seconds of an inner step in the worker's newest contribution."),
    ("transfer_s", "worker_transfer_seconds", "Seconds of transfers of the worker's newest contribution."),
    ("share", "worker_round_share", "Part of its round that the newest contribution took."),
    ("version_lag", "worker_version_lag", "Versions that the worker's parameters are behind the newest."),
    ("last_contribution_at", "worker_last_contribution_timestamp_seconds", "Unix time of its newest contribution."),
)
"""Fields of `TrainerStatus` for Prometheus: field, name, meaning."""


class TrainingStatus(RunStatus, frozen=True, kw_only=True):
    """One training, as the gateway sees it."""

    kind: str = "rounds"
    round: int = 0  # the open round, or the last finished one when none is open; 1-based
    reducing: int = 0  # overlap: previous round during the reduction of its results; 0: none
    rounds: int = 0  # planned rounds; 0: the length of the run is not known yet
    rounds_finished: int = 0
    inner_steps: int = 0  # per round and worker
    loss: tuple[tuple[int, float], ...] = ()  # (round, training loss) of every finished round
    eval_loss: tuple[tuple[int, float], ...] = ()  # (round, held-out loss), where it was evaluated
    figures: tuple[Figure, ...] = ()  # figures of this kind of run beside losses, as rewards
    seconds_left: float | None = None
    workers: tuple[TrainerStatus, ...] = ()  # workers by name
    learning_rate: float | None = None  # learning rate of the inner optimizer at the start of the open round
    bigram_loss: float | None = None  # held-out, of a bigram model of the same tokens
    checkpoint_round: int = 0  # round of the newest checkpoint; 0: there is none
    checkpoint_at: float | None = None  # Unix time in seconds at which it was written; None: not known
    checkpoint_bytes: int | None = None  # size of one; None: not known
    disk_free: int | None = None  # bytes that were free after the newest was written; None: not known
    waiting_for: tuple[str, ...] = ()  # workers without whose results the open round does not go on
    waiting_since: float = 0.0  # Unix time in seconds: when the others were done
    step: str = ""  # sha256 of the training step in use; "": none is known
    roll_out: str = ""  # state of the last replacement step: "preparing", "verified", "in use", "refused"

    @property
    def progress(self) -> str:
        loss = f", loss {self.loss[-1][1]:.3f}" if self.loss else ""
        return f"round {self.rounds_finished} of {self.rounds}{loss}" if self.rounds else ""

    def gauges(self) -> Iterator[Gauge]:
        def one(name: str, text: str, value: float | None, *, counts: bool = False) -> Iterator[Gauge]:
            if value is not None:
                yield Gauge(name, text, (), {(): value}, counts)

        yield from one("rounds_planned", "Rounds that the run is to have.", self.rounds)
        yield from one("rounds_finished", "Finished rounds.", self.rounds_finished, counts=True)
        yield from one("loss", "Training loss of the last round, nats per token.", _last(self.loss))
        yield from one("eval_loss", "Held-out loss, nats per token.", _last(self.eval_loss))
        yield from one("waiting_for_workers", "Workers that the open round waits for.", len(self.waiting_for))
        yield from one("checkpoint_round", "Round of the newest checkpoint; 0: none.", self.checkpoint_round)
        written = "Unix time at which the newest checkpoint was written."
        yield from one("checkpoint_timestamp_seconds", written, self.checkpoint_at)
        yield from one("checkpoint_bytes", "Size of a checkpoint.", self.checkpoint_bytes)
        yield from one("disk_free_bytes", "Free on the gateway's disk after the last checkpoint.", self.disk_free)
        for field, name, text in _OF_WORKERS:
            values = {(worker.name,): getattr(worker, field) for worker in self.workers}
            yield Gauge(name, text, ("worker",), {key: value for key, value in values.items() if value is not None})
        slow = {(worker.name,): float(bool(worker.slow)) for worker in self.workers}
        yield Gauge("worker_slow", "1 for a worker that is slower than the others.", ("worker",), slow)


StatusT = TypeVar("StatusT", bound=TrainingStatus)


def _last(points: tuple[tuple[int, float], ...]) -> float | None:
    return points[-1][1] if points else None


def with_progress(status: StatusT, fold: TrainingFold, metrics: Sequence[RoundMetrics], left: int) -> StatusT:
    """Return a status with rounds, losses, tokens and speed; `left`: rounds that are expected."""
    recent = metrics[-_ROUNDS_FOR_SPEED:]
    seconds = sum(line.seconds for line in recent)
    return msgspec.structs.replace(
        status,
        rounds=fold.round + left,
        rounds_finished=fold.round,
        loss=tuple(sorted(fold.train_losses.items())),
        eval_loss=tuple(sorted(fold.evals.items())),
        figures=figures_of(metrics),
        counts=fold.counts,
        tokens_total=fold.tokens_total,
        tokens_per_s=sum(line.tokens for line in recent) / seconds if seconds else 0.0,
        seconds_left=left * seconds / len(recent) if recent else None,
    )


def status_of_files(
    fold: TrainingFold, metrics: Sequence[RoundMetrics], kind: str = "rounds", status: type[StatusT] = TrainingStatus
) -> StatusT:
    """Return the status as journal and metrics tell it."""
    state: RunState = ended_as(fold.ended) or ("training" if fold.opened else "waiting")
    stage = "waiting for workers" if state == "waiting" else ""
    left = max(0, fold.rounds - fold.round)
    seen = with_progress(status(kind=kind, run=fold.run, state=state, stage=stage), fold, metrics, left)
    return msgspec.structs.replace(
        seen,
        round=max(fold.opened, fold.round),
        reducing=fold.reducing,
        inner_steps=metrics[-1].inner_steps if metrics else 0,
        seconds_left=seen.seconds_left if fold.ended is None else None,
        bytes_up=sum(line.bytes_up for line in metrics),
        bytes_down=sum(line.bytes_down for line in metrics),
        workers=tuple(_trainer(fold, name, metrics) for name in sorted(fold.workers)),
        checkpoint_round=fold.checkpoint_round,
        checkpoint_at=fold.checkpoint_at,
        step=fold.step,
    )


def _trainer(fold: TrainingFold, name: str, metrics: Sequence[RoundMetrics]) -> TrainerStatus:
    """Return a worker of the journal, with the speed from the newest line of metrics that has a contribution of it."""
    work = fold.newest.get(name, NewestWork())
    seen = msgspec.structs.replace(
        seen_worker(fold, name, TrainerStatus),
        round=work.round,
        loss=work.loss,
        last_contribution_at=work.contributed_at,
        transfer_s=work.transfer_s,
        version_lag=work.version_lag,
        slow=fold.slowness(name),
    )
    for line in reversed(metrics):
        for own in line.contributions:
            if own.worker == name and own.seconds is not None:
                return msgspec.structs.replace(seen, step_s=own.seconds / max(1, line.inner_steps), share=own.share)
    return seen


def training_of(status: RunStatus) -> TrainingStatus:
    """Return the status with the fields of a training; those of a run without rounds are empty."""
    if isinstance(status, TrainingStatus):
        return status
    common: dict[str, Any] = {name: getattr(status, name) for name in RunStatus.__struct_fields__}
    common["workers"] = tuple(TrainerStatus(**msgspec.structs.asdict(worker)) for worker in status.workers)
    return TrainingStatus(**common)


FoldT_co = TypeVar("FoldT_co", bound=TrainingFold, covariant=True)


@dataclass(frozen=True, kw_only=True)
class TrainingReader(KindReader[FoldT_co]):
    """Knowledge of a kind of training that readers of a run's files need.

    Attributes:
        metrics: type of `RoundMetrics.own`; None: the kind has none.
        report_of: returns the kind's part of a report on these rounds; None: it has none.
        picture: of the kind's figures, in place of the losses.
    """

    metrics: type[KindMetrics] | None = None
    report_of: Callable[[Sequence[RoundMetrics]], KindReport | None] = lambda metrics: None
    picture: KindPicture | None = None
