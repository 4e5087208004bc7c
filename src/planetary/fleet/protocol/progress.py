"""A run's progress as every display gets it: from the fold of the journal and the metrics of the rounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.fleet.protocol.metrics import RoundMetrics, figures_of
from planetary.fleet.protocol.records import RunFinished
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import RunState, RunStatus, WorkerState, WorkerStatus

_ROUNDS_FOR_SPEED = 3  # the duration of the newest rounds predicts that of the next


def with_progress(status: RunStatus, fold: RunFold, metrics: Sequence[RoundMetrics], left: int) -> RunStatus:
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
        tokens_total=fold.tokens_total,
        tokens_per_s=sum(line.tokens for line in recent) / seconds if seconds else 0.0,
        seconds_left=left * seconds / len(recent) if recent else None,
    )


def ended_as(ended: RunFinished | None) -> RunState | None:
    """Return how a run ended, in the display's word; None while it goes on."""
    if ended is None:
        return None
    return "finished" if ended.ok else "stopped" if ended.kind == "stopped" else "failed"


def workers_of_fold(fold: RunFold) -> tuple[WorkerStatus, ...]:
    """Return every worker that the journal knows, by name, without inner steps, which are not journaled."""
    found = []
    for name, worker in sorted(fold.workers.items()):
        state: WorkerState = worker.went or ("training" if name in fold.busy else "ready")
        found.append(
            WorkerStatus(
                name=name,
                node=worker.node,
                pid=worker.pid,
                state="stopped" if fold.ended is not None else state,
                backend=worker.backend,
                target=worker.target,
                device=worker.device,
                chosen=worker.chosen,
                verified=worker.verified,
                address=worker.address,
                round=worker.round,
                loss=worker.loss,
                lost_count=fold.losses.get(name, 0),
                last_contribution_at=worker.contributed_at,
                transfer_s=worker.transfer_s,
                version_lag=worker.version_lag,
                slow=fold.slowness(name),
            )
        )
    return tuple(found)
