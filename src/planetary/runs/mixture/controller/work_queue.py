"""The queue between composers and expert workers (PARALLAX, 14.3): durable, versioned, retryable, idempotent.

Work is about the experts of one layer: which sketches, in which version. It names payloads by digest; the bytes lie in
the payload store. A composer offers work and never waits. A worker leases it, and a lease that runs out gives the work
to another worker. One SQLite file holds everything, so the syncer that embeds it goes on after a crash where it was.
The queue has no clock: every call passes the time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from planetary.core.errors import ResourceError, UserError

_FORMAT = 3
"""Raised whenever the table changes. Work in an older one is dropped: the experts have moved on."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS work ("
    "key TEXT PRIMARY KEY, layer INTEGER NOT NULL, owner INTEGER NOT NULL, step INTEGER NOT NULL, "
    "progress INTEGER NOT NULL, version INTEGER NOT NULL, payloads TEXT NOT NULL, "
    "state TEXT NOT NULL DEFAULT 'ready', holder TEXT NOT NULL DEFAULT '', "
    "lease INTEGER NOT NULL DEFAULT 0, until REAL NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, "
    "result TEXT NOT NULL DEFAULT '', told INTEGER NOT NULL DEFAULT 0)",
    "CREATE INDEX IF NOT EXISTS by_state ON work (state, progress)",
)
_WORK = "layer, owner, step, payloads, progress, version"


class ExpertWork(msgspec.Struct, frozen=True):
    """Experts of one layer of one owner, to be improved with the sketches of one step.

    Attributes:
        layer, owner, step: which; owners count steps of their own.
        payloads: sha256 of the sketches, in the composers' order.
        progress: of the run at that step, by which work of several owners is older or newer.
        version: of these experts on their owner in that step. Other owners' sketches of the same work know these
            experts by their surrogates only.
    """

    layer: int
    owner: int
    step: int
    payloads: tuple[str, ...]
    progress: int
    version: int

    @property
    def key(self) -> str:
        """The identity of work: offers with equal keys are the same work."""
        return f"{self.step}/{self.owner}/{self.layer}"


class Lease(msgspec.Struct, frozen=True):
    """Work a worker holds until `until`. `number` tells this lease from earlier ones of the same work."""

    work: ExpertWork
    worker: str
    number: int
    until: float


class QueueCounts(msgspec.Struct, frozen=True):
    """How much work is in each state."""

    ready: int = 0
    leased: int = 0
    done: int = 0
    failed: int = 0


