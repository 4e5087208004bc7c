"""A hub that places jobs, as a pure machine: sites come and go, jobs are offered, lost, returned and cancelled.

Every decision is a record of the hub's journal before the message is sent. A site that comes is asked again for every
job it has, or may have: an offer of the same attempt changes nothing there and is answered with the job's state. So the
loss of a message, a connection, a site or the hub loses no job. A job is offered to another site only after the job's
site was away for longer than the site's patience. The attempt that was given up is a *stray*: while it may still run,
the job is not offered to the same site again, and as soon as the site is back it is asked to cancel it, or keeps the
job if no other site was asked in the meantime.

A job over several sites is a *whole* with *parts*. The hub trains it in a separate run, whose workers are the sites
with parts; it begins once there is a site for every part, and that run's end is the end of the whole. A part is
offered, lost, returned and cancelled like any job. The whole goes on while one part does: a part ended by its site is
not placed again. Parts that outlive their whole are cancelled, after a while in which their sites can take the last
version.

A site that alternates between two states (queued and running, there and away, taking a job and declining it) does not
grow the journal at the rate of the connection: offers, losses and changes of a job's state there are *paced*, and of
the changes in between the newest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from planetary.core.printable import one_line
from planetary.machine.events import Append, Close, Closed, Event, Instruction, Received, Send, Tick
from planetary.machine.machine import check_invariants
from planetary.site.config import SitePolicy
from planetary.site.placement.choice import SiteChoice, SiteNow, choose_site, choose_sites
from planetary.site.placement.messages import CancelJob, JobReport, OfferJob, SiteNews
from planetary.site.placement.placed_jobs import (
    HubRecord,
    JobAccepted,
    JobDeclined,
    JobLost,
    JobOffered,
    JobReturned,
    JobSpread,
    LineUsed,
    PlacedJob,
    PlacedJobEnded,
    PlacementAsked,
    PlacementBook,
    PlacementCancelled,
    PlacementState,
    SiteJoined,
    StrayEnded,
    StrayRecalled,
)

REST_S = 30.0
"""Time after which a site is asked again for a job it declined for a passing reason."""
MOST_REASON = 2000
"""Characters kept of a site's reason."""
PACE_S, BURST = 60.0, 20
"""Offers, losses and changes of state of a job: `BURST` at once, then one each `PACE_S` seconds; most have four."""
SETTLE_S = 60.0
"""How long parts may outlive the hub's run of their job, and that run the parts."""
LINE_STEPS = 50
"""Parts of a daily budget: a line's bytes are written to the journal whenever another part is used."""


class SiteCame(Event, frozen=True, kw_only=True):
    """A site has connected and was admitted."""

    session: int
    site: str
    identity: str = ""  # public key of the site's machine


class JobAsked(Event, frozen=True, kw_only=True):
    """A job was submitted; the name is new."""

    asked: PlacementAsked


class JobUnwanted(Event, frozen=True, kw_only=True):
    """A user requests the end of a job that is not over."""

    job: str
    by: str = ""
    reason: str = ""


class OuterRunEnded(Event, frozen=True, kw_only=True):
    """The hub's own run of a job over several sites is over."""

    job: str
    ok: bool
    reason: str


class LineCarried(Event, frozen=True, kw_only=True):
    """A site's line has carried more bytes, both ways."""

    site: str
    day: int  # days since 1970-01-01, UTC
    nbytes: int  # more than before


class SiteSession(msgspec.Struct):
    """A site as the hub sees it while the hub's process lives.

    Attributes:
        session: connection; 0: none.
        news: newest report on this connection.
        away_since: monotonic time in seconds since which it has no connection.
        carried: bytes of today the journal has not.
    """

    away_since: float
    session: int = 0
    news: SiteNews | None = None
    carried: int = 0


