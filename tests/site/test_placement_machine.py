"""A hub's machine, as transcripts: messages to its sites, and the jobs of its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from planetary.core.errors import LocalProtocolError
from planetary.machine.events import Append, Close, Closed, Event, Received, Send, Tick
from planetary.machine.journal import replay
from planetary.site.config import SitePolicy
from planetary.site.placement.choice import JobNeeds, PlaceableJob
from planetary.site.placement.machine import (
    BURST,
    PACE_S,
    REST_S,
    SETTLE_S,
    JobAsked,
    JobUnwanted,
    LineCarried,
    OuterRunEnded,
    PlacementMachine,
    SiteCame,
)
from planetary.site.placement.messages import (
    AttemptState,
    CancelJob,
    ControllerRoom,
    JobReport,
    OfferJob,
    SiteNews,
    WorkerGroup,
)
from planetary.site.placement.placed_jobs import (
    HubNamed,
    HubRecord,
    JobSpread,
    PlacedJob,
    PlacementAsked,
    PlacementBook,
)

PATIENCE = 10.0
NEWS = SiteNews(
    controllers=(ControllerRoom(controller="training", parallel=2, own=0),),
    workers=(WorkerGroup(backend="cpu", target="host", device="", roles=(), memory=0, number=1, idle=1),),
)


class Hub:
    """A machine whose instructions are carried out on lists."""

    def __init__(self, *names: str, **policy: object) -> None:
        self.policies = [SitePolicy(name=name, **{"patience_s": PATIENCE, **policy}) for name in names]  # type: ignore[arg-type]
        self.journal: list[HubRecord] = [HubNamed(hub="h-1")]
        self.now, self.sessions = 0.0, 0
        self.at: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """As after kill -9: all that is left is the journal."""
        self.machine = PlacementMachine(self.policies, replay(self.journal, PlacementBook()), self.now)
        self.at.clear()

    def tell(self, event: Event) -> list[tuple[str, object]]:
        sent: list[tuple[str, object]] = []
        for one in self.machine.handle(event, self.now):
            match one:
                case Append():
                    self.journal.append(one.record)  # type: ignore[arg-type]
                case Send():
                    name = next(name for name, session in self.at.items() if session == one.session)
                    sent.append((name, one.message))
                case Close():
                    sent.append(("", one))
        self.machine.validate()
        return sent

    def come(self, name: str, news: SiteNews = NEWS) -> list[tuple[str, object]]:
        self.sessions += 1
        first = self.tell(SiteCame(session=self.sessions, site=name))
        self.at[name] = self.sessions
        return first + self.tell(Received(self.sessions, news))

    def go(self, name: str) -> list[tuple[str, object]]:
        return self.tell(Closed(self.at.pop(name), "it is gone"))

    def submit(self, name: str) -> list[tuple[str, object]]:
        placeable = PlaceableJob(controller="training", roles=("trainer",), data_sets=())
        return self.tell(JobAsked(asked=PlacementAsked(job=name, kind="rounds", placeable=placeable, config="")))

    def spread(self, name: str, *sites: str) -> list[tuple[str, object]]:
        """Submit a job over several sites; one of two parts, each for any site, where none are named."""
        placeable = PlaceableJob(controller="training", roles=("trainer",), data_sets=())
        parts = tuple(
            PlaceableJob(controller="training", roles=("trainer",), data_sets=(), needs=JobNeeds(site=site))
            for site in sites or ("", "")
        )
        asked = PlacementAsked(job=name, kind="hub", placeable=placeable, config="", parts=parts)
        return self.tell(JobAsked(asked=asked))

    def end_run(self, name: str, *, ok: bool = True, reason: str = "all rounds") -> list[tuple[str, object]]:
        return self.tell(OuterRunEnded(job=name, ok=ok, reason=reason))

    def states(self, *names: str) -> list[str]:
        return [self.job(name).state.value for name in names]

    def report(
        self, site: str, job: str, attempt: int, state: AttemptState, **more: object
    ) -> list[tuple[str, object]]:
        report = JobReport(job=job, attempt=attempt, state=state, **more)  # type: ignore[arg-type]
        return self.tell(Received(self.at[site], report))

    def wait(self, seconds: float) -> list[tuple[str, object]]:
        self.now += seconds
        return self.tell(Tick())

    def job(self, name: str) -> PlacedJob:
        return self.machine.book.jobs[name]


def offer(site: str, job: str, attempt: int) -> tuple[str, object]:
    return site, OfferJob(job=job, attempt=attempt, config="")


def cancels(sent: list[tuple[str, object]]) -> list[tuple[str, str, int]]:
    return [(site, one.job, one.attempt) for site, one in sent if isinstance(one, CancelJob)]


def placed(*names: str) -> Hub:
    """A hub whose job j is at the first site."""
    hub = Hub(*names)
    hub.come(names[0])
    assert hub.submit("j") == [offer(names[0], "j", 1)]
    hub.report(names[0], "j", 1, "running", name="j-there")
    assert hub.job("j").state == "placed"
    return hub


def test_a_job_waits_for_a_site_is_offered_taken_and_ends() -> None:
    hub = Hub("a")
    assert hub.submit("j") == []
    assert hub.machine.choices["j"].why == "a: it is away"
    assert hub.come("a") == [offer("a", "j", 1)]
    assert hub.report("a", "j", 1, "queued") == []
    hub.report("a", "j", 1, "running", name="j-there")
    assert (hub.job("j").state_there, hub.job("j").name_there) == ("running", "j-there")
    hub.report("a", "j", 1, "finished", reason="all rounds")
    assert (hub.job("j").state, hub.job("j").reason) == ("finished", "all rounds")
    hub.report("a", "j", 1, "finished", reason="again")
    assert hub.job("j").reason == "all rounds"
    assert hub.wait(10 * PATIENCE) == []


def test_job_refused_by_all_sites_fails_with_all_reasons() -> None:
    hub = Hub("a", "b")
    hub.come("a")
    hub.come("b")
    assert hub.submit("j") == [offer("a", "j", 1)]
    assert hub.report("a", "j", 1, "declined", reason="no such file", lasting=True) == [offer("b", "j", 2)]
    hub.report("b", "j", 2, "declined", reason="no such model", lasting=True)
    assert hub.job("j").state == "failed"
    assert hub.job("j").reason == "no site takes it: a: no such file; b: no such model"


def test_site_declining_in_passing_is_asked_again() -> None:
    """A site that declined for a passing reason is asked again after a while."""
    hub = Hub("a")
    hub.come("a")
    hub.submit("j")
    assert hub.report("a", "j", 1, "declined", reason="it ends") == []
    assert hub.machine.choices["j"].why == "a: it declined the job: it ends"
    assert hub.wait(REST_S - 1) == []
    assert hub.wait(1) == [offer("a", "j", 2)]


def test_lost_sites_job_moves_once_and_is_cancelled_there() -> None:
    """A lost site's job is placed elsewhere once and cancelled there when the site is back."""
    hub = placed("a", "b")
    hub.come("b")
    hub.go("a")
    assert hub.wait(PATIENCE - 1) == []
    assert hub.wait(1) == [offer("b", "j", 2)]
    assert hub.wait(PATIENCE / 2) == []
    hub.report("b", "j", 2, "running")
    assert cancels(hub.come("a")) == [("a", "j", 1)]
    hub.report("a", "j", 1, "cancelling")
    assert hub.job("j").strays[1].recalled
    hub.report("a", "j", 1, "cancelled")
    assert (hub.job("j").state, hub.job("j").site, hub.job("j").strays) == ("placed", "b", {})


