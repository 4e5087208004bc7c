"""A gateway's own link to the hub: a pure machine, and the shell that dials for it.

The machine knows the attempts the gateway's journal has, so an offer that comes again is answered and not taken again.
The gateway takes and ends jobs; every change of one becomes a `JobReport`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from planetary.core.errors import PlanetaryError, TrustError
from planetary.fleet.protocol.messages import Goodbye, Hello, Shutdown
from planetary.fleet.protocol.records import error_class
from planetary.fleet.shell.shell import Address, ClientShell
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.events import (
    Close,
    Closed,
    Dial,
    Event,
    Exit,
    Instruction,
    Opened,
    Received,
    Send,
    StopRequested,
    Tick,
)
from planetary.machine.machine import Machine, check_invariants
from planetary.machine.redial import Redial
from planetary.site.placement.messages import PLACEMENT, CancelJob, JobReport, OfferJob, SiteNews
from planetary.version import __version__
from planetary.wire.message import Message
from planetary.wire.streams import ReceivedMessage, refuse_tensors

log = logging.getLogger(__name__)

REDIAL_FIRST_S, REDIAL_LIMIT_S = 0.2, 5.0
LEAVE_S = 2.0
"""Time of an ending gateway for the last messages to the hub."""

_LASTING = ". This gateway does not dial again: correct it, and start the gateway again"
"""Behind a refusal with a lasting reason: invite, key, or version."""

Attempt = tuple[str, int]
"""A job of the hub and the number of the attempt."""


class NewsCollected(Event, frozen=True):
    """The gateway looked at the capabilities."""

    news: SiteNews


class AttemptReported(Event, frozen=True):
    """The gateway has taken or declined a job of the hub, or the job's state has changed."""

    report: JobReport


class TakeJob(Instruction, frozen=True):
    """Take a job, or decline it; answer with `AttemptReported`."""

    offer: OfferJob
    hub: str  # identity


class EndJob(Instruction, frozen=True):
    """End the gateway's job of an attempt at once."""

    job: str
    attempt: int
    reason: str


