"""Random fault schedules of a hub and its sites, and what must be true during and after each; see `random_schedules`.

Hub and links are the production shells, over the simulated network and with a journal on a simulated disk. A site's
jobs are the fold of its journal, and a job "runs" for some seconds; a part of a job over several sites does until its
site sees that the hub's run is over, and that run for some seconds of which a part runs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config, Timings
from planetary.core.errors import ClosedError, ResourceError
from planetary.fleet.gateway.reception import Reception
from planetary.fleet.protocol.messages import FABRIC
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.system import System
from planetary.machine.journal import replay
from planetary.machine.machine import Validated
from planetary.runs.federation.config import FederationConfig
from planetary.simulation.disk import SimulatedDisk
from planetary.simulation.event_loop import ProcessKilled
from planetary.simulation.process import Process
from planetary.simulation.simulated_network import HOST
from planetary.simulation.world import World
from planetary.site.config import SitePolicy
from planetary.site.hosted_run import RunOutcome
from planetary.site.jobs import CancelRequested, HubAttempt, JobBook, JobEnded, JobStarted, JobSubmitted, SiteRecord
from planetary.site.outer_runs import OuterRuns
from planetary.site.placement.choice import JobNeeds
from planetary.site.placement.hub_link import EndJob, HubLink, HubLinkOptions, TakeJob
from planetary.site.placement.job_hub import JobHub
from planetary.site.placement.messages import (
    PLACEMENT_MESSAGES,
    ControllerRoom,
    JobReport,
    SiteNews,
    WorkerGroup,
)
from planetary.site.placement.placed_jobs import HUB_JOURNAL, HubRecord, PlacedJob, PlacementBook, PlacementState
from random_schedules import Schedules

PORT, LIMIT_S = 9000, 900.0
FAULTS = (
    "die_hub",
    "die_hub",
    "die_site",
    "fill_hub",
    "tear_hub",
    "tear_site",
    "kill_hub",
    "kill_hub",
    "kill_site",
    "kill_site",
    "cut_off",
    "cut_off",
    "mute",
    "deafen",
    "drop",
    "cancel",
    "power_hub",
    "power_site",
)
TIMINGS = Timings(1.0)
END_S, CANCEL_S = 25.0, 1.5  # at most: of a job, and of its cancellation
REFUSES = "never"
"""Jobs whose names have this are declined by every site, for good."""


class SimSite:
    """A site: its link, and jobs that are the fold of its journal."""

    def __init__(self, world: PlacementWorld, name: str, parallel: int) -> None:
        self.world, self.name, self.parallel = world, name, parallel
        self.folder = world.folder / name
        self.folder.mkdir()
        self.disk = world.disk()
        self.book = JobBook()
        self.link: HubLink | None = None
        self.starts: collections.Counter[HubAttempt] = collections.Counter()
        self.process = self.start()

    def start(self) -> Process:
        self.process = self.world.world.start(f"site {self.name}", self.name, self._main)
        self.process.on_exit.append(lambda _: self.world.restart(self.start, 20.0))
        return self.process

    async def _main(self, process: Process) -> int:
        system, path = self.world.system(process, self.disk), self.folder / "site.jsonl"
        self.book = JobBook()
        if path.exists():
            replay(read_json_lines(path, SiteRecord), self.book, path)
        self._journal = JsonLinesWriter(path, system.files)
        address = Address(HOST, PORT, "", TIMINGS.connect_s)
        reports = [self._report(job.job) for job in self.book.jobs.values()]
        self.link = HubLink(
            HubLinkOptions(address=address, name=self.name), self.book.hub, reports, self._carry_out, system
        )
        self.link.start()
        for job in list(self.book.jobs.values()):
            if not job.over:
                self._keep(asyncio.ensure_future(self._run(job.job)))
        while True:
            own = ControllerRoom(controller="training", parallel=self.parallel, own=0)
            cpu = WorkerGroup(backend="cpu", target="host", device="", roles=(), memory=0, number=1, idle=1)
            self.link.collect(SiteNews(controllers=(own,), workers=(cpu,)))
            await asyncio.sleep(0.25)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks = [one for one in getattr(self, "_tasks", []) if not one.done()] + [task]

    def _append(self, record: SiteRecord) -> None:
        record = msgspec.structs.replace(record, t=self.world.world.now)
        self.book.apply(record)
        self._journal.append(record, durable=True)

    def _report(self, name: str) -> JobReport:
        job = self.book.jobs[name]
        assert job.placed is not None
        return JobReport(
            job=job.placed.job, attempt=job.placed.attempt, state=job.state.value, reason=job.reason, name=name
        )

    def _carry_out(self, instruction: TakeJob | EndJob) -> None:
        assert self.link is not None
        match instruction:
            case TakeJob():
                self._keep(asyncio.ensure_future(self._take(instruction)))
            case EndJob():
                placed = HubAttempt(hub=self.link.machine.hub, job=instruction.job, attempt=instruction.attempt)
                job = self.book.attempt_of(placed)
                assert job is not None
                if not job.over:
                    self._append(CancelRequested(job=job.job, reason=instruction.reason))
                self.link.report(self._report(job.job))

    async def _take(self, take: TakeJob) -> None:
        assert self.link is not None
        await asyncio.sleep(self.world.source.uniform(0.0, 0.5))  # the configuration is checked
        offer = take.offer
        if REFUSES in offer.job:
            declined = JobReport(job=offer.job, attempt=offer.attempt, state="declined", reason="no", lasting=True)
            self.link.report(declined)
            return
        name = f"{offer.job}.{offer.attempt}"
        placed = HubAttempt(hub=take.hub, job=offer.job, attempt=offer.attempt)
        self._append(
            JobSubmitted(
                job=name,
                controller="training",
                kind="rounds",
                folder=name,
                config=offer.config,
                priority=0,
                placed=placed,
            )
        )
        self.starts[placed] += 1
        self.link.report(self._report(name))
        await self._run(name)

    async def _run(self, name: str) -> None:
        assert self.link is not None
        job = self.book.jobs[name]
        if job.state == "queued":
            self._append(JobStarted(job=name))
            self.link.report(self._report(name))
        left = self.world.source.uniform(0.0, END_S)
        assert job.placed is not None
        whole = job.placed.job.rpartition(".")[0]
        while left > 0 and job.state == "running":
            await asyncio.sleep(0.25)
            left = left - 0.25 if not whole else 0.0 if self.link.machine.connected and self._is_over(whole) else 1.0
        if job.state == "cancelling":
            await asyncio.sleep(self.world.source.uniform(0.0, CANCEL_S))
        if not job.over:
            self._append(JobEnded(job=name, ok=job.state == "running", reason="it has ended"))
            self.link.report(self._report(name))

    def _is_over(self, whole: str) -> bool:
        """Whether the hub, which is reached, says that the run of a job over several sites has finished."""
        hub = self.world.hub
        found = hub.book.jobs.get(whole) if hub is not None and self.world.hub_process.alive else None
        return found is not None and found.state is PlacementState.FINISHED

    def running(self) -> set[tuple[str, int]]:
        """Return the attempts that are not over in its journal."""
        return {(j.placed.job, j.placed.attempt) for j in self.book.jobs.values() if j.placed and not j.over}


class SimRuns:
    """The hub's own runs, as `OuterRuns` has them."""

    is_stopping = False

    def __init__(self, world: PlacementWorld) -> None:
        self.world = world
        self.stops: dict[str, str] = {}
        self.here: set[str] = set()

    async def run_outer(self, job: PlacedJob, config: Config) -> RunOutcome:
        members = dict(job.members)
        assert {site.name: site.part for site in config.of(FederationConfig).sites} == members
        assert config.of(FederationConfig).parts == len(job.parts)
        assert job.job not in self.here, f"{job.job} runs twice at the hub"
        self.here.add(job.job)
        self.stops.pop(job.job, None)
        self.world.outer_runs[job.job] += 1
        left = self.world.source.uniform(2.0, END_S)
        try:
            while left > 0:
                await asyncio.sleep(0.25)
                if job.job in self.stops:
                    return RunOutcome(False, self.stops[job.job])
                trains = [site for site in self.world.sites.values() if site.process.alive and site.name in members]
                names = {name for site in trains for name, _ in site.running()}
                left -= 0.25 if names & set(job.parts) else 0.0
            return RunOutcome(True, "all rounds")
        finally:
            self.here.discard(job.job)

    def stop_outer(self, name: str, reason: str) -> None:
        self.stops[name] = reason

    async def attend_outer(self, name: str, connection: object, hello: object) -> None:
        raise NotImplementedError  # uplinks have simulations of their own, in tests/runs/federation


