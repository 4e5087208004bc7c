"""The common part of the books of a site and of a hub."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from planetary.core.errors import ConflictError, LocalProtocolError, UserError
from planetary.site.book import Book, JournalFile, free_name, require_folder_name
from planetary.site.jobs import CancelRequested, JobBook, JobEnded, JobStarted, JobSubmitted, SiteRecord
from planetary.site.placement.choice import PlaceableJob
from planetary.site.placement.placed_jobs import (
    JobAccepted,
    JobOffered,
    PlacedJobEnded,
    PlacementAsked,
    PlacementBook,
    PlacementCancelled,
)


def site_book() -> JobBook:
    book = JobBook()
    book.apply(JobSubmitted(job="j", controller="training", kind="k", folder="f", config="", priority=0))
    book.apply(JobStarted(job="j"))
    return book


def hub_book() -> PlacementBook:
    book = PlacementBook()
    placeable = PlaceableJob(controller="training", roles=("trainer",), data_sets=())
    book.apply(PlacementAsked(job="j", kind="k", placeable=placeable, config=""))
    book.apply(JobOffered(job="j", attempt=1, site="s", why=""))
    book.apply(JobAccepted(job="j", attempt=1, state="running"))
    return book


BOOKS: list[tuple[Book[Any], Any, Any]] = [
    (site_book(), CancelRequested(job="j", reason="enough"), JobEnded(job="j", ok=True, reason="all rounds", t=9.0)),
    (
        hub_book(),
        PlacementCancelled(job="j", reason="enough"),
        PlacedJobEnded(job="j", state="finished", reason="all rounds", t=9.0),
    ),
]


@pytest.mark.parametrize(("book", "cancel", "end"), BOOKS, ids=["site", "hub"])
def test_cancelled_job_ends_with_the_reason_of_the_cancellation(book: Any, cancel: Any, end: Any) -> None:
    assert book.require_cancellable("j").state in ("running", "placed")
    book.apply(cancel)
    with pytest.raises(ConflictError, match="cannot be cancelled: it is cancelling"):
        book.require_cancellable("j")
    book.apply(end)
    job = book.named("j")
    assert (job.state, job.reason, job.ended_at, job.over) == ("cancelled", "enough", 9.0, True)
    with pytest.raises(LocalProtocolError, match="'finish' cannot happen in the state"):
        book.apply(end)
    with pytest.raises(UserError, match="there is no job 'x'; there are: j"):
        book.require_cancellable("x")
    with pytest.raises(LocalProtocolError, match="the job j was submitted before"):
        book.add(job)


def test_journal_keeps_appended_records_and_not_shown_ones(tmp_path: Path) -> None:
    path, book, times = tmp_path / "site.jsonl", JobBook(), iter(range(1, 9))
    journal: JournalFile[SiteRecord] = JournalFile(path, SiteRecord, book, lambda: float(next(times)))
    for name, put in (("a", journal.append), ("b", journal.show)):
        put(JobSubmitted(job=name, controller="training", kind="k", folder=name, config="", priority=0))
    with pytest.raises(LocalProtocolError, match="no job c was submitted"):
        journal.append(JobStarted(job="c"))
    assert [(job.job, job.submitted_at) for job in book.jobs.values()] == [("a", 1.0), ("b", 2.0)]
    journal.close()
    seen: list[SiteRecord] = []
    again = JobBook()
    JournalFile(path, SiteRecord, again, float, seen=lambda one: (seen.append(one), one)[1]).close()
    assert again.jobs == {"a": book.jobs["a"]}
    assert [one.t for one in seen] == [1.0]


def test_those_who_wait_are_woken_by_every_change() -> None:
    async def test() -> None:
        journal: JournalFile[SiteRecord] = JournalFile(None, SiteRecord, JobBook(), lambda: 1.0)
        waits = asyncio.ensure_future(journal.wait(60.0))
        await asyncio.sleep(0)
        journal.show(JobSubmitted(job="a", controller="", kind="k", folder="a", config="", priority=0))
        await asyncio.wait_for(waits, 5.0)
        await journal.wait(0.0)

    asyncio.run(test())


def test_names_are_numbered_where_they_are_taken() -> None:
    assert free_name("a", {"a", "a-2"}.__contains__) == "a-3"
    assert free_name("a", {"a"}.__contains__, mark=".") == "a.2"
    assert free_name("a", set[str]().__contains__) == "a"
    with pytest.raises(UserError, match=r"^run\.name: expected the name of one folder"):
        require_folder_name("../a", given=False)
    with pytest.raises(UserError, match=r"^name: expected"):
        require_folder_name("", given=True)