class WorkQueue:
    """The queue of expert work. One thread at a time; several processes may have the same file open.

    Args:
        path: of the SQLite file; made if it is not there.
        attempts: leases of one piece of work before it counts as failed.
        busy_s: how long to wait for another process that is writing.
        durable: whether a commit survives a power cut.

    Raises:
        ResourceError: the file cannot be opened or written.
    """

    def __init__(self, path: Path | str, *, attempts: int = 3, busy_s: float = 5.0, durable: bool = True) -> None:
        if attempts < 1:
            raise UserError(f"work is tried at least once, found attempts = {attempts}")
        self._attempts = attempts
        self._path = str(path)
        try:
            self._db = sqlite3.connect(self._path, timeout=busy_s, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")  # readers do not block the writer
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
            with self._writing("open"):
                (found,) = self._db.execute("PRAGMA user_version").fetchone()
                if found != _FORMAT:
                    self._db.execute("DROP TABLE IF EXISTS work")
                    self._db.execute(f"PRAGMA user_version = {_FORMAT}")
                for statement in _SCHEMA:
                    self._db.execute(statement)
        except sqlite3.Error as error:
            raise self._failed("open", error) from error

    def __enter__(self) -> WorkQueue:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._db.close()

    def offer(self, work: Iterable[ExpertWork]) -> int:
        """Add work and return how much of it is new: work offered before, done or not, is left as it is.

        But work neither leased nor done gives way to an offer with newer experts: the composer has repeated that step.
        """
        rows = [(w.key, w.layer, w.owner, w.step, " ".join(w.payloads), w.progress, w.version) for w in work]
        added = 0
        with self._writing("offer work"):
            for row in rows:
                done = self._db.execute(
                    f"INSERT INTO work (key, {_WORK}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                    "payloads = excluded.payloads, progress = excluded.progress, version = excluded.version, "
                    "state = 'ready', attempts = 0, told = 0 "
                    "WHERE state IN ('ready', 'failed') AND excluded.version > version",
                    row,
                )
                added += done.rowcount
        return added

    def lease(
        self, worker: str, *, now: float, lease_s: float, limit: int = 1, busy: Collection[tuple[int, int]] = ()
    ) -> list[Lease]:
        """Return up to `limit` pieces of work for `worker`: the oldest that is ready or whose lease ran out.

        `busy`: owners and layers whose experts are being improved already; two updates of the same version would not
        both count.
        """
        leases = []
        with self._writing("lease work"):
            self._expire(now)
            rows = self._db.execute(
                f"SELECT key, lease, {_WORK} FROM work WHERE state = 'ready' ORDER BY progress, step, owner, layer"
            )
            rows = list(islice((row for row in rows if (row[3], row[2]) not in busy), limit))
            for key, number, *row in rows:
                self._db.execute(
                    "UPDATE work SET state = 'leased', holder = ?, lease = ?, until = ?, attempts = attempts + 1 "
                    "WHERE key = ?",
                    (worker, number + 1, now + lease_s, key),
                )
                leases.append(Lease(_work(row), worker, number + 1, now + lease_s))
        return leases

    def finish(self, lease: Lease, result: str) -> bool:
        """Record the digest of a lease's result; return whether it counts.

        It does unless another worker has leased the work since, even if the lease has run out: the result is there.
        Ending twice with the same result counts twice and changes nothing.
        """
        with self._writing("finish work"):
            found = self._db.execute(
                "SELECT state, holder, lease, result FROM work WHERE key = ?", (lease.work.key,)
            ).fetchone()
            if found is None or (found[1], found[2]) != (lease.worker, lease.number):
                return False
            if found[0] == "done":
                return found[3] == result
            self._db.execute("UPDATE work SET state = 'done', result = ? WHERE key = ?", (result, lease.work.key))
        return True

    def give_up(self, lease: Lease, *, again: bool = True) -> bool:
        """Return work a worker cannot do; another may try, until the attempts are used up.

        `again` False: no other worker tries, as the subject is over; the owner knows that (see `failed`).
        """
        with self._writing("give work up"):
            done = self._db.execute(
                "UPDATE work SET state = CASE WHEN attempts >= ? THEN 'failed' ELSE 'ready' END, holder = '', "
                "told = ? WHERE key = ? AND state = 'leased' AND holder = ? AND lease = ?",
                (self._attempts if again else 0, not again, lease.work.key, lease.worker, lease.number),
            )
        return done.rowcount == 1

    def failed(self) -> list[ExpertWork]:
        """Return work without attempt left, each once: the owners wait for an answer."""
        with self._writing("look for failed work"):
            rows = self._db.execute(f"SELECT {_WORK} FROM work WHERE state = 'failed' AND NOT told").fetchall()
            if rows:
                self._db.execute("UPDATE work SET told = 1 WHERE state = 'failed'")
        return [_work(row) for row in rows]

    def is_over(self, work: ExpertWork) -> bool:
        """Whether work was done or has failed, so offering it again comes to nothing."""
        with self._reading():
            found = self._db.execute("SELECT state FROM work WHERE key = ?", (work.key,)).fetchone()
        return found is not None and found[0] in {"done", "failed"}

    def results(self, owner: int) -> list[tuple[ExpertWork, str]]:
        """Return an owner's finished work with the results' digests, oldest first."""
        with self._reading():
            rows = self._db.execute(
                f"SELECT result, {_WORK} FROM work WHERE state = 'done' AND owner = ? ORDER BY step, layer",
                (owner,),
            ).fetchall()
        return [(_work(row), result) for result, *row in rows]

    def add(self, work: ExpertWork, *, keep: int) -> list[ExpertWork]:
        """Offer work and remove older work; return the removed work that owners wait for.

        `keep`: Steps, of the run and of the owner, by which older work may lie back; old output gradients mislead
        (12.10).
        """
        over = [] if self.offer([work]) or not self.is_over(work) else [work]
        return over + self.forget(work, keep)

    def forget(self, work: ExpertWork, keep: int) -> list[ExpertWork]:
        """Remove unleased work, `keep` steps older than `work` or more by the owner's count, where owner and layer are
        the same, or more by the run's; return the removed work, neither done nor failed.
        """
        old = "state != 'leased' AND (progress < ? OR (owner = ? AND layer = ? AND step <= ?))"
        bounds = (work.progress - keep, work.owner, work.layer, work.step - keep)
        with self._writing("forget old work"):
            rows = self._db.execute(f"SELECT {_WORK} FROM work WHERE state = 'ready' AND {old}", bounds).fetchall()
            self._db.execute(f"DELETE FROM work WHERE {old}", bounds)
        return [_work(row) for row in rows]

    def begin(self) -> list[ExpertWork]:
        """Take all leases back, as results of an earlier life are lost; return the work that waits."""
        with self._writing("begin"):
            self._db.execute(
                "UPDATE work SET state = 'ready', holder = '', attempts = attempts - 1 WHERE state = 'leased'"
            )
        return self.waiting()

    def waiting(self) -> list[ExpertWork]:
        """Return work that is neither done nor has failed, oldest first."""
        with self._reading():
            rows = self._db.execute(
                f"SELECT {_WORK} FROM work WHERE state IN ('ready', 'leased') ORDER BY progress, step, owner, layer"
            ).fetchall()
        return [_work(row) for row in rows]

    def counts(self, now: float) -> QueueCounts:
        """Return how much work is in each state at time `now`."""
        with self._writing("count work"):
            self._expire(now)
            rows = self._db.execute("SELECT state, COUNT(*) FROM work GROUP BY state").fetchall()
        return QueueCounts(**dict(rows))

    def _expire(self, now: float) -> None:
        self._db.execute(
            "UPDATE work SET state = CASE WHEN attempts >= ? THEN 'failed' ELSE 'ready' END "
            "WHERE state = 'leased' AND until <= ?",
            (self._attempts, now),
        )

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """One transaction: all of it is on the disk afterwards, or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(what, error) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._failed("read results", error) from error

    def _failed(self, what: str, error: Exception) -> ResourceError:
        return ResourceError(f"cannot {what} in the queue {self._path}: {error}; look at the disk it lies on")


def _work(row: Sequence[Any]) -> ExpertWork:
    """A row of the columns `_WORK`."""
    layer, owner, step, payloads, progress, version = row
    return ExpertWork(layer, owner, step, tuple(payloads.split()), progress, version)
