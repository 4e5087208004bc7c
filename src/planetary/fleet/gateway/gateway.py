"""The gateway process: a run folder, a server, sessions, background work, a journal, and a controller on top.

A kind of run gives a `Setup`, which prepares the run and begins it; see `fleet.gateway.parts`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from planetary.artifacts.durable_files import DurableFiles
from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import Config
from planetary.fleet.controller.controller import RunController
from planetary.fleet.gateway.compilations import Compilations
from planetary.fleet.gateway.invites import InviteList
from planetary.fleet.gateway.parts import Demand, Parts, PreparedRun, RunT, Setup, allocate_expected
from planetary.fleet.gateway.reception import Reception
from planetary.fleet.gateway.run_files import EVENTS, METRICS, RunLock, check_config
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import MetricsLine
from planetary.fleet.protocol.status import MOST_EVENTS, Leave, RunStatus
from planetary.fleet.shell.shell import Address, Background, ServerShell, SessionTerms, TensorSource
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.journal import Record
from planetary.net.authority import Authority
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, answer_hello
from planetary.wire.streams import refuse_tensors

log = logging.getLogger(__name__)

Work = TypeVar("Work")


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is started."""

    folder: Path  # run folder
    cache: Path  # folder of prepared data and compiled modules; survives the run
    host: str
    port: int
    resume: bool
    resume_from: Path | None = None  # a checkpoint to resume from instead of the newest
    forgive: tuple[str, ...] = ()  # workers whose ban and key a resumed run forgets
    # threads of each of the run's workers, which are all on this machine: `train.target_minutes` is then kept to. None:
    # they are anywhere, and the length of the configuration counts
    local_threads: int | None = None
    on_loan: bool = False  # workers outlive this run or a ban by it, and go on with other runs
    again: str = ""  # command that resumes the run, for people; "": `planetary train`
    uplink: Address | None = None  # hub of the run's federation; None: as its configuration says


class Security(msgspec.Struct, frozen=True):
    """How peers are let in; everything None: plain connections, on loopback only.

    Attributes:
        tls: of the server.
        tokens: checks the invite in a peer's first message.
        authority: the one both come from; the ring topology needs it, for connections among workers.
        invites: the invites that were made and revoked.
    """

    tls: ssl.SSLContext | None = None
    tokens: TokenCheck | None = None
    authority: Authority | None = None
    invites: InviteList | None = None

    @staticmethod
    def by(authority: Authority) -> Security:
        """Return the checks of an authority: a valid invite, and a key of the machine's own."""
        invites = InviteList(authority)
        tokens = TokenCheck(
            secret=authority.invite_secret,
            authority_fingerprint=authority.fingerprint,
            revoked=invites,
            identified=True,
        )
        return Security(authority.server_context(), tokens, authority, invites)


class Follower(Protocol):
    """Gets a run's metrics and events as they are written. Methods return at once and do not raise."""

    def write_metrics(self, line: MetricsLine) -> None:
        """Take a line of metrics."""
        ...

    def write_event(self, record: Record) -> None:
        """Take a record of the journal, with the time."""
        ...


