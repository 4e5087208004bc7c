"""The hub's own runs of jobs over several sites: begun, continued and ended as the hub's book says.

`OuterRuns.look` compares existing runs with the book, so a killed hub resumes from the journal alone: no other record
tells of a begun run. A run whose sites have changed is stopped and goes on with the new ones, as a hub's run does an
operator resumes with other sites.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from planetary.core.configuration.schema import Config
from planetary.core.errors import PlanetaryError
from planetary.fleet.protocol import messages as m
from planetary.net.connection import Connection
from planetary.net.handshake import answer_hello
from planetary.net.session import Refused
from planetary.site.hosted_run import RunOutcome, outcome_of
from planetary.site.placement.job_hub import JobHub
from planetary.site.placement.placed_jobs import PlacedJob, PlacementState
from planetary.wire.streams import refuse_tensors

log = logging.getLogger(__name__)

DONE_S = 10.0
"""Limit for a site to take the message of the run's end."""


class OuterHost(Protocol):
    """The process with the runs."""

    @property
    def is_stopping(self) -> bool:
        """Whether it is about to end."""
        ...

    async def run_outer(self, job: PlacedJob, config: Config) -> RunOutcome:
        """Run a job's outer run to the end, or go on with it. Raises `UserError` for a configuration it cannot have."""
        ...

    def stop_outer(self, name: str, reason: str) -> None:
        """End a run in order, if it is there; it can go on."""
        ...

    async def attend_outer(self, name: str, connection: Connection, hello: m.Hello) -> None:
        """Attend a site of a run until the connection ends. Raises as `Connection.receive`."""
        ...


class OuterRuns:
    """The hub's own runs. Methods are called on the event loop."""

    def __init__(self, host: OuterHost, hub: JobHub, connect_s: float) -> None:
        """`connect_s`: limit of a handshake."""
        self._host, self._hub, self._connect_s = host, hub, connect_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._members: dict[str, Mapping[str, int]] = {}  # members of each run at the start

    def look(self) -> None:
        """Begin, stop and end runs, as the book says. Called every moment."""
        for job in [one for one in self._hub.book.jobs.values() if one.parts]:
            wanted, is_there = job.state is PlacementState.PLACED, job.job in self._tasks
            if wanted and not is_there and not self._host.is_stopping:
                self._begin(job)
            elif wanted and is_there and self._members[job.job] != job.members:
                self._host.stop_outer(job.job, f"the run goes on with other sites: {', '.join(job.members)}")
            elif is_there and not wanted:
                self._host.stop_outer(job.job, job.reason or f"the job is {job.state.value}")
            elif job.state is PlacementState.CANCELLING and not is_there:
                self._hub.end_outer_run(job.job, ok=False, reason=job.reason)

    async def finish(self) -> None:
        """Wait until no run is left; the process ends."""
        while self._tasks:
            await asyncio.wait(set(self._tasks.values()))

    def _begin(self, job: PlacedJob) -> None:
        self._members[job.job] = dict(job.members)
        run = self._run(job)
        self._tasks[job.job] = asyncio.get_running_loop().create_task(run, name=f"outer run of {job.job}")

    async def _run(self, job: PlacedJob) -> None:
        try:
            end = await outcome_of(self._run_here(job), job.job)
        finally:
            del self._tasks[job.job]
        restarts = not end.ok and job.state is PlacementState.PLACED and self._members[job.job] != job.members
        if not restarts and (end.ok or not self._host.is_stopping):  # else it goes on
            try:
                self._hub.end_outer_run(job.job, ok=end.ok, reason=end.reason)
            except PlanetaryError as error:  # the journal is lost: the next look at the hub ends the process
                log.error("the end of the run of %s could not be written: %s", job.job, error)

    async def _run_here(self, job: PlacedJob) -> RunOutcome:
        return await self._host.run_outer(job, self._hub.outer_config(job))

    # --- sites ------------------------------------------------------------------------------------------------

    async def attend(self, connection: Connection, hello: m.Hello) -> None:
        """Attend the uplink of a site, whose greeting names a run, until the connection ends."""
        job = self._hub.book.jobs.get(hello.run)
        if job is not None and job.state is PlacementState.FINISHED:
            await self._dismiss(connection, job.reason)
            return
        joined = job is not None and job.job in self._tasks and hello.worker in self._members[job.job]
        if job is not None and joined:

            async def attend(connection: Connection, hello: m.Hello) -> None:
                await self._host.attend_outer(hello.run, connection, hello)

            await self._hub.attend_uplink(connection, hello, attend)
            return
        if job is None or not job.parts:
            why = f"the hub {self._hub.book.hub} has no job {hello.run!r} over several sites"
        elif job.over:
            why = f"the job {job.job} is {job.state.value}: {job.reason}"  # the part is cancelled over the site's link
        else:
            why = f"the hub's run of {job.job} does not have {hello.worker} yet"
        await answer_hello(connection, Refused(code="busy", reason=why, retry=True), self._connect_s)

    async def _dismiss(self, connection: Connection, reason: str) -> None:
        """Tell a site, away at the end of its run, of that end."""
        welcome = m.Welcome(run=self._hub.book.hub, heartbeat_s=self._connect_s, silent_after_s=2 * self._connect_s)
        if await answer_hello(connection, welcome, self._connect_s, refuse_tensors):
            async with asyncio.timeout(DONE_S):
                await connection.send(m.Shutdown(reason=reason, ok=True, kind="done"))
            await connection.close("the run is over")
