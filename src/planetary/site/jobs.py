"""The jobs of a site, folded from the journal: submissions, their states, and moves of workers.

The state is the fold of the records, as of a run's journal; a site that is killed goes on from it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, TypeAlias

import msgspec

from planetary.core.errors import LocalProtocolError
from planetary.machine.journal import Record
from planetary.machine.state_table import Table
from planetary.site.book import Book, BookedJob

JOURNAL = "site.jsonl"
MOST_DEATHS = 2
"""A job is failed when the site has died so often in a row while it ran, and it got no further in between."""


class JobState(StrEnum):
    """Whether a job runs."""

    QUEUED = "queued"  # the job's controller has as many jobs as it runs at once
    RUNNING = "running"
    CANCELLING = "cancelling"  # it is to end; a checkpoint or round under way is finished first
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


JOB: Table = {
    (JobState.QUEUED, "start"): JobState.RUNNING,
    (JobState.QUEUED, "cancel"): JobState.CANCELLED,
    (JobState.QUEUED, "fail"): JobState.FAILED,
    (JobState.RUNNING, "start"): JobState.RUNNING,  # by a site started again
    (JobState.RUNNING, "cancel"): JobState.CANCELLING,
    (JobState.RUNNING, "finish"): JobState.FINISHED,
    (JobState.RUNNING, "fail"): JobState.FAILED,
    (JobState.CANCELLING, "finish"): JobState.CANCELLED,  # whatever it came to meanwhile
    (JobState.CANCELLING, "fail"): JobState.CANCELLED,
}


class HubAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The placement a job comes from."""

    hub: str  # identity
    job: str  # job name at the hub
    attempt: int


class JobSubmitted(Record, frozen=True, kw_only=True, tag="job_submitted"):
    """A job was accepted."""

    job: str  # unique in the site; name of the run's folder
    controller: str  # "training", "rl" or "inference"
    kind: str  # kind of run
    folder: str  # run folder
    config: str  # the resolved configuration, TOML
    priority: int
    by: str = ""  # name of the token
    resume: bool = False  # resumption of an existing run
    placed: HubAttempt | None = None  # None: it was submitted here


class JobStarted(Record, frozen=True, kw_only=True, tag="job_started"):
    """A job's run begins, or goes on.

    Attributes:
        progress: of the run at that moment, see `RunKind.progress`; -1: unknown.
    """

    job: str
    progress: int = -1


class SiteStopped(Record, frozen=True, kw_only=True, tag="site_stopped"):
    """The site ends in order. Without this record the site died with all runs."""

    reason: str = ""


class CancelRequested(Record, frozen=True, kw_only=True, tag="job_cancelled"):
    """A user requested the end of a job."""

    job: str
    by: str = ""
    reason: str = ""


class JobEnded(Record, frozen=True, kw_only=True, tag="job_ended"):
    """A job's run is over."""

    job: str
    ok: bool
    reason: str


class WorkerMoved(Record, frozen=True, kw_only=True, tag="worker_moved"):
    """A worker works for another run from now on."""

    worker: str
    source: str  # job; "": it was idle
    target: str  # job; "": it is idle
    why: str


class WorkerDrained(Record, frozen=True, kw_only=True, tag="worker_drained"):
    """A worker is kept from every run, until it is released."""

    worker: str
    by: str = ""


class WorkerReleased(Record, frozen=True, kw_only=True, tag="worker_released"):
    """A worker takes part again."""

    worker: str
    by: str = ""


class WorkerAssigned(Record, frozen=True, kw_only=True, tag="worker_assigned"):
    """A worker works for one controller only; "": for any."""

    worker: str
    controller: str
    by: str = ""


SiteRecord: TypeAlias = (
    JobSubmitted
    | JobStarted
    | SiteStopped
    | CancelRequested
    | JobEnded
    | WorkerMoved
    | WorkerDrained
    | WorkerReleased
    | WorkerAssigned
)


