"""The workers of a site: their connections, and the runs that they are placed with.

Decisions are those of `WorkerScheduler` (which worker for which run); this module carries them out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from planetary.core.configuration.schema import Timings
from planetary.core.errors import ConflictError, PlanetaryError, UserError
from planetary.fleet.protocol import messages as m
from planetary.machine.events import Event, Tick
from planetary.net.connection import Connection
from planetary.net.handshake import answer_hello
from planetary.site.book import JournalFile
from planetary.site.config import CONTROLLERS
from planetary.site.hosted_run import HostedRun
from planetary.site.jobs import (
    JobBook,
    SiteRecord,
    WorkerAssigned,
    WorkerDrained,
    WorkerMoved,
    WorkerReleased,
)
from planetary.site.worker_scheduler import (
    IDLE,
    Assign,
    Drain,
    PlaceWorker,
    Recall,
    RunOver,
    RunWants,
    WorkerCame,
    WorkerScheduler,
    WorkerWent,
)
from planetary.wire.streams import refuse_tensors

log = logging.getLogger(__name__)


class WorkersHost(Protocol):
    """The site, as far as its workers need it."""

    @property
    def book(self) -> JobBook: ...

    @property
    def journal(self) -> JournalFile[SiteRecord]: ...

    @property
    def runs(self) -> Mapping[str, HostedRun]:
        """Those that run, by job."""
        ...


class SitePeer(msgspec.Struct):
    """A connection of a worker or supervisor.

    Attributes:
        run: that attends it; `IDLE`: the site itself does.
    """

    connection: Connection
    hello: m.Hello
    run: str = IDLE


class SiteWorkers:
    """The workers of a site. Methods are called on the event loop.

    Attributes:
        peers: connections of workers and supervisors.
        scheduler: places workers.
    """

    def __init__(self, host: WorkersHost, name: str, timings: Timings, *, is_alone: bool) -> None:
        """Begin without workers.

        Args:
            host: the site.
            name: of the site.
            timings: of peers no run attends.
            is_alone: whether the site has one run, which has all workers.
        """
        self._host, self._name, self._timings, self._is_alone = host, name, timings, is_alone
        self.peers: list[SitePeer] = []
        self.scheduler = WorkerScheduler()
        self._closing: set[asyncio.Task[None]] = set()

    def restore(self) -> None:
        """Take the drained and assigned workers of the site's journal."""
        for worker in self._host.book.drained:
            self._tell(Drain(worker, True))
        for worker, controller in self._host.book.assigned.items():
            self._tell(Assign(worker, controller))

    def over(self, run: str) -> None:
        """Take the workers from a run that is over."""
        self._tell(RunOver(run))

    async def finish(self) -> None:
        """Wait until the connections that are being closed are."""
        while self._closing:
            await asyncio.wait(set(self._closing))

    async def dismiss_idle(self, reason: str) -> None:
        """Tell the peers that no run attends that the only run is over."""
        for peer in [one for one in self.peers if one.run == IDLE]:
            with contextlib.suppress(PlanetaryError, TimeoutError):
                async with asyncio.timeout(self._timings.shutdown_s):
                    await peer.connection.send(m.Shutdown(reason=reason))

    def hellos(self) -> Sequence[tuple[m.Hello, str]]:
        """Return the greetings of the workers that are here, each with the run the worker works for."""
        here = (one.hello for one in self.peers if one.hello.role == "worker" and not one.hello.trial)
        return [(hello, self.scheduler.run_of(hello.worker)) for hello in here]

    def workers_of(self, run: str) -> Sequence[str]:
        """Return the workers that work for a run."""
        return [one.worker for one in self.scheduler.workers.values() if one.at == run]

    def drain(self, worker: str, *, by: str = "") -> None:
        """Keep a worker from every run from the end of the current task on. Raises `UserError` for an unknown one."""
        self.require_worker(worker)
        self._host.journal.append(WorkerDrained(worker=worker, by=by))
        self._tell(Drain(worker, True))

    def release(self, worker: str, *, by: str = "") -> None:
        """Let a drained worker take part again."""
        self.require_worker(worker)
        self._host.journal.append(WorkerReleased(worker=worker, by=by))
        self._tell(Drain(worker, False))

    def assign(self, worker: str, controller: str, *, by: str = "") -> None:
        """Let a worker work for one controller only; "": for any."""
        self.require_worker(worker)
        if controller not in ("", *CONTROLLERS):
            raise UserError(f"controller: expected one of {', '.join(CONTROLLERS)} or none, found {controller!r}")
        self._host.journal.append(WorkerAssigned(worker=worker, controller=controller, by=by))
        self._tell(Assign(worker, controller))

    def restart(self, worker: str, *, by: str = "") -> None:
        """Replace a worker's process now. Raises `ConflictError` unless a run has it."""
        self.require_worker(worker)
        run = self._host.runs.get(self.scheduler.run_of(worker))
        if run is None:
            raise ConflictError(
                f"worker {worker} works for no run now, so that nothing of it can hang", code="worker_idle"
            )
        run.gateway.restart_worker(worker, f"restarted by {by}" if by else "restarted by the operator")

    def require_worker(self, worker: str) -> None:
        """Raise `UserError` unless a worker is known."""
        names = list(self.scheduler.workers)
        if worker not in names and worker not in self._host.book.drained:
            raise UserError(f"there is no worker {worker!r}; there are: {', '.join(names) or 'none'}")

    def look(self) -> None:
        """Pass the present needs of the runs to the scheduler."""
        for name, run in self._host.runs.items():
            controller = run.gateway.controller
            if controller is None and not self._is_alone:
                continue  # it is being prepared, and has nothing for a worker
            if run.gateway.ended_at is not None and not self._is_alone:
                self._tell(RunOver(name))  # it writes the report, which takes no worker
                continue
            job, demand = self._host.book.jobs[name], run.gateway.demand
            banned = frozenset(controller.membership.banned) if controller is not None else frozenset()
            if run.gateway.ended_at is None:
                self._tell(
                    RunWants(
                        run=name,
                        controller=job.controller,
                        priority=job.priority,
                        least=demand.least,
                        most=demand.most,
                        roles=run.kind.roles,
                        without=frozenset() if self._is_alone else banned,
                    )
                )
        self._tell(Tick())

    def _tell(self, event: Event) -> None:
        """Pass an event to the scheduler, and carry out the instructions."""
        for instruction in self.scheduler.handle(event, self._now()):
            match instruction:
                case PlaceWorker():
                    self._place(instruction)
                case Recall():
                    log.info("worker %s leaves %s: %s", instruction.worker, instruction.run, instruction.why)
                    run = self._host.runs.get(instruction.run)
                    if run is not None:
                        run.gateway.let_go(instruction.worker, instruction.why, instruction.kind)

    def _place(self, place: PlaceWorker) -> None:
        if place.run != place.source and not self._is_alone:
            self._host.journal.append(
                WorkerMoved(worker=place.worker, source=place.source, target=place.run, why=place.why)
            )
            log.info("worker %s works for %s: %s", place.worker, place.run or "no run", place.why or "it is idle")
        for peer in self.peers:
            if peer.hello.worker == place.worker and peer.run != place.run:
                self._dial_again(peer, f"for {place.run}" if place.run else "it is idle")

    def _dial_again(self, peer: SitePeer, why: str) -> None:
        """End a connection whose peer is placed elsewhere when it comes again."""
        task = asyncio.get_running_loop().create_task(peer.connection.close(f"dial again: {why}"))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def attend(self, connection: Connection, hello: m.Hello) -> None:
        """Attend a worker or supervisor until the connection ends."""
        if hello.role == "worker":
            before = [one for one in self.peers if one.hello.role == "worker" and one.hello.worker == hello.worker]
            if not any(one.hello.identity != hello.identity for one in before):
                self._tell(WorkerCame(worker=hello.worker, roles=hello.roles, trial=hello.trial))
        peer = SitePeer(connection, hello, self.scheduler.run_of(hello.worker))
        is_placed = peer.run in self._host.runs
        if not is_placed:
            peer.run = self._run_that_refuses(hello)
        self.peers.append(peer)
        try:
            if peer.run != IDLE:
                if is_placed:
                    self._follow(hello.worker)
                await self._host.runs[peer.run].gateway.attend(connection, hello)
            else:
                await self._wait(connection)
        finally:
            self.peers.remove(peer)
            others = any(one.hello.role == "worker" and one.hello.worker == hello.worker for one in self.peers)
            if hello.role == "worker" and not others:
                self._tell(WorkerWent(hello.worker))

    def _run_that_refuses(self, hello: m.Hello) -> str:
        """Return the run that tells a worker it has no role for it; `IDLE` where a later job may have one."""
        if not self._is_alone or not hello.roles:
            return IDLE
        lacking = (
            name for name, run in self._host.runs.items() if run.kind.roles and not {*run.kind.roles} & {*hello.roles}
        )
        return next(lacking, IDLE)

    def _follow(self, worker: str) -> None:
        """Have a worker's supervisor go where it is."""
        run = self.scheduler.run_of(worker)
        for peer in self.peers:
            if peer.hello.worker == worker and peer.run != run:
                self._dial_again(peer, f"for {run}" if run else "its worker is idle")

    async def _wait(self, connection: Connection) -> None:
        """Keep a peer no run uses; it goes when it is placed."""
        timings = self._timings
        welcome = m.Welcome(run=self._name, heartbeat_s=timings.heartbeat_s, silent_after_s=timings.silent_after_s)
        if await answer_hello(connection, welcome, timings.connect_s, refuse_tensors):
            while True:
                await connection.receive()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