def test_lost_site_back_before_another_offer_keeps_the_job() -> None:
    hub = placed("a")
    hub.go("a")
    hub.wait(PATIENCE)
    assert (hub.job("j").state, hub.job("j").site) == ("waiting", "")
    assert hub.come("a") == [offer("a", "j", 1)]
    hub.report("a", "j", 1, "running")
    assert (hub.job("j").state, hub.job("j").site, hub.job("j").strays) == ("placed", "a", {})


def test_site_back_within_its_patience_is_asked_for_its_state() -> None:
    hub = placed("a", "b")
    hub.come("b")
    hub.go("a")
    hub.wait(PATIENCE - 1)
    assert hub.come("a") == [offer("a", "j", 1)]
    hub.report("a", "j", 1, "finished")
    assert hub.job("j").state == "finished"


def test_an_attempt_that_was_recalled_is_never_kept() -> None:
    """Its site may have cancelled it, and that is no user's wish to cancel the job."""
    hub = placed("a", "b")
    hub.come("b")
    hub.go("a")
    hub.wait(PATIENCE)
    hub.report("b", "j", 2, "running")
    assert cancels(hub.come("a")) == [("a", "j", 1)]
    hub.go("a")
    hub.go("b")
    hub.wait(PATIENCE)
    assert hub.job("j").state == "waiting"
    assert cancels(hub.come("a")) == [("a", "j", 1)]
    sent = hub.report("a", "j", 1, "cancelled")
    assert sent == [offer("a", "j", 3)]


