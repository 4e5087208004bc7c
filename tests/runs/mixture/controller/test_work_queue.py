"""The queue of expert work: nothing is lost, nothing is done for two, and old work goes."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from planetary.core.errors import ResourceError, UserError
from planetary.runs.mixture.controller.work_queue import ExpertWork, Lease, QueueCounts, WorkQueue


def some(count: int, step: int = 0, version: int = 0) -> list[ExpertWork]:
    return [ExpertWork(layer, 0, step, (f"sketch-{step}-{layer}",), step, version) for layer in range(count)]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[WorkQueue]:
    with WorkQueue(tmp_path / "queue.sqlite", attempts=2) as made:
        yield made


def one(queue: WorkQueue, worker: str, now: float) -> Lease:
    (lease,) = queue.lease(worker, now=now, lease_s=10)
    return lease


def test_offering_twice_adds_once_and_work_comes_oldest_first(queue: WorkQueue) -> None:
    assert queue.offer(some(2, step=1)) == 2
    assert queue.offer([*some(2, step=1), *some(1, step=0)]) == 1
    leases = queue.lease("w", now=0, lease_s=10, limit=5)
    assert [(lease.work.step, lease.work.layer) for lease in leases] == [(0, 0), (1, 0), (1, 1)]
    assert leases[0].work.payloads == ("sketch-0-0",)
    assert queue.lease("v", now=1, lease_s=10) == []


def test_finished_work_is_the_owners_and_stays_finished(queue: WorkQueue) -> None:
    queue.offer([*some(1), ExpertWork(0, 1, 0, ("x",), 0, 0)])
    lease = one(queue, "w", 0)
    assert queue.finish(lease, "update")
    assert queue.finish(lease, "update")
    assert not queue.finish(lease, "another")
    assert queue.results(0) == [(lease.work, "update")]
    assert queue.results(1) == []
    assert queue.offer(some(1)) == 0
    assert queue.counts(100) == QueueCounts(ready=1, done=1)


def test_expired_lease_moves_and_the_late_result_is_void(
    queue: WorkQueue,
) -> None:
    """A lease that ran out goes to another worker and the first one's result no longer counts."""
    queue.offer(some(1))
    first = one(queue, "slow", 0)
    assert queue.lease("quick", now=9.9, lease_s=10) == []
    second = one(queue, "quick", 10)
    assert second.number == first.number + 1
    assert not queue.finish(first, "late")
    assert queue.finish(second, "good")
    assert queue.results(0) == [(first.work, "good")]


def test_a_late_result_counts_unless_the_work_is_leased_again(queue: WorkQueue) -> None:
    queue.offer(some(1))
    lease = one(queue, "w", 0)
    assert queue.counts(50) == QueueCounts(ready=1)
    assert queue.finish(lease, "late but there")
    assert queue.counts(50) == QueueCounts(done=1)


def test_work_fails_after_its_attempts(queue: WorkQueue) -> None:
    queue.offer(some(1))
    assert queue.give_up(one(queue, "w", 0))
    lease = one(queue, "v", 1)
    assert queue.give_up(lease)
    assert not queue.give_up(lease)
    assert queue.lease("u", now=2, lease_s=10) == []
    assert queue.counts(2) == QueueCounts(failed=1)
    assert queue.failed() == some(1)  # its owner is told once
    assert queue.failed() == []
    assert queue.is_over(some(1)[0])
    queue.offer(some(2))
    for now in (10, 30):
        (lease,) = queue.lease("w", now=now, lease_s=10)
        assert not queue.is_over(lease.work)
    assert queue.counts(50) == QueueCounts(failed=2)  # leases that ran out are attempts, too
    assert queue.failed() == some(2)[1:]


def test_work_that_is_over_is_not_leased_again(queue: WorkQueue) -> None:
    queue.offer(some(1))
    lease = one(queue, "w", 0)
    assert queue.give_up(lease, again=False)
    assert not queue.give_up(lease, again=False)
    assert queue.lease("v", now=1, lease_s=10) == []
    assert queue.counts(1) == QueueCounts(failed=1)
    assert queue.failed() == []  # the caller that ends it informs the owner
    assert queue.offer(some(1)) == 0


def test_repeated_step_replaces_unleased_work(queue: WorkQueue) -> None:
    queue.offer(some(3, version=4))
    assert queue.offer(some(1, version=3)) == 0
    assert queue.offer(some(1, version=5)) == 1
    assert queue.offer(some(1, version=5)) == 0
    first = one(queue, "w", 0)
    assert first.work.version == 5
    assert queue.offer(some(1, version=6)) == 0  # somebody has it
    assert queue.finish(first, "update")
    assert queue.offer(some(1, version=7)) == 0
    assert queue.results(0) == [(first.work, "update")]
    second = one(queue, "w", 0)
    assert queue.give_up(second, again=False)
    assert queue.offer([ExpertWork(1, 0, 0, ("again",), 0, 8)]) == 1
    again = one(queue, "w", 0)
    assert (again.work.version, again.work.payloads) == (8, ("again",))
    assert again.number > second.number
    assert not queue.finish(second, "late")


