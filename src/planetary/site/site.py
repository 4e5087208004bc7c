"""A site: jobs from its journal, their runs in this process, and the workers they share.

Decisions are those of the fold of the journal (`jobs`) and of each run's controller; this module carries them out.
`SiteWorkers` has the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.store import write_atomically
from planetary.core.config import load_config
from planetary.core.configuration.schema import Config, FabricConfig, Timings
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import ConflictError, UserError
from planetary.core.printable import command_line, is_name
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.gateway.reception import Reception
from planetary.fleet.gateway.run_files import RunLock, has_run
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.events import Finish
from planetary.net.connection import Connection
from planetary.net.handshake import answer_hello
from planetary.net.session import Refused
from planetary.run.kinds import kind_named, kind_of, worker_protocol
from planetary.runs.federation.config import FederationConfig
from planetary.site.book import JournalFile, free_name, require_folder_name
from planetary.site.config import CONTROLLERS, PRIORITIES, Controllers, SitePolicy
from planetary.site.hosted_run import HostedRun, RunOutcome, outcome_of
from planetary.site.jobs import (
    JOURNAL,
    MOST_DEATHS,
    CancelRequested,
    HubAttempt,
    Job,
    JobBook,
    JobEnded,
    JobStarted,
    JobState,
    JobSubmitted,
    SiteRecord,
    SiteStopped,
)
from planetary.site.model_process import PreparationLimits
from planetary.site.outer_runs import OuterRuns
from planetary.site.placed_work import PlacedWork
from planetary.site.placement.hub_link import HubLinkOptions
from planetary.site.placement.job_hub import JobHub
from planetary.site.placement.messages import PLACEMENT_MESSAGES
from planetary.site.placement.placed_jobs import PlacedJob
from planetary.site.site_workers import SiteWorkers
from planetary.site.submission import checked, config_of_controller, with_data_sets

log = logging.getLogger(__name__)

CONFIGURED = "the configuration"
"""In place of a token's name: who submitted the job of a controller's `config_path`."""
LOOK_S = 0.25
"""How often demands are looked at."""


class SiteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a site is started.

    Attributes:
        name: of the site.
        folder: folder of the journal and of runs' folders; None: the site is for one run alone.
        cache: of prepared data and compiled modules.
        host, port: that workers connect to.
        controllers: which take jobs, and with what priority.
        latency_budget_s: of peers no run attends.
        link: to the hub that places jobs here; None: there is none.
        data_sets: name -> source of data that jobs read as site://NAME.
        policies: of the sites on which this one, a hub, places jobs; empty: it is no hub.
        forgive: sites whose names may belong to other machines from now on.
        preparation: limits of the processes that run the code of jobs.
    """

    name: str
    folder: Path | None
    cache: Path
    host: str
    port: int
    controllers: Controllers
    latency_budget_s: float = FabricConfig().latency_budget_s
    link: HubLinkOptions | None = None
    data_sets: Mapping[str, str] = {}
    policies: tuple[SitePolicy, ...] = ()
    forgive: tuple[str, ...] = ()
    preparation: PreparationLimits = PreparationLimits()