class Job(BookedJob[JobState], kw_only=True):
    """One job of a site."""

    table: ClassVar[Table] = JOB

    controller: str
    folder: str
    priority: int
    state: JobState = JobState.QUEUED
    started_at: float | None = None  # Unix time in seconds
    resume: bool = False
    placed: HubAttempt | None = None  # attempt of a hub
    progress: int = -1  # when it was started last, see `JobStarted`
    stopped: bool = False  # the site has stopped in order since then
    deaths: int = 0  # deaths of the site while it ran, in a row, without progress

    def deaths_with(self, progress: int) -> int:
        """Return `deaths` as they count when it is started again with such a progress."""
        if self.state is JobState.QUEUED or self.stopped or progress < 0 or progress > self.progress:
            return 0
        return self.deaths + 1


class JobBook(Book[Job]):
    """The fold of a site's journal.

    Attributes:
        drained: workers kept from every run.
        assigned: worker -> the only controller it works for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drained: set[str] = set()
        self.assigned: dict[str, str] = {}

    def apply(self, record: SiteRecord) -> None:
        match record:
            case JobSubmitted():
                self._submit(record)
            case JobStarted():
                job = self.job(record.job)
                job.deaths = job.deaths_with(record.progress)
                job.progress, job.stopped = record.progress, False
                job.advance("start")
                job.started_at = job.started_at or record.t
            case CancelRequested():
                job = self.job(record.job)
                job.cancel(record.reason)
                job.ended_at = record.t if job.over else None
            case JobEnded():
                job = self.job(record.job)
                job.end("finish" if record.ok else "fail", record.reason)
                job.ended_at = record.t
            case SiteStopped():
                for job in self.of_state(JobState.RUNNING):
                    job.stopped = True
            case WorkerDrained():
                self.drained.add(record.worker)
            case WorkerReleased():
                self.drained.discard(record.worker)
            case WorkerAssigned():
                self.assigned.pop(record.worker, None)
                if record.controller:
                    self.assigned[record.worker] = record.controller
            case WorkerMoved():
                pass  # for people

    def _submit(self, record: JobSubmitted) -> None:
        if (holder := self.holder_of(record.folder)) is not None:
            raise LocalProtocolError(f"the job {holder.job} has the run folder {record.folder}")
        job = Job(
            job=record.job,
            controller=record.controller,
            kind=record.kind,
            folder=record.folder,
            config=record.config,
            priority=record.priority,
            submitted_at=record.t,
            by=record.by,
            resume=record.resume,
            placed=record.placed,
        )
        self.add(job)

    def holder_of(self, folder: str) -> Job | None:
        """Return the job that runs, or is going to run, in a folder."""
        return next((job for job in self.jobs.values() if job.folder == folder and not job.over), None)

    def attempt_of(self, placed: HubAttempt) -> Job | None:
        """Return the job of an attempt of a hub."""
        return next((job for job in self.jobs.values() if job.placed == placed), None)

    def earlier_attempt_of(self, placed: HubAttempt) -> Job | None:
        """Return the newest job a hub had placed here before in an attempt that is over."""
        same = (job for job in reversed(self.jobs.values()) if job.placed is not None and job.over)
        return next(
            (job for job in same if job.placed and (job.placed.hub, job.placed.job) == (placed.hub, placed.job)), None
        )

    @property
    def hub(self) -> str:
        """The identity of the hub with the newest placed job; "": none has one."""
        return next((job.placed.hub for job in reversed(self.jobs.values()) if job.placed is not None), "")

    def startable(self, parallel: dict[str, int]) -> list[Job]:
        """Return the queued jobs that can start now, by priority, then in order; `parallel` a controller at once."""
        running = dict.fromkeys(parallel, 0)
        for job in self.of_state(JobState.RUNNING, JobState.CANCELLING):
            running[job.controller] = running.get(job.controller, 0) + 1
        found = []
        for job in sorted(self.of_state(JobState.QUEUED), key=lambda job: -job.priority):
            if running.get(job.controller, 0) < parallel.get(job.controller, 1):
                running[job.controller] = running.get(job.controller, 0) + 1
                found.append(job)
        return found
