"""The shell of a hub that places jobs: journal, sites' links, and submissions.

Decisions are those of `PlacementMachine`; every record is on the disk before the message that follows from it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config, Timings
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import ConflictError, PlanetaryError, UserError
from planetary.fleet.protocol import admission
from planetary.fleet.protocol.messages import Hello, Refused, Welcome
from planetary.fleet.protocol.status import MOST_EVENTS
from planetary.fleet.shell.shell import SendQueues
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.events import Append, Close, Closed, Event, Instruction, Received, Send, Tick
from planetary.net.connection import Connection
from planetary.net.handshake import answer_hello
from planetary.run.kinds import kind_of
from planetary.runs.federation.config import FederationConfig
from planetary.runs.rl.config import RlConfig
from planetary.site.book import JournalFile, free_name, require_folder_name
from planetary.site.config import DATA_SCHEME, SitePolicy, WorkerRole
from planetary.site.placement.choice import JobNeeds, PlaceableJob, policy_obstacle
from planetary.site.placement.machine import (
    JobAsked,
    JobUnwanted,
    LineCarried,
    OuterRunEnded,
    PlacementMachine,
    SiteCame,
    SiteSession,
)
from planetary.site.placement.placed_jobs import (
    HUB_JOURNAL,
    HubNamed,
    HubRecord,
    PlacedJob,
    PlacementAsked,
    PlacementBook,
    PlacementState,
    SiteForgiven,
    news_of,
    part_names,
)
from planetary.site.placement.spread_jobs import outer_config, part_config, parts_of, sites_wanted, with_members
from planetary.wire.streams import refuse_tensors

log = logging.getLogger(__name__)

DAY_S = 86400
IDENTITY_BYTES = 6
SPREAD_KIND = "hub"
"""Kind of the hub's own run of a job over several sites."""


class HubTerms(msgspec.Struct, frozen=True):
    """Which gateways may join: see `admission.Admits`."""

    hub: str
    names: tuple[str, ...]
    roles: tuple[str, ...] = ()  # worker roles: a site has none

    def refuse(self, hello: Hello) -> Refused | None:
        """Return why a site is refused; None: it is not."""
        if hello.worker in self.names:
            return None
        return Refused(
            code="site",
            reason=f"the hub {self.hub} knows no site named {hello.worker}; its federation.sites has "
            f"{', '.join(self.names)}: choose one of these (--site, or federation.site), or add the site there and "
            "start the hub again",
            kind="data",
        )


def refusal_of(
    hello: Hello, terms: HubTerms, book: PlacementBook, connected: Mapping[str, tuple[str, str]]
) -> Refused | None:
    """Return why a site is refused; None: it is not. See `admission.refuse`.

    A gateway keeps the link for the gateway's whole life, and the hub's operator can remove most reasons meanwhile.
    """
    refusal = admission.refuse(hello, terms, book, connected)
    if refusal is None or refusal.code == "token":
        return refusal
    return msgspec.structs.replace(refusal, retry=True)


class SiteLine(msgspec.Struct):
    """A site's connection.

    Attributes:
        queues: of the messages about jobs; None: it is the uplink of a part, which the hub's run attends.
        counted: bytes of it that the machine knows.
    """

    connection: Connection
    queues: SendQueues | None
    hello: Hello
    counted: int = 0