class PlacementWorld:
    """A hub, its sites, submissions and faults, all drawn from one seed."""

    def __init__(self, seed: int, folder: Path, sites: int = 3, jobs: int = 5, spread: int = 2) -> None:
        self.source = random.Random(seed)
        self.world, self.folder = World(seed), folder
        self.policies = [
            SitePolicy(name=f"s{number}", patience_s=self.source.uniform(2.0, 12.0)) for number in range(sites)
        ]
        self.over = False
        self.waits_for: list[str] = []  # jobs of a world that did not end
        self.journal: list[HubRecord] = []  # of the hub, in the end
        self._settled_at: float | None = None
        (folder / "hub").mkdir()
        self.hub_disk = self.disk()
        self.hub: JobHub | None = None
        self.hub_process = self.start_hub()
        self.sites = {one.name: SimSite(self, one.name, 1 + number % 2) for number, one in enumerate(self.policies)}
        self.submitted: list[str] = []
        self.cancelled: set[str] = set()
        self.unsure: set[str] = set()  # jobs whose cancellation the hub died over
        self.loose: set[str] = set()  # jobs over several sites of which a part may have been cancelled
        self.outer_runs = collections.Counter[str]()  # beginnings
        self.struck = collections.Counter[str]()
        for number in range(spread):
            needs = JobNeeds(sites=self.source.choice([2, 2, sites]))
            self._submit_at(self.source.uniform(0.0, 30.0), f"w{number}", needs)
        for number in range(jobs):
            needs = JobNeeds(site=self.source.choice(["", "", "", self.policies[0].name]))
            name = f"j{number}" + (REFUSES if self.source.random() < 0.15 else "")
            self._submit_at(self.source.uniform(0.0, 40.0), name, needs)

    def disk(self) -> SimulatedDisk:
        return SimulatedDisk(self.world.random, lambda kind: None, self.world.clock)

    def system(self, process: Process, disk: SimulatedDisk) -> System:
        return System(
            clock=self.world.clock,
            network=self.world.network.of(process),
            files=disk.of(process),
            threads=process.threads,
            aside=process.aside,
            pid=lambda: process.pid,
            entropy=self.world.random.randbytes,
            memory=lambda: None,
            observe=self._observe,
        )

    # --- the hub ----------------------------------------------------------------------------------------------

    def start_hub(self) -> Process:
        self.hub = None  # until the new one has read its journal
        self.hub_process = self.world.start("hub", "hub", self._hub_main)
        self.hub_process.on_exit.append(lambda _: self.restart(self.start_hub, 8.0))
        return self.hub_process

    def restart(self, start: Callable[[], Process], within_s: float) -> None:
        """Have a process that has died started again, as an operator does."""
        if not self.over:
            self.world.after(self.source.uniform(0.1, within_s), start)

    async def _hub_main(self, process: Process) -> int:
        system = self.system(process, self.hub_disk)
        hub = JobHub("hub", self.folder / "hub", self.policies, TIMINGS, system=system)
        reception = Reception(hub.attend, FABRIC.extended(*PLACEMENT_MESSAGES), TIMINGS, system=system)
        await reception.listen(HOST, PORT, None)
        self.hub = hub
        runs = OuterRuns(SimRuns(self), hub, TIMINGS.connect_s)
        while True:
            hub.look()
            runs.look()
            await asyncio.sleep(0.25)

    def _submit_at(self, at: float, name: str, needs: JobNeeds) -> None:
        def submit() -> None:
            if not self.hub_process.alive or self.hub is None:
                self.world.after(1.0, submit)
                return
            config = config_from_tables({"run": {"name": name}})
            hub = self.hub
            try:
                self.hub_process.in_context(lambda: hub.submit(config, needs, name=name))
            except (ProcessKilled, ResourceError):  # the hub ended over it: it is not known whether it has the job
                self.world.after(1.0, submit)
                return
            except ClosedError:  # the hub has it from the first time
                assert name in hub.book.jobs
            self.submitted.append(name)

        self.world.at(at, submit)

    # --- faults -----------------------------------------------------------------------------------------------

    def strike(self, kind: str, name: str, seconds: float) -> None:
        """Let something go wrong now."""
        network, site = self.world.network, self.sites[name]
        hit = True
        match kind:
            case "kill_hub" | "kill_site":
                process = self.hub_process if kind == "kill_hub" else site.process
                hit = process.alive
                process.kill()
            case "power_hub" | "power_site":
                process, disk = (self.hub_process, self.hub_disk) if kind == "power_hub" else (site.process, site.disk)
                hit = process.alive
                disk.cut_power(process)
            case "die_hub" | "die_site":  # between two operations on its files, e.g. a record and its message
                (self.hub_disk if kind == "die_hub" else site.disk).dies_after = self.source.randint(0, 9)
            case "fill_hub":  # its disk: it ends, since its jobs are ahead of its journal, and is started again
                self.hub_disk.no_space = True
                self.world.after(seconds, self.hub_disk.make_room)
            case "tear_hub" | "tear_site":  # in the middle of a record
                (self.hub_disk if kind == "tear_hub" else site.disk).torn = True
            case "cut_off":
                network.cut("hub", name, seconds)
                network.cut(name, "hub", seconds)
            case "mute":
                network.cut(name, "hub", seconds)
            case "deafen":
                network.cut("hub", name, seconds)
            case "drop":
                hit = network.drop(name) > 0
            case "cancel":
                hit = self._cancel()
        self.struck[kind] += hit

    def _cancel(self) -> bool:
        if not self.hub_process.alive or self.hub is None:
            return False
        open_ = [j.job for j in self.hub.book.jobs.values() if not j.over and j.state is not PlacementState.CANCELLING]
        if not open_:
            return False
        name = self.source.choice(open_)
        hub = self.hub
        self.loose |= {hub.book.jobs[name].whole} - {""}
        try:
            self.hub_process.in_context(lambda: hub.cancel(name, reason="enough"))
            self.cancelled.add(name)
        except (ProcessKilled, ResourceError):
            self.unsure.add(name)
        return True

    # --- what must be true ------------------------------------------------------------------------------------

    def _observe(self, machine: Validated) -> None:
        machine.validate()

    def check_now(self) -> None:
        """Of every job, the sites that the hub sees at this moment have at most one attempt that was not recalled."""
        if self.hub is None or not self.hub_process.alive:
            return
        for job in self.hub.book.jobs.values():
            recalled = {attempt for attempt, stray in job.strays.items() if stray.recalled}
            live = [
                (name, attempt)
                for name, site in self.sites.items()
                if site.process.alive and self.hub.site(name).news is not None
                for other, attempt in site.running()
                if other == job.job and attempt not in recalled
            ]
            assert len(live) <= 1, f"{job.job} runs at {live}"

    def run(self, limit_s: float) -> bool:
        """Run until all jobs are over and no attempt strays; false when that takes too long."""

        def settled() -> bool:
            self.check_now()
            if self.world.now < 70.0 or self.hub is None or not self.hub_process.alive:
                self._settled_at = None
                return False
            if not all(site.process.alive for site in self.sites.values()):
                return False
            jobs = self.hub.book.jobs.values()
            if not all(job.over and not job.strays for job in jobs):
                self._settled_at = None
                return False
            # A hub whose disk is full has a moment in which its jobs are ahead of its journal, and then ends.
            self._settled_at = self._settled_at or self.world.now
            return self.world.now > self._settled_at + 1.0

        try:
            ended = self.world.run(settled, limit_s)
            self.waits_for = self._where()
            assert not self.world.loop.errors, self.world.loop.errors
        finally:
            self.over = True
            self.world.close()
        errors = [e for e in (one.error for one in self.world.processes) if e and not isinstance(e, ResourceError)]
        assert not errors, errors
        return ended

    def _where(self) -> list[str]:
        if self.hub is None:
            return ["the hub is down"]
        return [
            f"{j.job}: {j.state} at {j.site} {j.strays} {self.hub.waits_for(j)}" for j in self.hub.book.jobs.values()
        ]


