"""The jobs of a hub, folded from the journal: submissions, offers, answers, and states at the sites."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, TypeAlias

import msgspec

from planetary.core.errors import LocalProtocolError
from planetary.fleet.protocol.run_fold import Ban
from planetary.machine.journal import Record
from planetary.machine.state_table import Table
from planetary.site.book import Book, BookedJob
from planetary.site.placement.choice import PlaceableJob
from planetary.site.placement.messages import AttemptState

HUB_JOURNAL = "hub.jsonl"


class PlacementState(StrEnum):
    """Where a job of a hub is."""

    WAITING = "waiting"  # no site has it
    OFFERED = "offered"  # a site has been asked, and may have taken it
    PLACED = "placed"  # a site has taken it; over several sites: each of its parts has one, and the hub has the run
    CANCELLING = "cancelling"  # it is to end at the site
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


PLACED_JOB: Table = {
    (PlacementState.WAITING, "offer"): PlacementState.OFFERED,
    (PlacementState.WAITING, "return"): PlacementState.PLACED,  # the lost site is back, and has it still
    (PlacementState.WAITING, "spread"): PlacementState.PLACED,  # over several sites: each part has one
    (PlacementState.WAITING, "cancel"): PlacementState.CANCELLED,
    (PlacementState.WAITING, "fail"): PlacementState.FAILED,  # every site refuses it for good
    (PlacementState.OFFERED, "accept"): PlacementState.PLACED,
    (PlacementState.OFFERED, "decline"): PlacementState.WAITING,
    (PlacementState.OFFERED, "lose"): PlacementState.WAITING,
    (PlacementState.OFFERED, "cancel"): PlacementState.CANCELLING,
    (PlacementState.PLACED, "accept"): PlacementState.PLACED,  # and the state there has changed
    (PlacementState.PLACED, "decline"): PlacementState.WAITING,  # by a site without its former journal
    (PlacementState.PLACED, "lose"): PlacementState.WAITING,
    (PlacementState.PLACED, "cancel"): PlacementState.CANCELLING,
    (PlacementState.PLACED, "finish"): PlacementState.FINISHED,
    (PlacementState.PLACED, "fail"): PlacementState.FAILED,
    (PlacementState.PLACED, "stop"): PlacementState.CANCELLED,  # at the site, by a person
    (PlacementState.CANCELLING, "accept"): PlacementState.CANCELLING,
    (PlacementState.CANCELLING, "decline"): PlacementState.CANCELLED,
    (PlacementState.CANCELLING, "lose"): PlacementState.CANCELLED,
    (PlacementState.CANCELLING, "finish"): PlacementState.CANCELLED,
    (PlacementState.CANCELLING, "fail"): PlacementState.CANCELLED,
    (PlacementState.CANCELLING, "stop"): PlacementState.CANCELLED,
}

AT_SITE = frozenset({PlacementState.OFFERED, PlacementState.PLACED, PlacementState.CANCELLING})


class HubNamed(Record, frozen=True, kw_only=True, tag="hub_named"):
    """The identity of this hub, by which sites know it; the first record."""

    hub: str


class SiteJoined(Record, frozen=True, kw_only=True, tag="site_joined"):
    """A site came for the first time; the name belongs to this machine from now on."""

    site: str
    identity: str  # public key; "": of a hub without TLS


class SiteForgiven(Record, frozen=True, kw_only=True, tag="site_forgiven"):
    """A site's name may belong to another machine from now on."""

    site: str


class PlacementAsked(Record, frozen=True, kw_only=True, tag="placement_asked"):
    """A job was accepted by the hub."""

    job: str
    kind: str  # kind of run
    placeable: PlaceableJob
    config: str  # TOML; over several sites: of the hub's own run
    priority: int | None = None
    by: str = ""  # name of the token
    parts: tuple[PlaceableJob, ...] = ()  # parts for several sites; empty: the job is for one site
    part_config: str = ""  # TOML, of a site's run


class JobSpread(Record, frozen=True, kw_only=True, tag="job_spread"):
    """The hub has a site for each part of a job over several sites, and begins a separate run."""

    job: str
    sites: tuple[str, ...]  # sites of the uncancelled parts, in their order


class JobOffered(Record, frozen=True, kw_only=True, tag="job_offered"):
    """The hub has chosen a site for a job."""

    job: str
    attempt: int
    site: str
    why: str


class JobDeclined(Record, frozen=True, kw_only=True, tag="job_declined"):
    """The site does not take the job."""

    job: str
    attempt: int
    reason: str
    lasting: bool


class JobAccepted(Record, frozen=True, kw_only=True, tag="job_accepted"):
    """The site has the job; written again when the state there has changed."""

    job: str
    attempt: int
    state: AttemptState
    reason: str = ""
    name: str = ""  # name of the site's own job