class JobHub:
    """The shell of a hub that places jobs. Methods are called on the event loop.

    Attributes:
        book: the jobs.
        policies: of the sites.
        machine: decides.
        journal: that the book is folded from, at `path`.
        events: the newest ones in words, with their Unix times in seconds.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        policies: Sequence[SitePolicy],
        timings: Timings,
        *,
        forgive: Iterable[str] = (),
        system: System = SYSTEM,
    ) -> None:
        """Read the journal in `folder`. `forgive`: sites whose names may belong to other machines from now on.

        Raises:
            UserError: the journal is damaged.
            ResourceError: the journal cannot be opened.
        """
        self.book, self.policies = PlacementBook(), tuple(policies)
        self._timings, self._system = timings, system
        self.path = path = folder / HUB_JOURNAL
        self.events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        wall = system.clock.wall
        self.journal = JournalFile(path, HubRecord, self.book, wall, files=system.files, seen=self._seen)
        self._broken: PlanetaryError | None = None
        self._sessions = 0
        self._lines: dict[int, SiteLine] = {}
        self._closing: set[asyncio.Task[None]] = set()
        if not self.book.hub:
            self.journal.append(HubNamed(hub=f"{name}-{system.entropy(IDENTITY_BYTES).hex()}"))
        for site in forgive:
            self.book.apply(forgiven := SiteForgiven(site=site))
            self._append(forgiven)
        self.machine = PlacementMachine(self.policies, self.book, system.clock.monotonic())
        for one in self.policies:
            self._tell(LineCarried(site=one.name, day=self._day(), nbytes=0))

    def _seen(self, record: HubRecord) -> HubRecord:
        """Have a record among the newest events."""
        if text := news_of(record):
            self.events.append((record.t, text))
        return record

    # --- sites ------------------------------------------------------------------------------------------------

    async def attend(self, connection: Connection, hello: Hello) -> None:
        """Attend a site whose token was checked, until the connection ends."""
        connected = {
            line.hello.worker: (line.hello.node, line.hello.identity)
            for line in self._lines.values()
            if line.queues is not None
        }
        terms = HubTerms(self.book.hub, tuple(self.machine.policies))
        if (refusal := refusal_of(hello, terms, self.book, connected)) is not None:
            log.warning("the site %s is refused: %s", hello.worker, refusal.reason)
            await answer_hello(connection, refusal, self._timings.connect_s)
            return
        timings = self._timings
        welcome = Welcome(run=self.book.hub, heartbeat_s=timings.heartbeat_s, silent_after_s=timings.silent_after_s)
        if not await answer_hello(connection, welcome, timings.connect_s, refuse_tensors):
            return
        self._sessions += 1
        session, site, reason = self._sessions, hello.worker, "the connection ended"
        queues = SendQueues(connection)
        self._lines[session] = SiteLine(connection, queues, hello)
        try:
            self._tell(SiteCame(session=session, site=site, identity=hello.identity))
            log.info("site %s has come from %s", site, connection.peer_host)
            while True:
                received = await connection.receive()
                self._tell(Received(session, received.message, host=connection.peer_host))
        except PlanetaryError as error:
            reason = str(error)
            raise
        finally:
            log.info("site %s is away: %s", site, reason)
            queues.abandon()
            self._count(self._lines.pop(session))
            self._tell(Closed(session, reason))

    async def attend_uplink(
        self, connection: Connection, hello: Hello, attend: Callable[[Connection, Hello], Awaitable[None]]
    ) -> None:
        """Have the hub's run of a job attend a site with a part of it, and count the line's bytes."""
        terms = HubTerms(self.book.hub, tuple(self.machine.policies))
        if (refusal := refusal_of(hello, terms, self.book, {})) is not None:
            log.warning("the site %s is refused by the run %s: %s", hello.worker, hello.run, refusal.reason)
            await answer_hello(connection, refusal, self._timings.connect_s)
            return
        self._sessions += 1
        session = self._sessions
        self._lines[session] = SiteLine(connection, None, hello)
        try:
            await attend(connection, hello)
        finally:
            self._count(self._lines.pop(session))

    def look(self) -> None:
        """Let time pass: jobs of sites that are away for too long are placed elsewhere. Called every moment.

        Raises:
            PlanetaryError: the journal could not be written; nothing is decided any more.
        """
        for line in list(self._lines.values()):
            self._count(line)
        deadline = self.machine.next_deadline()
        if self._broken is not None or (deadline is not None and self._system.clock.monotonic() >= deadline):
            self._tell(Tick())

    def _count(self, line: SiteLine) -> None:
        carried = line.connection.bytes_sent + line.connection.bytes_received
        if carried > line.counted:
            event = LineCarried(site=line.hello.worker, day=self._day(), nbytes=carried - line.counted)
            line.counted = carried
            self._tell(event)

    def _day(self) -> int:
        return int(self._system.clock.wall() // DAY_S)

    # --- jobs -------------------------------------------------------------------------------------------------

    def submit(
        self, config: Config, needs: JobNeeds, *, name: str = "", priority: int | None = None, by: str = ""
    ) -> PlacedJob:
        """Accept a job; it is placed at once where a site can take it.

        Args:
            config: of the run; a site checks it where it is placed.
            needs: of the site.
            name: of the job; "": the run's, with a number behind it when that is taken.
            priority: among waiting jobs, and for workers at the site; None: as the site has it.
            by: name of the token.

        Raises:
            UserError: it is of a kind no site hosts, or the policies of too many sites forbid it.
            ConflictError: the name is taken.
        """
        sites = sites_wanted(config, needs)
        spread = bool(config.of(FederationConfig).sites) or sites > 1
        config = outer_config(config, sites) if spread else config
        kind = kind_of(config.having(FederationConfig()) if spread else config)
        if not kind.controller:
            raise UserError(f"a run of the kind {kind.name!r} is none that a site hosts: it has its own command")
        placeable = PlaceableJob(
            controller=kind.controller,
            roles=cast(tuple[WorkerRole, ...], kind.roles or ("trainer",)),
            data_sets=data_sets_of(config),
            needs=needs,
        )
        parts = parts_of(placeable, config.of(FederationConfig).sites, sites) if spread else ()
        self._require_sites(parts or (placeable,), kind.name)
        name = self._name_for(name, config.run.name, len(parts))
        asked = PlacementAsked(
            job=name,
            kind=SPREAD_KIND if spread else kind.name,
            placeable=placeable,
            config=to_toml(config),
            priority=priority,
            by=by,
            parts=parts,
            part_config=to_toml(part_config(config, name)) if spread else "",
        )
        self._tell(JobAsked(asked=asked))
        return self.book.jobs[asked.job]

    def _require_sites(self, wanted: Sequence[PlaceableJob], kind: str) -> None:
        """Refuse a job whose sites the hub does not have, or that the policies of too many forbid."""
        for site in filter(None, (one.needs.site for one in wanted)):
            if site not in self.machine.policies:
                raise UserError(f"this hub has no site {site!r}; it has {', '.join(self.machine.policies)}")
        obstacles: dict[str, str] = {}
        for one in self.policies:
            asked = next((part for part in wanted if part.needs.site in ("", one.name)), None)
            if asked is not None:
                obstacles[one.name] = policy_obstacle(asked, one)
        if sum(not reason for reason in obstacles.values()) >= len(wanted):
            return
        reasons = "; ".join(f"{site}: {reason}" for site, reason in obstacles.items() if reason)
        if len(wanted) == 1:
            raise UserError(f"no site may take a job of the kind {kind!r}: {reasons}")
        reasons = reasons or f"the hub has {len(self.policies)} ({', '.join(self.machine.policies)})"
        raise UserError(f"fewer than {len(wanted)} sites may take a part of a job of the kind {kind!r}: {reasons}")

    def _name_for(self, given: str, wanted: str, parts: int) -> str:
        name = given or wanted or "job"
        require_folder_name(name, given=bool(given))
        if given and self._is_taken(name, parts):
            raise ConflictError(f"the hub has had a job {name}: take another name, or none", code="name_taken")
        return free_name(name, lambda one: self._is_taken(one, parts))

    def _is_taken(self, name: str, parts: int) -> bool:
        """Whether a job of so many parts, 0 for one of a single site, cannot have a name."""
        names = (name, *part_names(name, parts))
        return any(one in self.book.jobs for one in names) or (parts > 0 and (self.path.parent / name).exists())

    def cancel(self, name: str, *, by: str = "", reason: str = "") -> PlacedJob:
        """End a job: at once, where the site is connected; else as soon as it is back.

        Raises:
            UserError: there is none of this name.
            ConflictError: it is over, or is being cancelled.
        """
        job = self.book.require_cancellable(name)
        self._tell(JobUnwanted(job=name, by=by, reason=reason))
        return job

    def outer_config(self, job: PlacedJob) -> Config:
        """Return the configuration of the hub's own run of a job over several sites, with the present sites.

        Raises:
            UserError: the hub's version of planetary refuses it.
        """
        config = config_from_tables(tomllib.loads(job.config))
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=job.job))
        return with_members(config, job.members, self.policies)

    def end_outer_run(self, name: str, *, ok: bool, reason: str) -> None:
        """Take the end of the hub's own run of a job, which is that of the job."""
        self._tell(OuterRunEnded(job=name, ok=ok, reason=reason))

    def waits_for(self, job: PlacedJob) -> str:
        """Return why no site has a waiting job; "": it does not wait."""
        if job.whole and job.state is PlacementState.WAITING:
            whole = self.book.job(job.whole)
            if whole.state is PlacementState.WAITING:
                return f"its parts are placed together: {self.waits_for(whole)}"
        choice = self.machine.choices.get(job.job)
        return choice.why if choice is not None and job.state is PlacementState.WAITING else ""

    def state_there(self, job: PlacedJob) -> str:
        """Return the newest state of a job at the site; "": not known."""
        return self.machine.state_there(job)

    def site(self, name: str) -> SiteSession:
        """Return a site as it is now."""
        return self.machine.sites[name]

    def nbytes_today(self, name: str) -> int:
        """Return the bytes a site's line has carried today, both ways."""
        return self.machine.nbytes_today(name)

    def address_of(self, name: str) -> str:
        """Return the host a site connected from; "": it is away."""
        session = self.site(name).session
        return self._lines[session].connection.peer_host if session in self._lines else ""

    # --- the machine ------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if self._broken is not None:
            raise self._broken
        instructions = self.machine.handle(event, self._system.clock.monotonic())
        self._system.observe(self.machine)
        try:
            for instruction in instructions:
                self._carry_out(instruction)
        except PlanetaryError as error:
            self._broken = error  # the jobs are ahead of their journal
            raise

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Append():
                self._append(cast(HubRecord, instruction.record))
            case Send() if (line := self._lines.get(instruction.session)) is not None and line.queues is not None:
                line.queues.put(instruction.message)
            case Close() if instruction.session in self._lines:
                closing = self._lines[instruction.session].connection.close(instruction.reason)
                task = asyncio.get_running_loop().create_task(closing)
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _append(self, record: HubRecord) -> None:
        record = self._seen(self.journal.keep(record))
        self.book.date(record)
        if text := news_of(record):
            log.info("%s", text)


def data_sets_of(config: Config) -> tuple[str, ...]:
    """Return the names of the data sets of its site that a job reads, each once."""
    sources = [*(part.source for part in config.data.parts), config.of(RlConfig).prompts]
    names = [source.removeprefix(DATA_SCHEME) for source in sources if source.startswith(DATA_SCHEME)]
    return tuple(dict.fromkeys(names))
