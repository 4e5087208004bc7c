"""A `RunStatus` from a run folder: the gateway's display, as far as the files tell. Pure.

The journal is folded as the gateway itself folds it when it resumes the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.fleet.protocol.records import RunFinished, RunStarted
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import MOST_EVENTS, RunStatus
from planetary.machine.journal import Record, replay
from planetary.monitor.run_folder import RunHistory
from planetary.runs.rounds.news import TrainingNews
from planetary.runs.rounds.training_status import TrainingStatus


def status_of(history: RunHistory) -> RunStatus:
    """Return the newest status the journal and the metrics of a run tell.

    Raises:
        UserError: a line of the journal is damaged, or cannot follow the lines before it.
    """
    facts, reader = history.facts, history.reader
    if reader is None:
        return RunStatus(run=facts.run if facts else history.name, state="preparing", stage="starting")
    records = history.records
    fold: RunFold = replay(records, reader.fold(), "events.jsonl")
    status = msgspec.structs.replace(
        reader.status_of_files(fold, history.metrics),
        started_at=fold.started,
        ended_at=None if fold.ended is None else fold.ended.t,
        message=_message(records),
        notes=_notes(records),
        events=_told(records),
    )
    if facts is None or not isinstance(status, TrainingStatus):
        return status
    return msgspec.structs.replace(status, inner_steps=facts.inner_steps, bigram_loss=facts.bigram_loss)


def _message(records: Sequence[Record]) -> str:
    """Return the newest news; a finished round makes older ones old, and the good end of a run is none."""
    newest = next((record for record in reversed(records) if record.news), None)
    good = isinstance(newest, RunFinished) and newest.ok
    return "" if newest is None or good or newest.outdates_news else newest.news


def _told(records: Sequence[Record]) -> tuple[tuple[float, str], ...]:
    """Return the newest events with the gateway's messages about them; rounds have their line of metrics."""
    told = [(record.t, record.news) for record in records if record.news and not record.outdates_news]
    return tuple(told[-MOST_EVENTS:])


def _notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the lasting warnings, in the gateway's words."""
    lasting, told = TrainingNews(), []
    for record in records:
        told += [*record.notes, lasting.of(record)] if isinstance(record, RunStarted) else [lasting.of(record)]
    return tuple(note for note in told if note)