def test_no_second_attempt_where_the_first_may_still_run() -> None:
    hub = placed("a", "b")
    hub.come("b")
    hub.go("a")
    hub.wait(PATIENCE)
    hub.come("a")
    sent = hub.report("b", "j", 2, "declined", reason="no", lasting=True)
    assert sent == []
    assert "an earlier attempt" in hub.machine.choices["j"].why
    assert hub.report("a", "j", 1, "cancelled") == [offer("a", "j", 3)]


def test_site_silent_on_an_offer_loses_it() -> None:
    """A site that does not answer an offer loses it and is asked to cancel it."""
    hub = Hub("a", "b")
    hub.come("a")
    hub.submit("j")
    hub.come("b")
    sent = hub.wait(PATIENCE)
    assert cancels(sent) == [("a", "j", 1)]
    assert sent[-1] == offer("b", "j", 2)
    hub.report("a", "j", 1, "running")  # at last: it was recalled, and stays so
    assert (hub.job("j").site, hub.job("j").strays[1].recalled) == ("b", True)


def test_cancellation_is_at_once_or_when_the_site_is_back() -> None:
    """Cancellation is at once where the site is here and else when it is back."""
    hub = placed("a")
    sent = hub.tell(JobUnwanted(job="j", reason="enough"))
    assert cancels(sent) == [("a", "j", 1)]
    hub.go("a")
    assert cancels(hub.come("a")) == [("a", "j", 1)]
    hub.report("a", "j", 1, "cancelled", reason="by the hub")
    assert (hub.job("j").state, hub.job("j").reason) == ("cancelled", "enough")

    hub = placed("a")
    hub.go("a")
    hub.tell(JobUnwanted(job="j", reason="enough"))
    hub.wait(PATIENCE)
    assert hub.job("j").state == "cancelled"
    assert cancels(hub.come("a")) == [("a", "j", 1)]

    hub = Hub("a")
    hub.submit("j")
    hub.tell(JobUnwanted(job="j", by="me"))
    assert (hub.job("j").state, hub.job("j").reason) == ("cancelled", "cancelled by me")
    assert hub.come("a") == []


def test_sites_texts_are_kept_without_terminal_characters() -> None:
    """A site's texts are kept without the characters that a terminal obeys."""
    hub = placed("a")
    hub.report("a", "j", 1, "failed", reason="\x1b[2Jgone\n" + "x" * 5000)
    assert hub.job("j").reason.startswith("\\x1b[2Jgone\\nxxx")
    assert len(hub.job("j").reason) == 2000


def test_job_cancelled_at_its_site_is_cancelled_at_the_hub() -> None:
    hub = placed("a")
    hub.report("a", "j", 1, "cancelled", reason="by a person")
    assert (hub.job("j").state, hub.job("j").reason) == ("cancelled", "by a person")


def test_hub_repeats_attempts_and_patience_after_kill_9() -> None:
    """After kill -9 the hub asks again in the same attempt and gives sites their patience."""
    hub = Hub("a", "b")
    hub.come("a")
    hub.submit("j")  # the offer is in the journal, and the answer is not
    hub.now += 5 * PATIENCE
    hub.restart()
    hub.come("b")
    assert hub.wait(PATIENCE - 1) == []
    assert hub.come("a") == [offer("a", "j", 1)]
    hub.report("a", "j", 1, "running")
    hub.restart()
    assert hub.job("j").state == "placed"
    assert hub.come("a") == [offer("a", "j", 1)]


def test_higher_priorities_go_first_to_controllers_with_room() -> None:
    hub = Hub("a")
    for name, priority in (("low", 0), ("high", 5), ("third", None)):
        placeable = PlaceableJob(controller="training", roles=("trainer",), data_sets=())
        asked = PlacementAsked(job=name, kind="rounds", placeable=placeable, config="", priority=priority)
        hub.tell(JobAsked(asked=asked))
    assert [one.job for _, one in hub.come("a") if isinstance(one, OfferJob)] == ["high", "low"]
    assert "has 2 jobs and runs 2 at once" in hub.machine.choices["third"].why