class Gateway(Generic[RunT]):
    """One run. Make it, `start` it, `run` it.

    Attributes:
        parts: of the run that has begun; None before.
        security: how peers are let in.
        system: the machine.
        work: tasks beside the event loop, for whose end an orderly end waits.
        compilations: artifacts that are made for workers.
        before_close: called before the connections are closed at the end.
        after_close: called last.
        followers: receivers of metrics and events.
    """

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        setup: Setup[Any, RunT],
        *,
        system: System = SYSTEM,
    ) -> None:
        """Nothing is opened before `start`. `setup` is the kind's; `system`: the machine."""
        self.setup = setup
        self.config = config
        self.options = options
        self.endpoint = ""  # URL that clients of the run's kind use; "": it has none
        self.traffic = setup.traffic_of()
        self.web_app: Any = None  # ASGI application that answers there
        self.stage = "starting"
        self.stage_since = 0.0  # Unix time in seconds; 0: before any
        self.stage_seen: Callable[[str], None] = lambda _: None
        self.prepare_first: Callable[[], Coroutine[Any, Any, None]] | None = None  # fills the cache in another process
        self.started_at = 0.0  # Unix time in seconds
        self.ended_at: float | None = None
        self.metrics: list[Any] = []  # newest line of each number, of the kind's own type
        self.facts: dict[str, Any] = {}  # fields of the kind's status, known once the run is prepared
        self.events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)  # see `RunStatus`
        self.news = ""  # the newest event worth telling
        self.notes: list[str] = []  # decisions before training, and warnings during it
        self.followers: list[Follower] = []
        self._lasting = setup.news_of()
        self.parts: Parts[RunT] | None = None
        self.security = security
        self.system = system
        self.clock = system.clock
        self.store = BlobStore(options.cache / "blobs", system.files)
        self._shell: ServerShell[e.Finish] | None = None
        self._reception: Reception | None = None
        self._lock: RunLock | None = None
        self._journal: JsonLinesWriter | None = None
        self._metrics_file: JsonLinesWriter | None = None
        self.work = Background()
        self.compilations = Compilations(self._compile_for, self.post, system.clock, self.work)
        self.before_close, self.after_close = AsyncExitStack(), AsyncExitStack()
        self._stop_reason: str | None = None
        self._stops_for_good = False

    # --- the kind's parts -------------------------------------------------------------------------------------

    @property
    def run_parts(self) -> Parts[RunT]:
        """The parts of a run that has begun."""
        assert self.parts is not None
        return self.parts

    @property
    def controller(self) -> RunController[Any, Any] | None:
        """Decides; None: the run has not begun."""
        return None if self.parts is None else self.parts.controller

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        return self.setup.status(self) if self.parts is None else self.parts.status()

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        return await self.run_parts.compile_for(target)

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        """Carry out an instruction without answer."""
        match instruction:
            case e.Append():
                assert isinstance(instruction.record, Record)
                self._append(instruction.record)
            case e.Compile():
                self.compilations.compile(instruction)
                log.info("%s", self.compiling[0])
            case e.WriteMetrics():
                self._write_metrics(instruction.metrics)
            case e.Finish():
                self.ended_at = self.clock.wall()
                return instruction
            case _:
                self.run_parts.effects[type(instruction)](instruction)
        return None

    def _source(self, payload: e.Payload | None) -> TensorSource | None:
        """Return a function that returns the tensors of a message in the message's turn."""
        if payload is None:
            return None
        if isinstance(payload, e.BlobOf):
            digest = payload.digest
            return lambda: {"blob": np.frombuffer(self.store.get(digest), np.uint8)}
        return self.run_parts.sources[type(payload)](payload)

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self.options.port if self._reception is None else self._reception.port

    async def start(self) -> None:
        """Open, and listen, so workers can connect and wait. Raises the errors of both."""
        await self.open()
        security = self.security
        self._reception = Reception(
            self.attend,
            self.setup.protocol,
            self.config.timings,
            tokens=security.tokens,
            invites=security.invites,
            knows=self.knows,
            system=self.system,
        )
        await self._reception.listen(self.options.host, self.options.port, security.tls)

    async def open(self) -> None:
        """Take the run folder; peers come by `attend`, from a reception that several runs share. Raises as `start`."""
        if self.options.resume:
            check_config(self.options.folder)
        self._lock = RunLock(self.options.folder, self.system.files)
        self.started_at = self.clock.wall()
        await self.setup.open(self)

    def knows(self, key: str) -> bool | None:
        """Whether a machine with this public key took part; None while the journal of a resumed run is not read."""
        if self.controller is None:
            return None if self.options.resume else False
        return key in self.controller.desk.state.keys.values()

    def stop(self, reason: str, *, for_good: bool = False) -> None:
        """End the run in order; it can be resumed. Called on the event loop.

        `for_good`: workers are sent home; otherwise they dial until the run goes on.
        """
        self._stop_reason = self._stop_reason or reason
        self._stops_for_good = self._stops_for_good or for_good
        if self._shell is not None:
            self._shell.post(e.StopRequested(reason, for_good))

    def let_go(self, worker: str, reason: str, kind: Leave = "moved") -> None:
        """End a worker's connection as soon as the task is finished. Called on the event loop."""
        self._ask(e.LetGo(worker, reason, kind))

    def restart_worker(self, worker: str, reason: str) -> None:
        """Replace a worker's process now. Called on the event loop."""
        self._ask(e.RestartRequested(worker, reason))

    def _ask(self, event: e.Event) -> None:
        if self._shell is not None:
            self._shell.post(event)

    @property
    def demand(self) -> Demand:
        """How many workers the run can use now. Called on the event loop."""
        return self.setup.demand(self)

    # --- the run ----------------------------------------------------------------------------------------------

    async def run(self, prepared: Callable[[Any], None] | None = None) -> e.Finish:
        """Prepare and train until the run is finished, failed or stopped; `prepared` is called in between."""
        try:
            if self.prepare_first is not None:
                await self.interruptible(self.prepare_first())
                if self._stop_reason is not None:
                    return self._stopped()
            made: PreparedRun | None = await self.interruptible(asyncio.to_thread(self.setup.prepare, self))
            if made is None:
                return self._stopped()
            self.config = made.config
            made = await self.setup.fit(self, made)
            if made is None:
                return self._stopped()
            if prepared is not None:
                await asyncio.to_thread(prepared, made)
            return await self._train(made)
        finally:
            await self._close()
            await self.after_close.aclose()

    def note(self, text: str) -> None:
        """Keep a decision for users, and log it."""
        self.notes.append(text)
        log.info("%s", text)

    def warn(self, text: str) -> None:
        """Keep a warning for users, and log it. Called on the event loop."""
        self.notes.append(text)
        log.warning("%s", text)

    def _stopped(self) -> e.Finish:
        return e.Finish(False, self._stop_reason or "stopped", "stopped")

    async def _train(self, prepared: PreparedRun) -> e.Finish:
        self.set_stage("reading the run folder")
        parts = self.parts = await asyncio.to_thread(self.setup.begin, self, prepared)
        # Not before: a resume may replace the file of metrics.
        self._journal = JsonLinesWriter(self.options.folder / EVENTS, self.system.files, checksums=True)
        self._metrics_file = JsonLinesWriter(self.options.folder / METRICS, self.system.files)
        self.metrics = parts.metrics
        for record in parts.records:
            self._append(record)
        self._shell = ServerShell(
            parts.controller,
            self._carry_out,
            self.clock,
            self.system.observe,
            read=parts.read,
            answers=parts.answers,
            source=self._source,
            background=self.work,
            shutdown_s=self.config.timings.shutdown_s,
        )
        if self._stop_reason is not None:
            self._shell.post(e.StopRequested(self._stop_reason, self._stops_for_good))
        self.set_stage("waiting for workers")
        parts.begun()
        return await self._shell.run()

    async def interruptible(self, work: Coroutine[Any, Any, Work]) -> Work | None:
        """Wait for `work`, or for `stop`. A thread cannot be stopped; the process ends without waiting for it."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait((task,), timeout=0.1)
            if self._stop_reason is not None and not task.done():
                task.cancel()
                return None
        return task.result()

    async def _close(self) -> None:
        await self.before_close.aclose()
        await self.work.finish()  # a checkpoint under way is
        if self._shell is not None:
            await self._shell.drain()
        if self._reception is not None:
            await self._reception.close("the gateway ends")
        if self._shell is not None:  # connections of a reception that others share
            await self._shell.close("the run is over")
        for writer in (self._journal, self._metrics_file):
            if writer is not None:
                writer.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def compiling(self) -> tuple[str, float]:
        """The artifact that is being compiled, for users, and since when (Unix time in seconds).

        When none is: "", and the end of the last compilation, or the beginning of the stage.
        """
        for target, since in reversed(self.compilations.compiling.items()):
            return f"compiling and verifying {self.setup.compiles} for {target}, kept for the next run", since
        return "", max(self.stage_since, self.compilations.compiled_at)

    def wall_of(self, monotonic: float) -> float:
        """Return the Unix time, in seconds, of a moment on the controller's clock."""
        return self.clock.wall() + monotonic - self.clock.monotonic()

    def prepare(self, stage: Callable[[str], None]) -> None:
        """Fill the cache with everything that `run` prepares; `stage` is called with each activity. Blocks."""
        self.stage_seen = stage
        self.setup.prepare(self)

    def set_stage(self, stage: str) -> None:
        """Show users the activity that begins, before the run is under way."""
        self.stage, self.stage_since = stage, self.clock.wall()
        self.stage_seen(stage)
        log.info("%s", stage)

    # --- connections ------------------------------------------------------------------------------------------

    async def attend(self, connection: Connection, hello: m.Hello) -> None:
        """Attend a peer whose token was checked, until the connection ends."""
        if self._shell is None or self.ended_at is not None:
            why = "the run is over" if self.ended_at is not None else f"the gateway is not ready yet: {self.stage}"
            busy = m.Refused(code="busy", reason=why, retry=True)
            await answer_hello(connection, busy, self.config.timings.connect_s)
            return
        await self._shell.attend(connection, hello, self._terms(hello))

    def _terms(self, hello: m.Hello) -> SessionTerms:
        """Return which messages a peer with a valid token may send; only a worker's have tensors."""
        timings, is_worker = self.config.timings, hello.role == "worker"
        return SessionTerms(
            limits=self.run_parts.limits() if is_worker else None,
            allocate=allocate_expected(self.run_parts.expects) if is_worker else refuse_tensors,
            heartbeat_s=timings.heartbeat_s,
            silent_after_s=timings.silent_after_s,
            traffic=self.traffic if is_worker else None,
            on_loan=self.options.on_loan and self.run_parts.may_be_on_loan(hello),
        )

    def post(self, event: e.Event) -> None:
        """Hand an event to the controller of a run that has begun; from any thread."""
        assert self._shell is not None
        self._shell.post(event)

    def answer(self, work: Callable[[], e.Event]) -> None:
        """Begin blocking work in a thread, whose result is the controller's next event."""
        assert self._shell is not None
        self._shell.answer(work)

    @property
    def is_running(self) -> bool:
        """Whether a controller takes events."""
        return self._shell is not None and self.ended_at is None

    # --- instructions -----------------------------------------------------------------------------------------

    def _append(self, record: Record) -> None:
        assert self._journal is not None
        # Whatever happens to the power: a checkpoint must not outlive the records before it, nor tasks on
        # workers the record from which their numbers are counted.
        record = msgspec.structs.replace(record, t=self.clock.wall())
        self._journal.append(record, durable=isinstance(record, self.setup.synced))
        for follower in self.followers:
            follower.write_event(record)
        text = record.news
        if text:
            self.news = "" if record.outdates_news else text
            if self.news:
                self.events.append((record.t, text))
            log.info("%s", text)
        if note := self._lasting.of(record):
            self.warn(note)

    def _write_metrics(self, line: MetricsLine) -> None:
        assert self._metrics_file is not None
        line = self.traffic.counted(line)
        self._metrics_file.append(line)
        self.metrics = [*(one for one in self.metrics if one.number != line.number), line]
        for follower in self.followers:
            follower.write_metrics(line)

    def sync_files(self) -> None:
        """Have journal and metrics survive a power cut. In any thread. Raises `ResourceError`."""
        for writer in (self._journal, self._metrics_file):
            assert writer is not None
            writer.sync()

    def rewrite_metrics(self, rewrite: Callable[[Path, DurableFiles], list[Any]]) -> None:
        """Have `rewrite` replace the file of metrics, and go on from the lines it returns."""
        assert self._metrics_file is not None
        self._metrics_file.close()
        self.metrics = rewrite(self._metrics_file.path, self.system.files)
        self._metrics_file = JsonLinesWriter(self._metrics_file.path, self.system.files)