class HubLinkMachine:
    """A gateway's link to the hub, as a pure machine. The first event is a `Tick`.

    Attributes:
        hub: identity of the hub the attempts are of; "" before the first connection of the gateway's life.
        reports: the newest one of each attempt the gateway has.
        connected: whether the hub has taken this gateway.
        away: why it is not connected; "" while it is, and before the first attempt.
        ended: why it is not dialled any more; "": it is.
    """

    def __init__(self, name: str, hub: str, reports: Iterable[JobReport]) -> None:
        """Go on with the attempts that are in the gateway's journal."""
        self.hub = hub
        self.reports: dict[Attempt, JobReport] = {(one.job, one.attempt): one for one in reports}
        self.away, self.ended = "", ""
        self._name = name
        self._link = Redial(name, first_s=REDIAL_FIRST_S, limit_s=REDIAL_LIMIT_S)
        self._news: SiteNews | None = None
        self._is_foreign = False  # the connection is with another hub, and about to be closed
        self._taking: dict[Attempt, str | None] = {}  # offers without an answer -> why they are cancelled already
        self._out: list[Instruction] = []

    @property
    def connected(self) -> bool:
        """Whether the hub has taken this gateway, and this gateway the hub."""
        return self._link.connected and not self.away

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        self._out = []
        if not self.ended:
            self._dispatch(event, now)
        return self._out

    def next_deadline(self) -> float | None:
        return None if self.ended or self._news is None else self._link.next_deadline()

    def validate(self) -> None:
        self._link.validate()
        check_invariants(f"the link of {self._name}", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        both = self._taking.keys() & self.reports.keys()
        yield not both, f"{sorted(both)} are taken, and were taken before"
        unfinished: dict[str, int] = {}
        for (job, _), report in self.reports.items():
            unfinished[job] = unfinished.get(job, 0) + (not report.ended)
        twice = [job for job, number in unfinished.items() if number > 1]
        yield not twice, f"{twice} run here in two attempts"

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Tick():
                self._dial(now)
            case NewsCollected():
                first, changed = self._news is None, event.news != self._news
                self._news = event.news
                if first:
                    self._dial(now)
                elif changed:
                    self._send(event.news)
            case Opened():
                self._opened(event)
            case Closed():
                if self._link.closed(event.session, now):
                    self.away = self.away if self._is_foreign else event.reason
                    self._is_foreign = False
                    if event.refused:
                        self._exit(error_class(event.kind) if event.kind else TrustError, f"{event.reason}{_LASTING}")
            case Received() if event.session == self._link.session and self.connected:
                self._received(event.message)
            case AttemptReported():
                self._reported(event.report)
            case StopRequested():
                self._send(Goodbye(reason=event.reason))
                self._exit(None, event.reason)

    def _dial(self, now: float) -> None:
        session = self._link.dial(now) if self._news is not None else None
        if session is not None:
            self._out.append(Dial(session))

    def _opened(self, event: Opened) -> None:
        running = [job for (job, _), report in self.reports.items() if not report.ended]
        foreign = self.hub not in ("", event.run) and bool(running or self._taking)
        if not self._link.opened(event.session, of_use=not foreign):
            return
        self.away, self._is_foreign = "", foreign
        if foreign:  # until the jobs have ended, or the first hub is at this address again
            self.away = (
                f"this gateway has jobs of the hub {self.hub} ({', '.join(running) or 'being taken'}), and the hub at "
                f"this address is {event.run}: a site has one hub. It is taken once they have ended; or cancel them, "
                "or name the first hub in federation.upstream again"
            )
            self._out.append(Close(event.session, self.away))
            return
        if self.hub != event.run:
            self.hub, self.reports = event.run, {}
        assert self._news is not None
        self._send(self._news)

    def _received(self, message: Message) -> None:
        match message:
            case OfferJob():
                attempt = (message.job, message.attempt)
                if attempt in self.reports:
                    self._send(self.reports[attempt])
                elif attempt not in self._taking:
                    self._taking[attempt] = None
                    self._out.append(TakeJob(message, self.hub))
            case CancelJob():
                self._cancel(message)
            case Shutdown():
                self._exit(None if message.ok else error_class(message.kind), message.reason)

    def _cancel(self, message: CancelJob) -> None:
        attempt = (message.job, message.attempt)
        report = self.reports.get(attempt)
        if attempt in self._taking:
            self._taking[attempt] = message.reason
        elif report is None:
            absent = f"{self._name} does not have it"
            self._send(JobReport(job=message.job, attempt=message.attempt, state="absent", reason=absent))
        elif report.ended or report.state == "cancelling":
            self._send(report)
        else:
            self._out.append(EndJob(message.job, message.attempt, message.reason))

    def _reported(self, report: JobReport) -> None:
        attempt = (report.job, report.attempt)
        cancelled = self._taking.pop(attempt, None)
        if report.state != "declined":
            self.reports[attempt] = report
        self._send(report)
        if cancelled is not None and not report.ended:
            self._out.append(EndJob(report.job, report.attempt, cancelled))

    def _send(self, message: Message) -> None:
        if self.connected:
            self._out.append(Send(self._link.session, message))

    def _exit(self, error: type[PlanetaryError] | None, reason: str) -> None:
        self.ended = reason
        self._out.append(Exit(error is None, reason, error))


class HubLinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway joins the hub.

    Attributes:
        address: of the hub.
        name: of the gateway there.
    """

    address: Address
    name: str


class HubLink:
    """The link's shell. Methods are called on the event loop.

    Attributes:
        machine: decides.
        options: that it was made with.
    """

    def __init__(
        self,
        options: HubLinkOptions,
        hub: str,
        reports: Iterable[JobReport],
        carry_out: Callable[[TakeJob | EndJob], None],
        system: System = SYSTEM,
    ) -> None:
        """`hub` and `reports`: of the gateway's journal; `carry_out`: takes and ends jobs, and does not block."""
        self.options = options
        self.machine = HubLinkMachine(options.name, hub, reports)
        self._carry_out = carry_out
        self._system, self._was_connected, self._why_away = system, False, ""
        self._task: asyncio.Task[None] | None = None
        hello = Hello(
            role="site",
            protocol=PLACEMENT.version,
            software=__version__,
            token="",
            worker=options.name,
            node=options.name,
            pid=system.pid(),
        )
        self._shell = ClientShell(
            self.machine,
            self._instructed,
            system.clock,
            self._observe,
            address=options.address,
            protocol=PLACEMENT,
            hello=hello,
            received=self._received,
            allocate=refuse_tensors,
            network=system.network,
        )

    def start(self) -> None:
        """Begin; the hub is dialled once `collect` was called."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="link to the hub")

    async def stop(self, reason: str) -> None:
        """Leave the hub: it places the jobs elsewhere unless this gateway comes again in time."""
        self._shell.post(StopRequested(reason))
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=LEAVE_S)
            self._task.cancel()

    def collect(self, news: SiteNews) -> None:
        """Pass the gateway's present capabilities on; the hub gets them if they have changed."""
        self._post(NewsCollected(news))

    def report(self, report: JobReport) -> None:
        """Pass the state of an attempt on."""
        self._post(AttemptReported(report))

    def _post(self, event: Event) -> None:
        if not self.machine.ended:  # nothing takes events any more, and they would pile up
            self._shell.post(event)

    async def _run(self) -> None:
        end = await self._shell.run()
        if end.error is not None:
            log.error("the hub at %s does not take this gateway: %s", self._place(), end.reason)
        else:
            log.info("the link to the hub at %s ends: %s", self._place(), end.reason)
        await self._shell.close(end.reason)

    def _place(self) -> str:
        return f"{self.options.address.host}:{self.options.address.port}"

    def _observe(self, machine: Machine[Event, Instruction]) -> None:
        self._system.observe(machine)
        if self.machine.connected != self._was_connected:
            self._was_connected = self.machine.connected
            joined = f"joined the hub {self.machine.hub} at {self._place()} as {self.options.name}"
            log.info("%s", joined if self._was_connected else f"the hub at {self._place()} is away; dialling again")
        if self.machine.away != self._why_away:
            self._why_away = self.machine.away
            if self._why_away and not self.machine.ended:
                log.warning("not joined to the hub at %s, dialling on: %s", self._place(), self._why_away)

    def _received(self, session: int, received: ReceivedMessage) -> None:
        self._shell.post(Received(session, received.message))

    def _instructed(self, instruction: Instruction) -> None:
        assert isinstance(instruction, TakeJob | EndJob), f"a link's machine asked for {instruction}"
        self._carry_out(instruction)