def test_lines_bytes_are_kept_and_a_used_budget_lasts_a_day() -> None:
    hub = Hub("a", gb_per_day=1.0)
    hub.tell(LineCarried(site="a", day=7, nbytes=10**9))
    hub.come("a")
    assert hub.submit("j") == []
    assert "carried 1 GB today, of 1" in hub.machine.choices["j"].why
    hub.restart()
    hub.tell(LineCarried(site="a", day=7, nbytes=0))
    assert hub.machine.nbytes_today("a") == pytest.approx(10**9, rel=0.02)
    hub.come("a")
    assert hub.tell(LineCarried(site="a", day=8, nbytes=5)) == [offer("a", "j", 1)]


def test_a_site_that_the_hub_has_no_more_loses_its_jobs_at_once() -> None:
    hub = placed("a", "b")
    hub.policies = hub.policies[1:]
    hub.restart()
    hub.come("b")
    assert hub.job("j").site == "b"


def test_a_new_connection_of_a_site_replaces_the_old_one() -> None:
    hub = placed("a")
    before = hub.at["a"]
    sent = hub.come("a")
    assert sent[0] == ("", Close(before, "a has connected anew"))
    assert sent[1] == offer("a", "j", 1)
    hub.tell(Closed(before, "replaced"))
    hub.report("a", "j", 1, "finished")
    assert hub.job("j").state == "finished"


def test_a_journal_with_a_record_that_cannot_follow_is_refused() -> None:
    hub = placed("a")
    with pytest.raises(LocalProtocolError, match="submitted before"):
        hub.machine.book.apply(next(one for one in hub.journal if isinstance(one, PlacementAsked)))


def changing_state(hub: Hub, turn: int) -> None:
    hub.report("a", "j", 1, "running" if turn % 2 else "queued")


def there_and_away(hub: Hub, turn: int) -> None:
    if turn % 2:
        hub.come("a")
        hub.report("a", "j", 1, "running")
    else:
        hub.go("a")


def declining(hub: Hub, turn: int) -> None:
    if hub.job("j").is_at_site:
        hub.report("a", "j", hub.job("j").attempt, "declined", reason="it ends")


def without_an_answer(hub: Hub, turn: int) -> None:
    """Offers are not answered; attempts that were given up end."""
    for attempt in list(hub.job("j").strays):
        hub.report("a", "j", attempt, "absent")


@pytest.mark.parametrize("behave", [changing_state, there_and_away, declining, without_an_answer])
def test_alternating_site_does_not_grow_the_journal(
    behave: Callable[[Hub, int], None],
) -> None:
    """Once a second, for an hour; the job is fine again as soon as the site is."""
    hub = Hub("a", patience_s=0.5) if behave in (there_and_away, without_an_answer) else Hub("a")
    hub.come("a")
    hub.submit("j")
    if behave in (changing_state, there_and_away):
        hub.report("a", "j", 1, "running")
    before, turns = len(hub.journal), 3600
    for turn in range(turns):
        hub.wait(1.0)
        behave(hub, turn)
    lines = Counter(type(record).__name__ for record in hub.journal[before:])
    paced = lines["JobAccepted"] + lines["JobLost"] + lines["JobOffered"]
    assert paced <= BURST + turns / PACE_S + 1
    assert paced > BURST  # the site did alternate
    # Each offer or loss has one answer, or two: declined; returned; recalled and ended.
    assert lines.total() <= 3 * paced
    assert replay(hub.journal, PlacementBook()).jobs == hub.machine.book.jobs
    job = hub.job("j")
    for _ in range(3):
        hub.wait(PACE_S + REST_S)
        if hub.machine.sites["a"].news is None:
            hub.come("a")
        for attempt in list(job.strays):
            hub.report("a", "j", attempt, "absent")
        if job.is_at_site:
            hub.report("a", "j", job.attempt, "running")
    assert (job.state, job.state_there, hub.machine.state_there(job)) == ("placed", "running", "running")
    hub.report("a", "j", job.attempt, "finished")
    assert job.state == "finished"
    assert hub.machine.next_deadline() is None


