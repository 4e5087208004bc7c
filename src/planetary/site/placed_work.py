"""A site's jobs of the hub: offers are taken, cancelled at once, and every change is reported over the link."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from planetary.core.configuration.schema import Config
from planetary.core.errors import ConflictError, PlanetaryError, UserError
from planetary.fleet.gateway.run_files import has_run
from planetary.fleet.shell.system import SYSTEM, System
from planetary.site.config import CONTROLLERS, Controllers
from planetary.site.hosted_run import HostedRun
from planetary.site.jobs import HubAttempt, Job, JobBook, JobState
from planetary.site.placement.hub_link import EndJob, HubLink, HubLinkOptions, TakeJob
from planetary.site.placement.messages import ControllerRoom, JobReport, OfferJob, SiteNews, WorkerGroup
from planetary.site.site_workers import SiteWorkers
from planetary.site.submission import config_of_tables
from planetary.site.worker_scheduler import IDLE

log = logging.getLogger(__name__)

DEVICES_S = 5.0
"""How often the devices of workers are looked up, of which only their runs know."""


class JobHost(Protocol):
    """The site, as far as jobs of a hub need it."""

    @property
    def book(self) -> JobBook: ...

    @property
    def runs(self) -> Mapping[str, HostedRun]:
        """Those that run, by job."""
        ...

    @property
    def workers(self) -> SiteWorkers: ...

    def submit(
        self, config: Config, *, by: str, name: str, priority: int | None, resume: bool, placed: HubAttempt
    ) -> Job:
        """Accept a job. Raises `PlanetaryError`."""
        ...

    def cancel(self, name: str, *, by: str, reason: str) -> Job:
        """End a job at once. Raises `ConflictError` for one that has ended."""
        ...


class PlacedWork:
    """A site's jobs of the hub. Methods are called on the event loop.

    Attributes:
        link: to the hub.
    """

    def __init__(
        self,
        host: JobHost,
        options: HubLinkOptions,
        controllers: Controllers,
        data_sets: Mapping[str, str],
        system: System = SYSTEM,
    ) -> None:
        """Go on with the jobs of the site's journal."""
        self._host, self._controllers, self._data_sets = host, controllers, data_sets
        hub = host.book.hub
        self._reported: dict[str, JobState] = {}
        reports = [self._report_of(job) for job in host.book.jobs.values() if job.placed and job.placed.hub == hub]
        self.link = HubLink(options, hub, reports, self._carry_out, system)
        self._tasks: set[asyncio.Task[None]] = set()
        self._devices: dict[str, str] = {}
        self._devices_at = -DEVICES_S

    def start(self) -> None:
        """Begin to dial."""
        self.link.start()
        self.look()

    async def stop(self, reason: str) -> None:
        """Leave the hub."""
        await self.link.stop(reason)

    def look(self) -> None:
        """Report the site's capabilities and the jobs that have changed. Called every moment."""
        self.link.collect(self._news())
        for job in self._placed():
            if self._reported.get(job.job) is not job.state:
                self.link.report(self._report_of(job))

    def _placed(self) -> list[Job]:
        hub = self.link.machine.hub
        return [job for job in self._host.book.jobs.values() if job.placed is not None and job.placed.hub == hub]

    def _report_of(self, job: Job) -> JobReport:
        assert job.placed is not None
        self._reported[job.job] = job.state
        return JobReport(
            job=job.placed.job, attempt=job.placed.attempt, state=job.state.value, reason=job.reason, name=job.job
        )

    # --- offers -----------------------------------------------------------------------------------------------

    def _carry_out(self, instruction: TakeJob | EndJob) -> None:
        match instruction:
            case TakeJob():
                task = asyncio.get_running_loop().create_task(self._take(instruction.offer, instruction.hub))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case EndJob():
                self._end(instruction)

    async def _take(self, offer: OfferJob, hub: str) -> None:
        """Take a job, or decline it; whatever is wrong with it costs nothing else."""
        try:
            job = await self._submit(offer, HubAttempt(hub=hub, job=offer.job, attempt=offer.attempt))
        except PlanetaryError as error:
            self._decline(offer, str(error), lasting=isinstance(error, UserError))
        except Exception as error:
            log.exception("the job %s of the hub could not be taken", offer.job)
            self._decline(offer, f"internal error: {type(error).__name__}: {error}", lasting=True)
        else:
            log.info("took the job %s of the hub %s, as %s", offer.job, hub, job.job)
            self.link.report(self._report_of(job))

    def _decline(self, offer: OfferJob, reason: str, *, lasting: bool) -> None:
        log.warning("declined the job %s of the hub: %s", offer.job, reason)
        self.link.report(
            JobReport(job=offer.job, attempt=offer.attempt, state="declined", reason=reason, lasting=lasting)
        )

    async def _submit(self, offer: OfferJob, placed: HubAttempt) -> Job:
        tables = tomllib.loads(offer.config)
        tables["run"] = {**tables.get("run", {}), "name": offer.job}  # run folder; numbered where the name is taken
        if (federation := tables.get("federation", {})).get("run"):  # a part: its run meets the hub's on the link
            address = self.link.options.address
            upstream = {"hub": f"{address.host}:{address.port}", "site": self.link.options.name}
            tables["federation"] = {**federation, **upstream}
        config = await asyncio.to_thread(config_of_tables, tables, (), self._data_sets)
        book = self._host.book
        if (known := book.attempt_of(placed)) is not None:
            return known
        earlier = book.earlier_attempt_of(placed)
        # An attempt that was given up while this site was away has a run: the next one goes on with it.
        resume = (
            earlier is not None
            and book.holder_of(earlier.folder) is None
            and await asyncio.to_thread(has_run, Path(earlier.folder))
        )
        name = Path(earlier.folder).name if earlier is not None and resume else ""
        return self._host.submit(
            config, by=f"the hub {placed.hub}", name=name, priority=offer.priority, resume=resume, placed=placed
        )

    def _end(self, end: EndJob) -> None:
        placed = HubAttempt(hub=self.link.machine.hub, job=end.job, attempt=end.attempt)
        job = self._host.book.attempt_of(placed)
        if job is None:
            return  # the end was reported, and the journal is another job's
        try:
            self._host.cancel(job.job, by=f"the hub {placed.hub}", reason=end.reason)
        except ConflictError as error:  # it has ended by itself meanwhile
            log.info("%s", error)
        self.link.report(self._report_of(job))

    # --- capabilities -----------------------------------------------------------------------------------------

    def _news(self) -> SiteNews:
        hub, jobs = self.link.machine.hub, self._host.book.jobs.values()
        own = Counter(job.controller for job in jobs if not job.over and (job.placed is None or job.placed.hub != hub))
        controllers = tuple(
            ControllerRoom(controller=name, parallel=chosen.parallel, own=own[name])
            for name in CONTROLLERS
            if (chosen := self._controllers.of(name)).enabled
        )
        return SiteNews(controllers=controllers, workers=self._workers(), data_sets=tuple(sorted(self._data_sets)))

    def _workers(self) -> tuple[WorkerGroup, ...]:
        here = self._host.workers.hellos()
        self._look_up_devices({hello.worker for hello, _ in here})
        groups: Counter[tuple[str, str, str, tuple[str, ...], int]] = Counter()
        idle: Counter[tuple[str, str, str, tuple[str, ...], int]] = Counter()
        for hello, run in here:
            device = self._devices.get(hello.worker, "")
            key = (hello.backend, hello.target, device, hello.roles, hello.memory)
            groups[key] += 1
            idle[key] += run == IDLE
        return tuple(
            WorkerGroup(
                backend=backend, target=target, device=device, roles=roles, memory=memory, number=number, idle=idle[key]
            )
            for key, number in sorted(groups.items())
            for backend, target, device, roles, memory in (key,)
        )

    def _look_up_devices(self, workers: set[str]) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._devices_at + DEVICES_S or workers <= self._devices.keys():
            return
        self._devices_at = now
        for run in self._host.runs.values():
            self._devices |= {one.name: one.device for one in run.status().workers if one.device}