class PlacementMachine:
    """A hub that places jobs, as a pure machine.

    Attributes:
        book: the jobs; only records change it.
        policies: of the sites, by name.
        sites: by name.
        choices: of waiting jobs: why none of the sites has it.
    """

    def __init__(self, policies: Sequence[SitePolicy], book: PlacementBook, now: float) -> None:
        """Go on with the jobs of `book`; every site is away since `now` (monotonic seconds)."""
        self.book = book
        self.policies = {one.name: one for one in policies}
        self.sites = {name: SiteSession(away_since=now) for name in self.policies}
        self.choices: dict[str, SiteChoice] = {}
        self._day = 0
        self._began = now
        self._asked_at: dict[str, float] = {}  # job -> time of the offer on the present connection
        self._rests: dict[tuple[str, str], tuple[float, str]] = {}  # job and site -> until when, and why
        self._paced: dict[str, float] = {}  # job -> when all that was written of it has been paid for
        self._held: dict[str, JobReport] = {}  # job -> state at the site, not in the journal yet
        self._settles: dict[str, float] = {}  # whole -> end of the whole or of all parts
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        self._out = []
        self._dispatch(event, now)
        self._take_held(now)
        self._give_up(now)
        self._place(now)
        self._end_wholes(now)
        return self._out

    def next_deadline(self) -> float | None:
        times = [at for job in self.book.jobs.values() if (at := self._lost_at(job)) is not None]
        times += [until for until, _ in self._rests.values()]
        times += [self._free_at(job) for job in self._held]
        times += [self._free_at(job) for job, choice in self.choices.items() if choice.site]
        times += [since + SETTLE_S for since in self._settles.values()]
        return min(times, default=None)

    def state_there(self, job: PlacedJob) -> str:
        """Return the newest state of a job at the site; "": not known."""
        held = self._held.get(job.job)
        return (job.state_there or "") if held is None else held.state

    def now_of(self, name: str, job: PlacedJob) -> SiteNow:
        """Return a site as a job sees it."""
        site = self.sites[name]
        controller = job.placeable.controller
        return SiteNow(
            policy=self.policies[name],
            news=site.news,
            placed=sum(one.placeable.controller == controller for one in self.book.at(name)),
            refused=job.refused.get(name, ""),
            rests=self._rests.get((job.job, name), (0.0, ""))[1],
            stray=any(stray.site == name for stray in job.strays.values()),
            part=self._other_part(name, job),
            nbytes=self.nbytes_today(name),
        )

    def _other_part(self, site: str, job: PlacedJob) -> str:
        """Return the part of the same job a site has, or had, if it is another one than this."""
        if not job.whole:
            return ""
        whole = self.book.job(job.whole)
        number = whole.members.get(site, job.part)
        return "" if number == job.part else whole.parts[number - 1]

    def nbytes_today(self, name: str) -> int:
        """Return the bytes a site's line has carried today, both ways."""
        day, used = self.book.used.get(name, (0, 0))
        return self.sites[name].carried + (used if day == self._day else 0)

    def validate(self) -> None:
        check_invariants("the hub", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        for job in self.book.jobs.values():
            name = f"job {job.job}"
            yield not job.is_at_site or bool(job.site), f"{name} is {job.state} at no site"
            yield job.state is not PlacementState.WAITING or not job.site, f"{name} waits at {job.site}"
            yield job.attempt not in job.strays or not job.is_at_site, f"{name}: attempt {job.attempt} is a stray"
            strays = [stray.site for stray in job.strays.values()]
            yield not job.is_at_site or job.site not in strays, f"{name} is at {job.site} twice"
            yield len(strays) == len(set(strays)), f"{name} has two strays at one site"
            sites = [part.site for part in self.book.parts_of(job) if part.is_at_site]
            yield len(sites) == len(set(sites)), f"{name} has two parts at one site: {sites}"
            early = job.state is PlacementState.WAITING and any(part.attempts for part in self.book.parts_of(job))
            yield not early, f"{name} waits, and a part of it was offered"
            yield job.job not in self._held or job.is_at_site, f"{name} is at no site, and a state there is not written"

    # --- events -----------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case SiteCame():
                self._came(event, now)
            case Closed():
                for site in self.sites.values():
                    if site.session == event.session:
                        site.session, site.news, site.away_since = 0, None, now
            case Received():
                name = self._name_of(event.session)
                if name:
                    self._received(name, event, now)
            case JobAsked():
                self._append(event.asked)
            case JobUnwanted():
                self._cancel(event)
            case OuterRunEnded() if not (whole := self.book.job(event.job)).over:
                state = "finished" if event.ok else "failed"
                self._append(PlacedJobEnded(job=whole.job, state=state, reason=event.reason))
            case LineCarried() if event.site in self.sites:
                self._count(event)
            case Tick():
                pass

    def _came(self, event: SiteCame, now: float) -> None:
        site = self.sites[event.site]
        if event.site not in self.book.keys:
            self._append(SiteJoined(site=event.site, identity=event.identity))
        if site.session:
            self._out.append(Close(site.session, f"{event.site} has connected anew"))
        site.session, site.news, site.away_since = event.session, None, now
        for job in self.book.at(event.site):
            self._asked_at.pop(job.job, None)

    def _name_of(self, session: int) -> str:
        return next((name for name, site in self.sites.items() if site.session == session), "")

    def _received(self, name: str, event: Received, now: float) -> None:
        match message := event.message:
            case SiteNews():
                came, self.sites[name].news = self.sites[name].news is None, message
                if came:
                    self._ask_for_all(name, now)
            case JobReport() if message.job in self.book.jobs:
                job = self.book.jobs[message.job]
                # Both are shown in terminals, and another machine wrote them.
                reason, named = one_line(message.reason)[:MOST_REASON], one_line(message.name)[:MOST_REASON]
                message = msgspec.structs.replace(message, reason=reason, name=named)
                if job.is_at_site and job.site == name and job.attempt == message.attempt:
                    self._reported(job, message, now)
                elif message.ended and (stray := job.strays.get(message.attempt)) is not None and stray.site == name:
                    why = f"{name}: {message.state}" + (f": {message.reason}" if message.reason else "")
                    self._append(StrayEnded(job=job.job, attempt=message.attempt, reason=why))

    def _ask_for_all(self, name: str, now: float) -> None:
        """Ask a site that has come for the state of every job it has, or may have."""
        for job in self.book.jobs.values():
            for attempt, stray in list(job.strays.items()):
                if stray.site != name:
                    continue
                if job.state is PlacementState.WAITING and not stray.recalled:
                    self._append(JobReturned(job=job.job, attempt=attempt))
                else:
                    where = f"it was placed at {job.site}" if job.site else f"the job is {job.state.value}"
                    self._recall(job, attempt, f"{name} was away, and {where} meanwhile")
            if job.is_at_site and job.site == name:
                self._ask(job, now)

    def _recall(self, job: PlacedJob, attempt: int, reason: str) -> None:
        """Have a stray cancelled at the connected site."""
        if not job.strays[attempt].recalled:
            self._append(StrayRecalled(job=job.job, attempt=attempt))
        self._send(job.strays[attempt].site, CancelJob(job=job.job, attempt=attempt, reason=reason))

    def _ask(self, job: PlacedJob, now: float) -> None:
        """Offer a job to the site, or have it cancelled there."""
        if job.state is PlacementState.CANCELLING:
            self._send(job.site, CancelJob(job=job.job, attempt=job.attempt, reason=job.reason))
            return
        self._asked_at[job.job] = now
        offer = OfferJob(job=job.job, attempt=job.attempt, config=job.config, priority=job.priority)
        self._send(job.site, offer)

    def _reported(self, job: PlacedJob, report: JobReport, now: float) -> None:
        self._asked_at.pop(job.job, None)
        cancelling = job.state is PlacementState.CANCELLING
        match report.state:
            case "declined":
                self._rests[job.job, job.site] = (now + REST_S, f"it declined the job: {report.reason}")
                lasting = report.lasting and not cancelling
                self._append(JobDeclined(job=job.job, attempt=job.attempt, reason=report.reason, lasting=lasting))
            case "absent":
                self._append(PlacedJobEnded(job=job.job, state="cancelled", reason=report.reason))
            case "queued" | "running" | "cancelling":
                self._accept(job, report, now)
            case _:
                self._accept(job, report, now)
                self._append(PlacedJobEnded(job=job.job, state=report.state, reason=report.reason))

    def _accept(self, job: PlacedJob, report: JobReport, now: float) -> None:
        self._held.pop(job.job, None)
        if job.state is PlacementState.OFFERED:
            self._append(self._accepted(job, report))
        elif not report.ended and report.state != job.state_there:
            self._held[job.job] = report

    def _accepted(self, job: PlacedJob, report: JobReport) -> JobAccepted:
        return JobAccepted(job=job.job, attempt=job.attempt, state=report.state, reason=report.reason, name=report.name)

    def _take_held(self, now: float) -> None:
        """Write the newest states of jobs at their sites, where it is time."""
        self._paced = {name: paid for name, paid in self._paced.items() if not self.book.job(name).over}
        for name, report in list(self._held.items()):
            job = self.book.job(name)
            if not job.is_at_site or job.attempt != report.attempt:
                del self._held[name]
            elif self._is_free(name, now):
                del self._held[name]
                self._append(self._accepted(job, report))

    def _free_at(self, job: str) -> float:
        """Return when the next paced record of a job may be written (monotonic seconds)."""
        return self._paced.get(job, -math.inf) - (BURST - 1) * PACE_S

    def _is_free(self, job: str, now: float) -> bool:
        """Whether a paced record may be written now; if so it is paid for."""
        if now < self._free_at(job):
            return False
        self._paced[job] = max(now, self._paced.get(job, now)) + PACE_S
        return True

    def _cancel(self, event: JobUnwanted) -> None:
        job = self.book.job(event.job)
        reason = event.reason or (f"cancelled by {event.by}" if event.by else "cancelled")
        self._append(PlacementCancelled(job=job.job, by=event.by, reason=reason))
        self._asked_at.pop(job.job, None)
        if job.state is PlacementState.CANCELLING:
            self._send(job.site, CancelJob(job=job.job, attempt=job.attempt, reason=reason))

    def _count(self, event: LineCarried) -> None:
        site, policy = self.sites[event.site], self.policies[event.site]
        if event.day != self._day:
            self._day = event.day
            for one in self.sites.values():
                one.carried = 0
        site.carried += event.nbytes
        if policy.gb_per_day and site.carried >= policy.gb_per_day * 1e9 / LINE_STEPS:
            day, used = self.book.used.get(event.site, (0, 0))
            nbytes, site.carried = site.carried + (used if day == event.day else 0), 0
            self._append(LineUsed(site=event.site, day=event.day, nbytes=nbytes))

    # --- decisions --------------------------------------------------------------------------------------------

    def _lost_at(self, job: PlacedJob) -> float | None:
        """Return when a job is given up at the site; None while the site attends to it."""
        if not job.is_at_site:
            return None
        if job.site not in self.sites:
            return self._began  # the hub's configuration has it no more
        site, patience = self.sites[job.site], self.policies[job.site].patience_s
        asked = site.away_since if site.news is None else self._asked_at.get(job.job)
        return None if asked is None else max(asked + patience, self._free_at(job.job))

    def _give_up(self, now: float) -> None:
        for job in self.book.jobs.values():
            at = self._lost_at(job)
            if at is None or now < at or not self._is_free(job.job, now):
                continue
            here = job.site in self.sites and self.sites[job.site].news is not None
            reason = f"{job.site} {'does not answer' if here else 'is away'}, for longer than its patience"
            attempt = job.attempt
            self._asked_at.pop(job.job, None)
            self._append(JobLost(job=job.job, attempt=attempt, reason=reason))
            if here:
                self._recall(job, attempt, reason)
        self._rests = {key: rest for key, rest in self._rests.items() if now < rest[0]}

    def _end_wholes(self, now: float) -> None:
        """End parts whose whole is over, and wholes whose parts are."""
        for whole in [job for job in self.book.jobs.values() if job.parts]:
            parts = self.book.parts_of(whole)
            open_ = [part for part in parts if not part.over and part.state is not PlacementState.CANCELLING]
            ends = whole.over or whole.state is PlacementState.CANCELLING
            if not open_ if ends else not all(part.over for part in parts):
                self._settles.pop(whole.job, None)
                continue
            settled = now >= self._settles.setdefault(whole.job, now) + SETTLE_S
            if ends:
                finished = whole.state is PlacementState.FINISHED
                for part in open_:
                    trains = part.state is PlacementState.PLACED and self.state_there(part) == "running"
                    if settled or not (finished and trains):
                        why = f"the job {whole.job} is {'over' if whole.over else 'to end'}: {whole.reason}"
                        self._cancel(JobUnwanted(job=part.job, reason=why))
            elif settled:
                self._exhausted(whole, parts)

    def _exhausted(self, whole: PlacedJob, parts: Sequence[PlacedJob]) -> None:
        """End a job whose parts have all ended, while the run waits for more contributions."""
        reasons = "; ".join(f"{part.job} {part.state}: {part.reason}" for part in parts)
        if any(part.state is PlacementState.FINISHED for part in parts):
            reason = f"its sites have trained all rounds of theirs: {reasons}"
            self._append(PlacedJobEnded(job=whole.job, state="finished", reason=reason))
        else:
            reason = f"no site has a part of it any more: {reasons}"
            self._append(PlacedJobEnded(job=whole.job, state="failed", reason=reason))

    def _place(self, now: float) -> None:
        waiting = [job for job in self.book.jobs.values() if job.state is PlacementState.WAITING]
        self.choices = {}
        for job in sorted(waiting, key=lambda job: -(job.priority or 0)):
            if job.parts:
                self._spread(job, now)
                continue
            if job.state is not PlacementState.WAITING or self._waits_for_whole(job):
                continue
            choice = choose_site(job.placeable, [self.now_of(name, job) for name in self.policies])
            if choice.site and not self._is_free(job.job, now):
                rests = f"{choice.site} gets it in a while: it was offered, lost or changed too often"
                self.choices[job.job] = msgspec.structs.replace(choice, why=rests)
            elif choice.site:
                self._append(JobOffered(job=job.job, attempt=job.attempts + 1, site=choice.site, why=choice.why))
                self._ask(job, now)
            elif choice.hopeless and not job.strays:
                reason = f"no site takes it: {choice.why}"
                self._append(PlacedJobEnded(job=job.job, state="failed", reason=reason))
            else:
                self.choices[job.job] = choice

    def _waits_for_whole(self, job: PlacedJob) -> bool:
        return bool(job.whole) and self.book.job(job.whole).state is not PlacementState.PLACED

    def _spread(self, whole: PlacedJob, now: float) -> None:
        """Offer every part of a job to a separate site, once there are enough."""
        parts = [part for part in self.book.parts_of(whole) if not part.over]  # a user may have cancelled some
        if not parts:
            return
        sites = [self.now_of(name, whole) for name in self.policies]
        choice = choose_sites([part.placeable for part in parts], sites)
        if choice.sites:
            self._append(JobSpread(job=whole.job, sites=choice.sites))
            for part, site, why in zip(parts, choice.sites, choice.why, strict=True):
                self._append(JobOffered(job=part.job, attempt=part.attempts + 1, site=site, why=why))
                self._ask(part, now)
        elif choice.hopeless:
            reason = f"too few sites take a part of it: {choice.why[0]}"
            self._append(PlacedJobEnded(job=whole.job, state="failed", reason=reason))
        else:
            self.choices[whole.job] = SiteChoice(site="", why=choice.why[0], obstacles={})

    # --- small things -----------------------------------------------------------------------------------------

    def _append(self, record: HubRecord) -> None:
        self.book.apply(record)
        self._out.append(Append(record))

    def _send(self, name: str, message: OfferJob | CancelJob) -> None:
        site = self.sites.get(name)
        if site is not None and site.news is not None:
            self._out.append(Send(site.session, message))
