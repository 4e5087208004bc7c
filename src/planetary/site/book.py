"""A book of jobs, of a site or a hub: the common part of a job, of the fold of a journal, and the journal's file.

A job is submitted, begins, may be asked to end, and ends. The states in between, and the events that lead to them, are
those of the book's own table.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.core.configuration.ranges import show_found
from planetary.core.errors import ConflictError, LocalProtocolError, UserError
from planetary.core.printable import FOLDER_RULE, is_folder_name
from planetary.machine.journal import Fold, Record, replay
from planetary.machine.state_table import Table, advance

StateT = TypeVar("StateT", bound=StrEnum)
RecordT = TypeVar("RecordT", bound=Record)

OVER = frozenset({"finished", "failed", "cancelled"})
CANCELLING = "cancelling"


class BookedJob(msgspec.Struct, Generic[StateT], kw_only=True):
    """The part of a job that every book has.

    Attributes:
        table: states and events.
        by: name of the token of the submission.
        reason: why it ended, is to end, or waits again.
        submitted_at, ended_at: Unix times in seconds.
    """

    table: ClassVar[Table]

    job: str
    kind: str  # kind of run
    config: str  # TOML
    state: StateT
    by: str = ""
    reason: str = ""
    submitted_at: float = 0.0
    ended_at: float | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in OVER

    def advance(self, event: str) -> None:
        """Take a step of the table."""
        self.state = type(self.state)(advance(self.table, self.state, event))

    def cancel(self, reason: str) -> None:
        """Begin to end, or end where nothing of it runs."""
        self.advance("cancel")
        self.reason = reason

    def end(self, event: str, reason: str) -> None:
        """End by an event. The reason of a job that was to end is that of the cancellation."""
        kept = self.reason if self.state == CANCELLING else ""
        self.advance(event)
        self.reason = kept or reason


JobT = TypeVar("JobT", bound=BookedJob[Any])


class Book(Generic[JobT]):
    """Jobs by name, in the order in which they were submitted. Only records change them."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobT] = {}

    def add(self, *jobs: JobT) -> None:
        """Add jobs. Raises `LocalProtocolError` for a name that was submitted before."""
        for one in jobs:
            if one.job in self.jobs:
                raise LocalProtocolError(f"the job {one.job} was submitted before")
        self.jobs |= {one.job: one for one in jobs}

    def job(self, name: str) -> JobT:
        """Return the job of a record. Raises `LocalProtocolError` when there is none of this name."""
        if name not in self.jobs:
            raise LocalProtocolError(f"no job {name} was submitted")
        return self.jobs[name]

    def of_state(self, *states: StrEnum) -> list[JobT]:
        """Return the jobs that are in one of these states."""
        return [job for job in self.jobs.values() if job.state in states]

    def named(self, name: str) -> JobT:
        """Return the job a user names. Raises `UserError` when there is none of this name."""
        if name not in self.jobs:
            raise UserError(f"there is no job {name!r}; there are: {', '.join(self.jobs) or 'none'}")
        return self.jobs[name]

    def require_cancellable(self, name: str) -> JobT:
        """Return a job. Raises `UserError` as `named`, and `ConflictError` where it is over or to end already."""
        job = self.named(name)
        if job.over or job.state == CANCELLING:
            raise ConflictError(f"the job {name} cannot be cancelled: it is {job.state}", code="job_over")
        return job


class Growth:
    """Wakes those who wait for more of a journal."""

    def __init__(self) -> None:
        self._grown = asyncio.Event()

    def wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `wake`, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._grown.wait()


class JournalFile(Growth, Generic[RecordT]):
    """The journal of a book, from whose records it is folded."""

    def __init__(
        self,
        path: Path | None,
        kinds: Any,
        book: Fold[RecordT],
        wall: Callable[[], float],
        *,
        files: DurableFiles = DISK,
        seen: Callable[[RecordT], RecordT] = lambda record: record,
    ) -> None:
        """Fold the records of a file, of the types `kinds`, into `book`; None: keep no file.

        `seen` is called with each record and returns it.

        Raises:
            UserError: the file is damaged.
            ResourceError: it cannot be opened.
        """
        super().__init__()
        self._book, self._wall = book, wall
        if path is not None and path.exists():
            replay(map(seen, read_json_lines(path, kinds, checksums=True)), book, path)
        self._writer = None if path is None else JsonLinesWriter(path, files, checksums=True)

    def append(self, record: RecordT) -> None:
        """Apply a record and keep it. Raises `LocalProtocolError` for one that cannot follow."""
        record = self._dated(record)
        self._book.apply(record)
        self._write(record)

    def show(self, record: RecordT) -> None:
        """Apply a record without keeping it, e.g. of a job that another journal has."""
        self._book.apply(self._dated(record))
        self.wake()

    def keep(self, record: RecordT) -> RecordT:
        """Keep a record that was applied; return it with the date."""
        record = self._dated(record)
        self._write(record)
        return record

    def _dated(self, record: RecordT) -> RecordT:
        return record if record.t else msgspec.structs.replace(record, t=self._wall())

    def _write(self, record: RecordT) -> None:
        if self._writer is not None:
            self._writer.append(record, durable=True)
        self.wake()

    def close(self) -> None:
        """Close the file; once more is fine."""
        if self._writer is not None:
            self._writer.close()


def require_folder_name(name: str, *, given: bool) -> None:
    """Raise `UserError` for a job's name that is not one of a folder; `given`: by the submission, not the run."""
    if not is_folder_name(name):
        key = "name" if given else "run.name"
        raise UserError(f"{key}: expected the name of one folder ({FOLDER_RULE}), found {show_found(name)}")


def free_name(name: str, is_taken: Callable[[str], bool], *, mark: str = "-") -> str:
    """Return a name, with a number behind `mark` where it is taken."""
    numbered = (f"{name}{mark}{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain((name,), numbered) if not is_taken(one))