def test_newest_state_is_shown_at_once_and_written_in_time() -> None:
    """The newest of many states is shown at once and written when it is time."""
    hub = placed("a")
    for turn in range(2 * BURST):
        hub.report("a", "j", 1, "running" if turn % 2 else "queued")
    hub.report("a", "j", 1, "cancelling", reason="a person cancels it")
    job, written = hub.job("j"), len(hub.journal)
    assert hub.machine.state_there(job) == "cancelling"
    assert job.state_there != "cancelling"
    due = hub.machine.next_deadline()
    assert due is not None
    assert hub.now < due <= hub.now + PACE_S
    hub.wait(due - hub.now)
    assert len(hub.journal) == written + 1
    assert job.state_there == "cancelling"
    assert hub.machine.next_deadline() is None


# --- jobs over several sites -----------------------------------------------------------------------------------------


def spread(*names: str) -> Hub:
    """A hub whose job w has its two parts at the first two sites; all of them are here."""
    hub = Hub(*names)
    for name in names:
        hub.come(name)
    assert hub.spread("w") == [offer(names[0], "w.1", 1), offer(names[1], "w.2", 1)]
    for number, name in enumerate(names[:2], 1):
        hub.report(name, f"w.{number}", 1, "running", name=f"w.{number}")
    assert hub.states("w", "w.1", "w.2") == ["placed"] * 3
    return hub


def test_parts_are_placed_together_once_there_are_enough_sites() -> None:
    hub = Hub("a", "b")
    hub.come("a")
    assert hub.spread("w") == []
    assert hub.machine.choices["w"].why == "1 of 2 sites can take a part now; b: it is away"
    assert hub.states("w", "w.1", "w.2") == ["waiting"] * 3
    assert hub.come("b") == [offer("a", "w.1", 1), offer("b", "w.2", 1)]
    assert hub.job("w").members == {"a": 1, "b": 2}


def test_hub_killed_between_part_records_offers_the_rest() -> None:
    """A hub that was killed between the records of the parts offers the rest."""
    hub = Hub("a", "b")
    hub.come("a")
    hub.come("b")
    hub.spread("w")
    for last in range(1, 4):  # job_spread alone, or with the offers of some parts
        again = Hub("a", "b")
        spread_at = next(at for at, one in enumerate(hub.journal) if isinstance(one, JobSpread))
        again.journal = hub.journal[: spread_at + last]
        again.restart()
        again.come("a")
        again.come("b")
        assert sorted(again.job("w").members.items()) == [("a", 1), ("b", 2)]
        assert again.states("w", "w.1", "w.2") == ["placed", "offered", "offered"]


def test_named_sites_get_the_parts_in_their_order() -> None:
    hub = Hub("a", "b", "c")
    for name in ("a", "b", "c"):
        hub.come(name)
    assert hub.spread("w", "c", "a") == [offer("c", "w.1", 1), offer("a", "w.2", 1)]
    hub = Hub("a", "b")
    assert hub.spread("w", "b", "a") == []
    assert hub.machine.choices["w"].why == "0 of 2 sites can take a part now; a: it is away; b: it is away"


def test_job_over_sites_ends_with_the_hubs_run() -> None:
    """A job over several sites ends with the hub's run and its parts by themselves."""
    hub = spread("a", "b")
    assert hub.end_run("w") == []
    assert (hub.job("w").state, hub.job("w").reason) == ("finished", "all rounds")
    hub.report("a", "w.1", 1, "finished")
    assert hub.wait(SETTLE_S - 1) == []
    assert cancels(hub.wait(1)) == [("b", "w.2", 1)]  # its site had the time to take the last version
    hub.report("b", "w.2", 1, "cancelled")
    assert hub.states("w", "w.1", "w.2") == ["finished", "finished", "cancelled"]
    assert hub.machine.next_deadline() is None
    assert hub.end_run("w", ok=False) == []
    assert hub.job("w").state == "finished"


def test_waiting_part_is_cancelled_when_the_run_is_over() -> None:
    """A part that waits at its site is cancelled as soon as the run is over."""
    hub = spread("a", "b")
    hub.report("b", "w.2", 1, "queued")
    assert cancels(hub.end_run("w")) == [("b", "w.2", 1)]


def test_cancelling_a_job_cancels_its_parts_at_once() -> None:
    hub = spread("a", "b")
    assert cancels(hub.tell(JobUnwanted(job="w", reason="enough"))) == [("a", "w.1", 1), ("b", "w.2", 1)]
    assert hub.states("w", "w.1", "w.2") == ["cancelling"] * 3
    hub.restart()  # and the hub's run is not there
    hub.end_run("w", ok=False, reason="enough")
    assert hub.job("w").state == "cancelled"
    assert cancels(hub.come("a")) == [("a", "w.1", 1)]
    hub.report("a", "w.1", 1, "cancelled")
    hub.wait(PATIENCE)
    assert hub.states("w.1", "w.2") == ["cancelled", "cancelled"]


