"""A gateway's link to its hub as a pure machine on a fake clock: refusals after which it dials again, and others."""

from __future__ import annotations

import pytest

from planetary.core.errors import ResourceError, TrustError
from planetary.fleet.protocol.messages import Hello
from planetary.machine.events import Close, Closed, Dial, Event, Exit, Instruction, Opened, Received, Send, Tick
from planetary.site.placement.hub_link import (
    REDIAL_FIRST_S,
    REDIAL_LIMIT_S,
    AttemptReported,
    HubLinkMachine,
    NewsCollected,
    TakeJob,
)
from planetary.site.placement.job_hub import HubTerms, refusal_of
from planetary.site.placement.messages import JobReport, OfferJob, SiteNews
from planetary.site.placement.placed_jobs import PlacementBook

NEWS = SiteNews(controllers=(), workers=())
RUNNING = JobReport(job="toy", attempt=1, state="running", name="toy")
ENDED = JobReport(job="toy", attempt=1, state="finished", name="toy")


class Link:
    """A link's machine, a clock, and the instructions of the newest event."""

    def __init__(self, hub: str = "", *reports: JobReport) -> None:
        self.machine, self.now = HubLinkMachine("paris", hub, reports), 0.0
        self.tell(Tick())
        assert self.tell(NewsCollected(NEWS)) == [Dial(1)]
        self.session = 1

    def tell(self, event: Event) -> list[Instruction]:
        out = list(self.machine.handle(event, self.now))
        self.machine.validate()
        return out

    def dial(self) -> float:
        """Wait for the next attempt; return the pause before it."""
        due = self.machine.next_deadline()
        assert due is not None
        pause, self.now, self.session = due - self.now, due, self.session + 1
        assert self.tell(Tick()) == [Dial(self.session)]
        return pause


def grow(pauses: list[float]) -> bool:
    """Whether pauses are those of a redial: doubled up to the limit."""
    expected = [min(REDIAL_LIMIT_S, REDIAL_FIRST_S * 2.0**at) for at in range(len(pauses))]
    return all(0.75 * most <= pause <= most for pause, most in zip(pauses, expected, strict=True))


def test_passing_refusal_is_dialled_again() -> None:
    link = Link()
    pauses = []
    for _ in range(8):
        assert link.tell(Closed(link.session, "the hub knows no site named paris")) == []
        assert (link.machine.connected, link.machine.ended) == (False, "")
        assert link.machine.away == "the hub knows no site named paris"
        pauses.append(link.dial())
    assert grow(pauses)
    assert link.tell(Opened(link.session, "h-1")) == [Send(link.session, NEWS)]
    assert (link.machine.connected, link.machine.away, link.machine.hub) == (True, "", "h-1")
    link.tell(Closed(link.session, "cut"))
    assert link.dial() <= REDIAL_FIRST_S  # the pauses begin anew


def test_another_hub_is_refused_until_first_jobs_have_ended() -> None:
    """Another hub is refused with growing pauses until the jobs of the first have ended."""
    link = Link("h-1", RUNNING)
    pauses = []
    for _ in range(7):
        [close] = link.tell(Opened(link.session, "h-2"))
        assert isinstance(close, Close)
        assert "this gateway has jobs of the hub h-1 (toy), and the hub at this address is h-2" in close.reason
        assert not link.machine.connected
        offer = OfferJob(job="other", attempt=1, config="", priority=None)
        assert link.tell(Received(link.session, offer)) == []
        assert link.machine.next_deadline() is None  # the connection ends first
        assert link.tell(Closed(link.session, "this side closed it")) == []
        assert link.machine.away == close.reason
        pauses.append(link.dial())
    assert grow(pauses)
    assert link.tell(AttemptReported(ENDED)) == []
    assert link.tell(Opened(link.session, "h-2")) == [Send(link.session, NEWS)]
    assert (link.machine.hub, link.machine.reports, link.machine.away) == ("h-2", {}, "")


def test_first_hub_is_taken_again_when_it_is_back() -> None:
    link = Link("h-1", RUNNING)
    link.tell(Opened(link.session, "h-2"))
    link.tell(Closed(link.session, "this side closed it"))
    link.dial()
    assert link.tell(Opened(link.session, "h-1")) == [Send(link.session, NEWS)]
    offer = OfferJob(job="toy", attempt=1, config="", priority=None)
    assert link.tell(Received(link.session, offer)) == [Send(link.session, RUNNING)]
    other = OfferJob(job="other", attempt=1, config="", priority=None)
    assert link.tell(Received(link.session, other)) == [TakeJob(other, "h-1")]


@pytest.mark.parametrize(("kind", "error"), [("", TrustError), ("resource", ResourceError)])
def test_lasting_refusal_ends_the_link_with_the_remedy(kind: str, error: type[Exception]) -> None:
    link = Link()
    out = link.tell(Closed(link.session, "the invite token 3f has expired", refused=True, kind=kind))
    [end] = out
    assert isinstance(end, Exit)
    assert (end.ok, end.error) == (False, error)
    assert end.reason == (
        "the invite token 3f has expired. This gateway does not dial again: correct it, and start the gateway again"
    )
    assert (link.machine.ended, link.machine.next_deadline()) == (end.reason, None)
    assert link.tell(Tick()) == []


def test_a_hub_lets_a_site_try_again_unless_its_invite_is_wrong() -> None:
    def hello(worker: str) -> Hello:
        return Hello(role="site", protocol=1, software="", token="", worker=worker, node=worker, pid=1)

    terms, book = HubTerms("h-1", ("paris", "rome")), PlacementBook()
    unknown = refusal_of(hello("oslo"), terms, book, {})
    assert unknown is not None
    assert (unknown.code, unknown.retry) == ("site", True)
    busy = refusal_of(hello("paris"), terms, book, {"paris": ("another machine", "")})
    assert busy is not None
    assert (busy.code, busy.retry) == ("busy", True)
    assert refusal_of(hello("paris"), terms, book, {}) is None
