"""A run and its workers as the fold of a journal knows them, for every display. Pure."""

from __future__ import annotations

from typing import TypeVar

from planetary.fleet.protocol.records import RunFinished
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import RunState, RunStatus, WorkerState, WorkerStatus

WorkerT = TypeVar("WorkerT", bound=WorkerStatus)


def ended_as(ended: RunFinished | None) -> RunState | None:
    """Return how a run ended, in the display's word; None while it goes on."""
    if ended is None:
        return None
    return "finished" if ended.ok else "stopped" if ended.kind == "stopped" else "failed"


def seen_worker(fold: RunFold, name: str, status: type[WorkerT]) -> WorkerT:
    """Return a worker that the journal knows."""
    worker = fold.workers[name]
    state: WorkerState = worker.went or ("training" if name in fold.busy else "ready")
    return status(
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
        lost_count=fold.losses.get(name, 0),
    )


def status_of_journal(fold: RunFold) -> RunStatus:
    """Return the status as a journal tells it."""
    workers = tuple(seen_worker(fold, name, WorkerStatus) for name in sorted(fold.workers))
    ended = ended_as(fold.ended)
    return RunStatus(
        run=fold.run, state=ended or "waiting", stage="" if ended else "waiting for workers", workers=workers
    )