def test_a_run_that_fails_has_its_parts_cancelled() -> None:
    hub = spread("a", "b")
    assert len(cancels(hub.end_run("w", ok=False, reason="NaN"))) == 2
    assert (hub.job("w").state, hub.job("w").reason) == ("failed", "NaN")
    assert "the job w is over: NaN" in hub.job("w.1").reason


def test_lost_part_waits_or_goes_to_a_site_without_a_part() -> None:
    hub = spread("a", "b")
    hub.go("a")
    assert hub.wait(PATIENCE) == []
    assert hub.states("w", "w.1", "w.2") == ["placed", "waiting", "placed"]
    assert "b: it has, or had, another part of this job (w.2)" in hub.machine.choices["w.1"].why
    assert hub.come("a") == [offer("a", "w.1", 1)]
    hub.report("a", "w.1", 1, "running")

    hub = spread("a", "b", "c")
    hub.go("a")
    assert hub.wait(PATIENCE) == [offer("c", "w.1", 2)]
    assert hub.job("w").members == {"a": 1, "b": 2, "c": 1}
    hub.report("c", "w.1", 2, "running")
    assert cancels(hub.come("a")) == [("a", "w.1", 1)]
    hub.report("a", "w.1", 1, "cancelled")
    assert hub.states("w", "w.1", "w.2") == ["placed"] * 3


def test_job_outlives_its_last_part_by_some_time() -> None:
    """A job goes on while one part does and ends some time after the last."""
    hub = spread("a", "b")
    hub.report("a", "w.1", 1, "failed", reason="site a differs from its hub")
    assert hub.wait(10 * SETTLE_S) == []
    assert hub.states("w", "w.1", "w.2") == ["placed", "failed", "placed"]
    hub.report("b", "w.2", 1, "failed", reason="disk full")
    hub.wait(SETTLE_S - 1)
    assert hub.job("w").state == "placed"
    hub.wait(1)
    assert hub.job("w").state == "failed"
    expected = "no site has a part of it any more: w.1 failed: site a differs from its hub; w.2 failed: disk full"
    assert hub.job("w").reason == expected

    hub = spread("a", "b")
    hub.report("a", "w.1", 1, "finished", reason="all rounds")
    hub.report("b", "w.2", 1, "cancelled", reason="by a person")
    hub.wait(SETTLE_S)
    assert hub.job("w").state == "finished"
    assert hub.job("w").reason.startswith("its sites have trained all rounds of theirs: w.1 finished")


def test_part_declined_for_good_fails_and_others_go_on() -> None:
    """A part that every site declines for good fails and the others go on."""
    hub = Hub("a", "b")
    hub.come("a")
    hub.come("b")
    hub.spread("w")
    hub.report("b", "w.2", 1, "running")
    assert hub.report("a", "w.1", 1, "declined", reason="no such file", lasting=True) == []
    assert hub.states("w", "w.1", "w.2") == ["placed", "failed", "placed"]
    assert hub.job("w.1").reason.startswith("no site takes it: a: no such file; b: it has, or had, another part")


def test_job_fails_when_too_few_sites_may_take_a_part() -> None:
    hub = Hub("a", "b")
    hub.spread("w")
    hub.policies = hub.policies[:1]
    hub.restart()
    hub.wait(1)
    assert hub.job("w").state == "failed"
    assert hub.job("w").reason == "too few sites take a part of it: 0 of 2 sites can take a part now; a: it is away"
    assert hub.states("w.1", "w.2") == ["cancelled", "cancelled"]


def test_part_cancelled_too_early_is_offered_to_no_site() -> None:
    """A part that was cancelled before there were enough sites is offered to none."""
    hub = Hub("a", "b")
    hub.spread("w")
    hub.tell(JobUnwanted(job="w.1", reason="enough"))
    assert hub.come("b") == [offer("b", "w.2", 1)]
    assert hub.states("w", "w.1", "w.2") == ["placed", "cancelled", "offered"]

    hub = Hub("a", "b")
    hub.spread("w")
    hub.tell(JobUnwanted(job="w.1", reason="enough"))
    hub.tell(JobUnwanted(job="w.2", reason="enough"))
    assert hub.come("b") == []
    hub.wait(SETTLE_S)
    assert hub.job("w").state == "failed"
