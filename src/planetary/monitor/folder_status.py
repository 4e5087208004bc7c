"""A `RunStatus` from a run folder: the gateway's display, as far as the files tell. Pure.

The journal is folded as the gateway itself folds it when it resumes the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.fleet.protocol.metrics import RoundMetrics
from planetary.fleet.protocol.news import LastingNews
from planetary.fleet.protocol.progress import ended_as, with_progress, workers_of_fold
from planetary.fleet.protocol.records import RoundFinished, RunFinished, RunStarted
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import MOST_EVENTS, RunState, RunStatus, WorkerStatus
from planetary.machine.journal import Record, replay
from planetary.monitor.run_folder import RunHistory


def status_of(history: RunHistory) -> RunStatus:
    """Return the newest status the journal and the metrics of a run tell.

    Raises:
        UserError: a line of the journal is damaged, or cannot follow the lines before it.
    """
    metrics, reader = history.metrics, history.reader
    status = RunStatus(
        run=history.facts.run if history.facts else history.name,
        state="preparing",
        stage="starting",
        inner_steps=_inner_steps(history),
        bytes_up=sum(line.bytes_up for line in metrics),
        bytes_down=sum(line.bytes_down for line in metrics),
        bigram_loss=history.facts.bigram_loss if history.facts else None,
    )
    if reader is None:
        return status
    records = history.records
    fold: RunFold = replay(records, reader.fold(), "events.jsonl")
    ended = fold.ended
    state: RunState = ended_as(ended) or ("training" if fold.opened else "waiting")
    status = with_progress(status, fold, metrics, max(0, fold.rounds - fold.round))
    return msgspec.structs.replace(
        status,
        state=state,
        stage="waiting for workers" if state == "waiting" else "",
        round=max(fold.opened, fold.round),
        reducing=fold.reducing,
        started_at=fold.times.started,
        ended_at=None if ended is None else ended.t,
        seconds_left=status.seconds_left if ended is None else None,
        workers=tuple(_with_pace(worker, metrics) for worker in workers_of_fold(fold)),
        message=_message(records),
        own=reader.status_after(metrics),
        notes=_notes(records),
        events=_told(records),
        checkpoint_round=fold.checkpoint_round,
        checkpoint_at=fold.times.checkpoint,
        step=fold.step,
    )


def _message(records: Sequence[Record]) -> str:
    """Return the newest news; a finished round makes older ones old, and the good end of a run is none."""
    newest = next((record for record in reversed(records) if record.news), None)
    good = isinstance(newest, RunFinished) and newest.ok
    return "" if newest is None or good or isinstance(newest, RoundFinished) else newest.news


def _told(records: Sequence[Record]) -> tuple[tuple[float, str], ...]:
    """Return the newest events with the gateway's messages about them; rounds have their line of metrics."""
    told = [(record.t, record.news) for record in records if record.news and not isinstance(record, RoundFinished)]
    return tuple(told[-MOST_EVENTS:])


def _notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the lasting warnings, in the gateway's words."""
    lasting, told = LastingNews(), []
    for record in records:
        told += [*record.notes, lasting.of(record)] if isinstance(record, RunStarted) else [lasting.of(record)]
    return tuple(note for note in told if note)


def _with_pace(worker: WorkerStatus, metrics: Sequence[RoundMetrics]) -> WorkerStatus:
    """Add the speed from the newest line of metrics with a contribution of the worker."""
    for line in reversed(metrics):
        for own in line.contributions:
            if own.worker == worker.name and own.seconds is not None:
                steps = max(1, line.inner_steps)
                return msgspec.structs.replace(worker, step_s=own.seconds / steps, share=own.share)
    return worker


def _inner_steps(history: RunHistory) -> int:
    if history.facts:
        return history.facts.inner_steps
    return history.metrics[-1].inner_steps if history.metrics else 0