class JobLost(Record, frozen=True, kw_only=True, tag="job_lost"):
    """The site is away for longer than the site's patience, or does not answer: the job goes elsewhere."""

    job: str
    attempt: int
    reason: str


class JobReturned(Record, frozen=True, kw_only=True, tag="job_returned"):
    """A lost site is back before the job was offered elsewhere, and keeps it."""

    job: str
    attempt: int


class StrayRecalled(Record, frozen=True, kw_only=True, tag="stray_recalled"):
    """A lost site is back and is asked to cancel an attempt: the job never returns to it."""

    job: str
    attempt: int


class StrayEnded(Record, frozen=True, kw_only=True, tag="stray_ended"):
    """A lost site is back, and an attempt that was given up does not run there any more."""

    job: str
    attempt: int
    reason: str


class PlacedJobEnded(Record, frozen=True, kw_only=True, tag="placed_job_ended"):
    """The job has ended at the site; where no site takes it, without one."""

    job: str
    state: AttemptState  # finished, failed or cancelled
    reason: str


class PlacementCancelled(Record, frozen=True, kw_only=True, tag="placement_cancelled"):
    """A user requested the end of a job."""

    job: str
    by: str = ""
    reason: str = ""


class LineUsed(Record, frozen=True, kw_only=True, tag="line_used"):
    """Bytes a site's line has carried on a day so far."""

    site: str
    day: int  # days since 1970-01-01, UTC
    nbytes: int


HubRecord: TypeAlias = (
    HubNamed
    | SiteJoined
    | SiteForgiven
    | PlacementAsked
    | JobSpread
    | JobOffered
    | JobDeclined
    | JobAccepted
    | JobLost
    | JobReturned
    | StrayRecalled
    | StrayEnded
    | PlacedJobEnded
    | PlacementCancelled
    | LineUsed
)


def news_of(record: HubRecord) -> str:
    """Return a record in words, for people; "" for one that is not worth it."""
    match record:
        case SiteJoined():
            return f"site {record.site} joined"
        case SiteForgiven():
            return f"the name {record.site} may belong to another machine"
        case PlacementAsked():
            return f"job {record.job} ({record.kind}) was submitted" + (f" by {record.by}" if record.by else "")
        case JobSpread():
            return f"job {record.job} is trained by {', '.join(record.sites)}"
        case JobOffered():
            return f"job {record.job} is offered to {record.site}: {record.why}"
        case JobDeclined():
            return f"job {record.job} was declined: {record.reason}"
        case JobAccepted():
            return f"job {record.job} is {record.state} at its site, as {record.name}"
        case JobLost():
            return f"job {record.job} goes elsewhere: {record.reason}"
        case JobReturned():
            return f"job {record.job} stays: its site is back, and no other one was asked"
        case StrayRecalled():
            return f"attempt {record.attempt} of job {record.job} is cancelled: its site is back, and it was given up"
        case StrayEnded():
            return f"attempt {record.attempt} of job {record.job} is over: {record.reason}"
        case PlacedJobEnded():
            return f"job {record.job} {record.state}" + (f": {record.reason}" if record.reason else "")
        case PlacementCancelled():
            return f"job {record.job} is to end: {record.reason}"
        case _:
            return ""


class Stray(msgspec.Struct):
    """An attempt that was given up, and may still run.

    Attributes:
        recalled: whether the site may have been asked to cancel it.
    """

    site: str
    recalled: bool = False


PART_KIND = "site"
"""Kind of run of a part: that of a hub's gateway."""


def part_names(job: str, parts: int) -> tuple[str, ...]:
    """Return the names of the parts of a job over several sites."""
    return tuple(f"{job}.{number}" for number in range(1, parts + 1))


class PlacedJob(BookedJob[PlacementState], kw_only=True):
    """One job of a hub.

    Attributes:
        site: that it was offered to or is at; "": none, also once it is lost.
        attempt: the newest one; 0: it was offered to none.
        state_there: as the site reported it last.
        strays: by attempt.
        refused: site -> why it will never take it.
        why: it is at the site.
        whole: job over several sites it is a part of; "": none.
        part: number among the parts, from 1.
        parts: names of the parts, in order; empty: a job for one site.
        members: of a job over several sites: site -> number of the part it has, or had.
    """

    table: ClassVar[Table] = PLACED_JOB

    placeable: PlaceableJob
    priority: int | None
    state: PlacementState = PlacementState.WAITING
    site: str = ""
    attempt: int = 0
    attempts: int = 0
    state_there: AttemptState | None = None
    name_there: str = ""
    strays: dict[int, Stray] = msgspec.field(default_factory=dict)
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    why: str = ""
    whole: str = ""
    part: int = 0
    parts: tuple[str, ...] = ()
    members: dict[str, int] = msgspec.field(default_factory=dict)
    placed_at: float | None = None  # Unix time in seconds

    @property
    def is_at_site(self) -> bool:
        """Whether the site has it, or may have; never of a job over several sites."""
        return not self.parts and self.state in AT_SITE