class Site:
    """A gateway whose jobs share workers.

    Attributes:
        options: that it was made with.
        security: how peers are let in.
        book: the jobs.
        journal: that the book is folded from.
        runs: those that run in this process, by job.
        workers: that the runs share.
        hub: places jobs on other sites; None: this is no hub.
        outer: the hub's own runs of jobs over several sites; None: this is no hub.
        placed: jobs of the hub above; None: there is none.
        started_at: Unix time in seconds.
    """

    def __init__(self, options: SiteOptions, security: Security, *, wall: Callable[[], float]) -> None:
        """Nothing is opened before `open`. `wall` returns Unix time in seconds."""
        self.options, self.security = options, security
        self.book = JobBook()
        self.runs: dict[str, HostedRun] = {}
        self.hub: JobHub | None = None
        self.outer: OuterRuns | None = None
        self.placed: PlacedWork | None = None
        self.started_at = 0.0
        self._wall = wall
        self._timings = Timings(options.latency_budget_s)
        self.journal: JournalFile[SiteRecord] = JournalFile(None, SiteRecord, self.book, wall)
        self._lock: RunLock | None = None
        self.workers = SiteWorkers(self, options.name, self._timings, is_alone=options.folder is None)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop: str | None = None
        self._stopping = asyncio.Event()
        spoken = worker_protocol()
        self._reception = Reception(
            self._take,
            spoken.extended(*PLACEMENT_MESSAGES) if options.policies else spoken,
            self._timings,
            tokens=security.tokens,
            invites=security.invites,
            knows=self._knows,
        )

    def _knows(self, key: str) -> bool | None:
        """Any run counts."""
        found = {run.gateway.knows(key) for run in self.runs.values()}
        return True if True in found else None if None in found else False

    # --- its life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the journal, take the folder, and let workers connect. Raises `PlanetaryError` if one of these fails."""
        self.started_at = self._wall()
        folder = self.options.folder
        if folder is not None:
            self._lock = RunLock(folder)
            self.journal = JournalFile(folder / JOURNAL, SiteRecord, self.book, self._wall)
            self.workers.restore()
            options = self.options
            if options.policies:
                self.hub = JobHub(options.name, folder, options.policies, self._timings, forgive=options.forgive)
                self.outer = OuterRuns(self, self.hub, self._timings.connect_s)
            if options.link is not None:
                self.placed = PlacedWork(self, options.link, options.controllers, options.data_sets)
        await self._reception.listen(self.options.host, self.options.port, self.security.tls)

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self._reception.port

    @property
    def is_stopping(self) -> bool:
        """Whether it is about to end."""
        return self._stop is not None

    def stop(self, reason: str) -> None:
        """End every run in order; they go on when the site is started again. Called on the event loop."""
        self._stop = self._stop or reason
        self._stopping.set()
        for run in self.runs.values():
            run.gateway.stop(reason)

    async def begin_configured(self) -> None:
        """Submit the jobs of the controllers' `config_path`, once: not those the journal has already.

        Raises:
            UserError: the configuration of one cannot be run.
        """
        for name in CONTROLLERS:
            chosen = self.options.controllers.of(name)
            submitted = any(one.controller == name and one.by == CONFIGURED for one in self.book.jobs.values())
            if not chosen.enabled or not chosen.config_path or submitted:
                continue
            folder = self.options.folder
            config = await asyncio.to_thread(config_of_controller, chosen, (), self.options.data_sets, folder)
            wanted = chosen.service_id or config.run.name
            resume = chosen.should_resume and folder is not None and has_run(folder / wanted)
            self.submit(config, by=CONFIGURED, name=wanted if resume else "", resume=resume, controller=name)

    async def serve(self) -> None:
        """Run jobs until `stop`."""
        for job in self.book.of_state(JobState.CANCELLING):  # it was killed before that was done
            self.journal.append(JobEnded(job=job.job, ok=False, reason="the site ended meanwhile"))
        for job in self.book.of_state(JobState.RUNNING):
            if (deaths := job.deaths_with(_progress(job))) < MOST_DEATHS:
                self._begin(job)
                continue
            reason = (
                f"the site's process died {deaths} times in a row while this job ran, without progress of the job in "
                "between: the job may end or exhaust it, so it is not started again. Look at the logs of the site and "
                f"of the system, and at {job.folder}/logs; then submit it again, or go on with its run: "
                f"{command_line('jobs', 'submit', '--resume', Path(job.folder).name)}"
            )
            log.error("job %s: %s", job.job, reason)
            self.journal.append(JobEnded(job=job.job, ok=False, reason=reason))
        if self.hub is not None:
            self._show_ended_runs(self.hub)
        if self.placed is not None:
            self.placed.start()
        while self._stop is None:
            self._start_queued()
            self.workers.look()
            if self.hub is not None:
                self.hub.look()
            if self.outer is not None:
                self.outer.look()
            if self.placed is not None:
                self.placed.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_S)
        if self.placed is not None:
            await self.placed.stop(f"the gateway ends: {self._stop}")
        if self.outer is not None:
            await self.outer.finish()
        while self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        await self.workers.finish()
        self.journal.append(SiteStopped(reason=self._stop))

    def host_only(self, config: Config, options: GatewayOptions) -> HostedRun:
        """Return the one run of a site without a folder, not opened yet; the workers end with it.

        Runs that its kind has beside it are hosted, too.
        """
        run = self._host_beside(config, options, None)
        for gateway in run.kind.beside(run.gateway, self.security):
            self._host_beside(gateway.config, gateway.options, gateway)
        return run

    def _host_beside(self, config: Config, options: GatewayOptions, gateway: Gateway[Any] | None) -> HostedRun:
        name, kind = options.folder.name, kind_of(config)
        submitted = JobSubmitted(
            job=name,
            controller=kind.controller,
            kind=kind.name,
            folder=str(options.folder),
            config=to_toml(config),
            priority=0,
            resume=options.resume,
        )
        self.journal.append(submitted)
        self.journal.append(JobStarted(job=name))
        run = self.runs[name] = HostedRun(config, options, self.security, gateway=gateway)
        return run

    async def run_only(self) -> Finish:
        """Run the runs of `host_only` until the first one ends, which ends the others. Raises as `HostedRun.run`."""
        loop = asyncio.get_running_loop()
        looking = loop.create_task(self._keep_looking())
        if self._stop is not None:
            self.stop(self._stop)
        tasks = {name: loop.create_task(run.run()) for name, run in self.runs.items()}
        try:
            ended, others = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            for name, task in tasks.items():
                if task in others:
                    self.runs[name].gateway.stop("a run beside it ended")
            if others:
                await asyncio.wait(others)
            return next((one for one in ended if one.exception() is not None), next(iter(ended))).result()
        finally:
            looking.cancel()
            for task in tasks.values():
                task.cancel()
            outcomes = await asyncio.gather(*(outcome_of(task, name) for name, task in tasks.items()))
            for name, outcome in zip(tasks, outcomes, strict=True):
                self.journal.append(JobEnded(job=name, ok=outcome.ok, reason=outcome.reason))
            if self._stop is None:
                await self.workers.dismiss_idle(outcomes[0].reason)

    async def _keep_looking(self) -> None:
        while True:
            self.workers.look()
            await asyncio.sleep(LOOK_S)

    async def close(self, reason: str) -> None:
        """Say goodbye to every peer, and close the journal; once more is fine."""
        await self._reception.close(reason)
        if self.hub is not None:
            self.hub.journal.close()
        self.journal.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- jobs -------------------------------------------------------------------------------------------------

    def submit(
        self,
        config: Config,
        *,
        by: str = "",
        name: str = "",
        priority: int | None = None,
        resume: bool = False,
        controller: str = "",
        placed: HubAttempt | None = None,
    ) -> Job:
        """Accept a job; it is started when the controller has room.

        Args:
            config: of the run.
            by: name of the token.
            name: of job and folder; "": the run's, numbered when taken.
            priority: for workers; None: the controller's.
            resume: whether to resume the run in the folder.
            controller: receiver of the job; "": the one of the job's kind.
            placed: by a hub in this attempt; None: it was submitted here.

        Raises:
            UserError: the controller is not enabled, or the job is for another one.
            ConflictError: the site takes no jobs, or the folder is another job's.
        """
        folder = self._takes_jobs()
        kind = kind_of(config)
        if not kind.controller:
            raise UserError(
                f"a run of the kind {kind.name!r} is none of a gateway with several: it has its own command"
            )
        if controller not in ("", kind.controller):
            raise UserError(f"a configuration of the kind {kind.name!r} is for {kind.controller}, not for {controller}")
        chosen = self.options.controllers.of(kind.controller)
        if not chosen.enabled:
            enabled = [one for one in CONTROLLERS if self.options.controllers.of(one).enabled]
            raise UserError(
                f"the controller {kind.controller} is not enabled in this gateway, and the configuration asks for a "
                f"run of the kind {kind.name!r}; enabled: {', '.join(enabled) or 'none'} "
                f"(controllers.{kind.controller}.enabled = true)"
            )
        name, place = self._place_for(folder, name or config.run.name, given=bool(name), resume=resume)
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=place.name))
        default = PRIORITIES[kind.controller] if chosen.priority is None else chosen.priority
        self.journal.append(
            JobSubmitted(
                job=name,
                controller=kind.controller,
                kind=kind.name,
                folder=str(place),
                config=to_toml(config),
                priority=default if priority is None else priority,
                by=by,
                resume=resume,
                placed=placed,
            )
        )
        self._start_queued()
        return self.book.jobs[name]

    def _takes_jobs(self) -> Path:
        if self.options.folder is None:
            raise ConflictError(
                "this gateway was started for one run and takes no jobs; start one with a file of controllers: "
                "planetary gateway --gateway-config gateway.toml",
                code="one_run",
            )
        if self._stop is not None:
            raise ConflictError(f"this gateway ends and takes no jobs: {self._stop}", code="ending")
        return self.options.folder

    def _place_for(self, folder: Path, wanted: str, *, given: bool, resume: bool) -> tuple[str, Path]:
        """Return a job's name and folder. Raises `ConflictError` for one that was given and is taken."""
        if not (resume and is_name(wanted) and "/" not in wanted):
            require_folder_name(wanted, given=given)
        place = folder / wanted
        if (holder := self.book.holder_of(str(place))) is not None and (given or resume):
            raise ConflictError(
                f"the job {holder.job} has the run folder {place}; cancel it first, or take another name",
                code="folder_taken",
            )
        if resume:
            if not has_run(place):
                raise UserError(f"resume: there is no run in {place}")
            return free_name(wanted, lambda one: one in self.book.jobs, mark="."), place

        def is_taken(name: str) -> bool:
            return name in self.book.jobs or (folder / name).exists()

        if given and is_taken(wanted):
            raise ConflictError(
                f"the run folder {place} is taken: take another name, or none, or resume the run", code="folder_taken"
            )
        name = free_name(wanted, is_taken)
        return name, folder / name

    def cancel(self, name: str, *, by: str = "", reason: str = "") -> Job:
        """End a job: at once, or after the checkpoint being written.

        Raises:
            UserError: there is none of this name.
            ConflictError: it is over, or is being cancelled.
        """
        job = self.book.named(name)
        if self.hub is not None and name in self.hub.book.jobs and self.hub.book.jobs[name].parts:
            self.hub.cancel(name, by=by, reason=reason)
            return job
        self.book.require_cancellable(name)
        why = reason or (f"cancelled by {by}" if by else "cancelled")
        self.journal.append(CancelRequested(job=name, by=by, reason=why))
        if name in self.runs:
            self.runs[name].gateway.stop(why, for_good=True)
        return job

    def _start_queued(self) -> None:
        if self._stop is not None or self.options.folder is None:
            return
        for job in self.book.startable({one: self.options.controllers.of(one).parallel for one in CONTROLLERS}):
            self._begin(job)

    def _begin(self, job: Job) -> None:
        self.journal.append(JobStarted(job=job.job, progress=_progress(job)))
        self._tasks[job.job] = asyncio.get_running_loop().create_task(self._run(job), name=f"job {job.job}")

    async def _run(self, job: Job) -> None:
        """Run a job to the end; a fault ends this job and nothing else."""
        try:
            end = await outcome_of(self._run_in(job), job.job)
        finally:
            self.runs.pop(job.job, None)
            self._tasks.pop(job.job, None)
            self.workers.over(job.job)
        if self._stop is not None and not end.ok and job.state is JobState.RUNNING:
            return  # it goes on when the site is started again
        self.journal.append(JobEnded(job=job.job, ok=end.ok, reason=end.reason))
        log.info("job %s %s: %s", job.job, job.state.value, end.reason)

    async def _run_in(self, job: Job) -> Finish:
        return await self._host(job, await asyncio.to_thread(self._config_of, job))

    async def _host(self, job: Job, config: Config) -> Finish:
        """Run a job to the end, or resume the run in the folder. Raises as `HostedRun`."""
        folder, link = Path(job.folder), self.options.link
        resume = await asyncio.to_thread(has_run, folder)
        is_part = job.placed is not None and bool(config.of(FederationConfig).run)
        options = GatewayOptions(
            folder=folder,
            cache=self.options.cache,
            host=self.options.host,
            port=self.port,
            resume=resume,
            on_loan=True,
            again=command_line("jobs", "submit", "--resume", folder.name),
            uplink=link.address if link is not None and is_part else None,
        )
        run = HostedRun(config, options, self.security, self.options.preparation)
        await run.open()
        self.runs[job.job] = run
        if job.state is JobState.CANCELLING or self._stop is not None:
            run.gateway.stop(job.reason or self._stop or "stopped", for_good=job.state is JobState.CANCELLING)
        return await run.run()

    def _config_of(self, job: Job) -> Config:
        path = Path(job.folder) / "job.toml"
        write_atomically(path, job.config.encode())
        return _waiting(load_config(path))

    # --- the hub's own runs: see `OuterHost` -------------------------------------------------------------------

    async def run_outer(self, job: PlacedJob, config: Config) -> RunOutcome:
        config = await asyncio.to_thread(self._fitted, config)
        shown = self._show_outer(job)
        end = RunOutcome(False, "the hub ended")
        try:
            end = await outcome_of(self._host(shown, config), job.job)
        finally:
            self.runs.pop(job.job, None)
            self.workers.over(job.job)
            self.journal.show(JobEnded(job=job.job, ok=end.ok, reason=end.reason))
        return end

    def stop_outer(self, name: str, reason: str) -> None:
        if name in self.runs:
            self.runs[name].gateway.stop(reason)

    async def attend_outer(self, name: str, connection: Connection, hello: m.Hello) -> None:
        if (run := self.runs.get(name)) is None:
            no = Refused(code="busy", reason=f"the run of {name} is being opened", retry=True)
            await answer_hello(connection, no, self._timings.connect_s)
            return
        await run.gateway.attend(connection, hello)

    def _fitted(self, config: Config) -> Config:
        return checked(with_data_sets(_waiting(config), self.options.data_sets))

    def _show_ended_runs(self, hub: JobHub) -> None:
        """List the runs of jobs that were over before this process began; the others are listed as they begin."""
        for job in hub.book.jobs.values():
            if job.parts and job.over and job.members:
                self._show_outer(job)
                ended = JobEnded(job=job.job, ok=job.state == "finished", reason=job.reason, t=job.ended_at or 0.0)
                self.journal.show(ended)

    def _show_outer(self, job: PlacedJob) -> Job:
        """List a job's outer run among the jobs of this process. The hub's journal has it, and no other one."""
        assert self.options.folder is not None
        submitted = JobSubmitted(
            job=job.job,
            controller="",
            kind=job.kind,
            folder=str(self.options.folder / job.job),
            config=job.config,
            priority=job.priority or 0,
            by=job.by,
            t=job.submitted_at,
        )
        self.book.jobs.pop(job.job, None)  # of an earlier beginning
        self.journal.show(submitted)
        self.journal.show(JobStarted(job=job.job))
        return self.book.jobs[job.job]

    # --- peers ------------------------------------------------------------------------------------------------

    async def _take(self, connection: Connection, hello: m.Hello) -> None:
        """Attend a peer until the connection ends."""
        if hello.role == "site":
            await self._take_site(connection, hello)
        elif hello.role == "worker" and hello.run and self.outer is not None:
            await self.outer.attend(connection, hello)
        else:
            await self.workers.attend(connection, hello)

    async def _take_site(self, connection: Connection, hello: m.Hello) -> None:
        if self.hub is not None and self._stop is None:
            await self.hub.attend(connection, hello)
            return
        if self.hub is not None:
            no = Refused(code="busy", reason=f"the hub ends: {self._stop}", retry=True)
        else:
            no = Refused(
                code="hub",
                reason=f"{self.options.name} is a gateway without sites and places no jobs: federation.upstream is to "
                "name a hub (planetary federation-hub with a file of sites)",
                retry=True,  # it may get sites
                kind="data",
            )
        await answer_hello(connection, no, self._timings.connect_s)


def _waiting(config: Config) -> Config:
    """Return the configuration of a run that waits for workers which were lent to others, and for lost sites."""
    return msgspec.structs.replace(config, fabric=msgspec.structs.replace(config.fabric, abandon_after_s=0.0))


def _progress(job: Job) -> int:
    return kind_named(job.kind).progress(Path(job.folder))