@contextlib.contextmanager
def faulty_placement(seed: int) -> Iterator[PlacementWorld]:
    """Make the hub and the sites of a seed."""
    with TemporaryDirectory() as folder:
        world = PlacementWorld(seed, Path(folder))
        source = world.source
        for _ in range(source.randint(1, 14)):
            kind, name = source.choice(FAULTS), source.choice(sorted(world.sites))
            seconds = source.uniform(1.0, 25.0)
            world.world.at(source.uniform(0.5, 60.0), lambda k=kind, n=name, s=seconds: world.strike(k, n, s))
        yield world
        world.journal = list(read_json_lines(world.folder / "hub" / HUB_JOURNAL, HubRecord))


def folded(world: PlacementWorld) -> PlacementBook:
    """Return the hub's book as its journal gives it."""
    book = PlacementBook()
    replay(world.journal, book)
    return book


def check_the_journal_folds(world: PlacementWorld) -> None:
    """The hub's journal has every submission, and folds to the live state."""
    book = folded(world)
    submitted = [job.job for job in book.jobs.values() if not job.whole]
    assert sorted(submitted) == sorted(world.submitted), "a submission is lost"
    assert world.hub is not None
    assert book.jobs == world.hub.book.jobs, "the journal folds to another state"


def check_every_job_ended_as_it_should(world: PlacementWorld) -> None:
    """Finished, cancelled where that was asked for, failed where every site declined it; and nothing runs."""
    book = folded(world)
    for job in book.jobs.values():
        states = {
            name: [one.state.value for one in site.book.jobs.values() if one.placed and one.placed.job == job.job]
            for name, site in world.sites.items()
        }
        where = f"{job.job} {job.state} ({job.reason}), at sites {states}"
        assert not any(site.running() for site in world.sites.values()), where
        if job.job in world.unsure or job.job in world.loose or job.whole:
            assert job.over, where
            wholes = [book.jobs[job.whole]] if job.whole else []
            finished = any(w.state is PlacementState.FINISHED and w.job not in world.loose for w in wholes)
            assert not finished or job.state is not PlacementState.FAILED, where
        elif job.parts and job.job not in world.cancelled:
            assert job.state is PlacementState.FINISHED, where
            assert world.outer_runs[job.job] > 0, where
        elif job.job in world.cancelled:
            assert job.state is PlacementState.CANCELLED, where
        elif REFUSES in job.job:
            assert job.state is PlacementState.FAILED, where
        else:
            assert job.state is PlacementState.FINISHED, where
            assert any("finished" in found for found in states.values()), where


def check_no_attempt_began_twice(world: PlacementWorld) -> None:
    """A site takes an attempt once."""
    for site in world.sites.values():
        assert all(times == 1 for times in site.starts.values()), f"{site.name} took an attempt twice: {site.starts}"


def observations(world: PlacementWorld) -> dict[str, int]:
    """Count jobs by their end, and those that were placed more than once."""
    jobs = folded(world).jobs.values()
    states = collections.Counter(job.state.value for job in jobs)
    return {**states, "placed again": sum(job.attempts > 1 for job in jobs)}


SCHEDULES = Schedules(
    kind="placement",
    build=faulty_placement,
    faults=frozenset(FAULTS),
    invariants=(check_the_journal_folds, check_every_job_ended_as_it_should, check_no_attempt_began_twice),
    limit_s=LIMIT_S,
    journals=lambda world: {"hub": world.journal},
    observe=observations,
    options={},
)