_STEP_OF_END: dict[AttemptState, str] = {"finished": "finish", "failed": "fail", "cancelled": "stop"}


class PlacementBook(Book[PlacedJob]):
    """The fold of a hub's journal.

    Attributes:
        hub: identity; "" before the first record.
        keys: site -> public key of the machine the name belongs to.
        bans: of sites; a hub that places jobs bans none.
        used: site -> day and traffic of the line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hub = ""
        self.keys: dict[str, str] = {}
        self.bans: dict[str, Ban] = {}
        self.used: dict[str, tuple[int, int]] = {}

    def apply(self, record: HubRecord) -> None:
        match record:
            case HubNamed():
                self.hub = record.hub
            case SiteJoined():
                self.keys[record.site] = record.identity
            case SiteForgiven():
                self.keys.pop(record.site, None)
            case LineUsed():
                self.used[record.site] = (record.day, record.nbytes)
            case PlacementAsked():
                self._add(record)
            case _:
                self._change(record, self.job(record.job))
        self.date(record)

    def date(self, record: HubRecord) -> None:
        """Take the dates of a record applied without a date; no decision depends on them."""
        if not record.t or isinstance(record, HubNamed | SiteJoined | SiteForgiven | LineUsed):
            return
        job = self.job(record.job)
        for one in (job, *self.parts_of(job)):
            one.submitted_at = one.submitted_at or record.t
        match record:  # and not the job's state, which later records of the same moment may have changed already
            case JobAccepted() | JobReturned() | JobSpread():
                job.placed_at = job.placed_at or record.t
            case PlacedJobEnded() | PlacementCancelled() | JobDeclined() | JobLost() if job.over:
                job.ended_at = job.ended_at or record.t

    def at(self, site: str) -> list[PlacedJob]:
        """Return the jobs a site has, or may have."""
        return [job for job in self.jobs.values() if job.is_at_site and job.site == site]

    def _add(self, record: PlacementAsked) -> None:
        names = part_names(record.job, len(record.parts))
        whole = PlacedJob(
            job=record.job,
            kind=record.kind,
            placeable=record.placeable,
            config=record.config,
            priority=record.priority,
            by=record.by,
            parts=names,
        )
        parts = [
            PlacedJob(
                job=name,
                kind=PART_KIND,
                placeable=placeable,
                config=record.part_config,
                priority=record.priority,
                by=record.by,
                whole=whole.job,
                part=number,
            )
            for number, (name, placeable) in enumerate(zip(names, record.parts, strict=True), 1)
        ]
        self.add(whole, *parts)

    def parts_of(self, job: PlacedJob) -> list[PlacedJob]:
        """Return the parts of a job over several sites, in their order."""
        return [self.jobs[name] for name in job.parts]

    def _change(self, record: HubRecord, job: PlacedJob) -> None:
        match record:
            case JobOffered():
                if record.attempt != job.attempts + 1:
                    raise LocalProtocolError(f"attempt {record.attempt} of {job.job} follows attempt {job.attempts}")
                job.advance("offer")
                job.attempt = job.attempts = record.attempt
                job.site, job.why, job.reason, job.state_there, job.name_there = record.site, record.why, "", None, ""
                if job.whole:
                    self.jobs[job.whole].members[record.site] = job.part
            case JobSpread():
                job.advance("spread")
                job.reason = ""
            case StrayRecalled():
                job.strays[record.attempt].recalled = True
            case StrayEnded():
                job.strays.pop(record.attempt, None)
            case JobReturned():
                job.advance("return")
                job.attempt, job.site = record.attempt, job.strays.pop(record.attempt).site
                job.why, job.reason = "it was there, and no other site had been asked", ""
            case PlacementCancelled():
                job.cancel(record.reason)
            case PlacedJobEnded():
                job.end(_STEP_OF_END[record.state], record.reason)
                job.state_there = record.state if job.site else None
            case JobDeclined() | JobAccepted() | JobLost():
                if record.attempt != job.attempt:
                    raise LocalProtocolError(f"attempt {record.attempt} of {job.job} is not its newest, {job.attempt}")
                self._answer(record, job)

    def _answer(self, record: JobDeclined | JobAccepted | JobLost, job: PlacedJob) -> None:
        kept = job.reason if job.state is PlacementState.CANCELLING else ""
        match record:
            case JobAccepted():
                job.advance("accept")
                job.state_there, job.name_there = record.state, record.name or job.name_there
                return
            case JobDeclined():
                job.advance("decline")
                if record.lasting:
                    job.refused[job.site] = record.reason
                job.reason = f"{job.site}: {record.reason}"
            case JobLost():
                job.advance("lose")
                job.strays[job.attempt] = Stray(job.site)
                job.reason = record.reason
        job.site, job.state_there, job.why, job.reason = "", None, "", kept or job.reason