def test_a_queue_of_an_older_format_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE work (key TEXT PRIMARY KEY, payloads TEXT NOT NULL)")
        old.execute("INSERT INTO work VALUES ('0/0/0', 'x')")
    old.close()
    for offered in (1, 0):
        with WorkQueue(path) as queue:
            assert queue.offer(some(1)) == offered
            assert queue.counts(0) == QueueCounts(ready=1)


def test_old_work_is_dropped_unless_it_is_leased(queue: WorkQueue) -> None:
    for step in range(6):
        queue.offer(some(1, step))
    assert queue.finish(one(queue, "w", 0), "update")
    assert queue.give_up(one(queue, "w", 0), again=False)
    lease = one(queue, "w", 0)
    gone = queue.forget(ExpertWork(1, 1, 10, ("x",), 6, 0), 2)  # older than 4 by the run's count
    assert [work.step for work in gone] == [3]
    assert queue.counts(0) == QueueCounts(ready=2, leased=1)
    assert queue.finish(lease, "update")
    assert queue.forget(ExpertWork(1, 1, 10, ("x",), 6, 0), 2) == []  # its owner has the answer
    assert queue.counts(0) == QueueCounts(ready=2)


def test_work_is_forgotten_after_as_many_owner_steps(queue: WorkQueue) -> None:
    queue.offer(
        [ExpertWork(layer, owner, step, ("x",), 7, 0) for step in (0, 3) for owner in (0, 1) for layer in (0, 1)]
    )
    assert queue.add(ExpertWork(0, 1, 5, ("y",), 7, 0), keep=5) == [ExpertWork(0, 1, 0, ("x",), 7, 0)]
    assert queue.counts(0) == QueueCounts(ready=8)
    assert queue.add(ExpertWork(0, 1, 2, ("z",), 7, 0), keep=5) == []  # a composer that went back
    assert queue.counts(0) == QueueCounts(ready=9)


def test_adding_work_that_was_done_returns_it_as_over(queue: WorkQueue) -> None:
    (work,) = some(1)
    assert queue.add(work, keep=5) == []
    lease = one(queue, "w", 0)
    assert queue.add(work, keep=5) == []
    queue.finish(lease, "update")
    assert queue.add(work, keep=5) == [work]


def test_a_new_life_takes_all_leases_back(tmp_path: Path) -> None:
    with WorkQueue(tmp_path / "q", attempts=1) as first:
        first.offer(some(4))
        first.finish(one(first, "w", 0), "update")
        first.give_up(one(first, "w", 0))
        lease = one(first, "w", 0)
    with WorkQueue(tmp_path / "q", attempts=1) as second:
        assert second.begin() == some(4)[2:]
        assert not second.finish(lease, "for nobody")
        again = one(second, "v", 1)
        assert again.work == lease.work
        assert again.number > lease.number
        assert second.waiting() == some(4)[2:]


def test_committed_work_survives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    first = WorkQueue(path)
    first.offer(some(3))
    lease = one(first, "w", 0)
    first.finish(lease, "update")
    one(first, "w", 1)
    # Not closed: as a killed process would leave it.
    with WorkQueue(path) as second:
        assert second.counts(2) == QueueCounts(ready=1, leased=1, done=1)
        assert second.results(0) == [(lease.work, "update")]
    first.close()


def test_two_processes_on_one_file_never_hold_the_same_work(tmp_path: Path) -> None:
    rng = random.Random(0)
    with WorkQueue(tmp_path / "q", attempts=100) as a, WorkQueue(tmp_path / "q", attempts=100) as b:
        a.offer(some(6))
        held: dict[str, Lease] = {}
        done: list[str] = []
        now = 0.0
        while len(done) < 6:
            now += rng.random()
            queue, name = rng.choice([(a, "a"), (b, "b")])
            for lease in queue.lease(name, now=now, lease_s=3, limit=2):
                earlier = held.get(lease.work.key)
                assert earlier is None or earlier.until <= now
                held[lease.work.key] = lease
            for key, lease in list(held.items()):
                if lease.worker == name and rng.random() < 0.6 and queue.finish(lease, key):
                    done.append(key)
                    del held[key]
        assert sorted(done) == sorted(w.key for w in some(6))
        assert {result for _, result in a.results(0)} == set(done)


def test_a_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot open in the queue"):
        WorkQueue(tmp_path / "no" / "folder" / "q")
    (tmp_path / "text").write_text("this is no database, and it is long enough to be recognised as none" * 30)
    with pytest.raises(ResourceError, match="queue"):
        WorkQueue(tmp_path / "text")
    with pytest.raises(UserError, match="at least once"):
        WorkQueue(tmp_path / "q", attempts=0)
