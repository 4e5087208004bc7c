"""The gateway process: a run folder, a server, sessions, background work, a journal, and a controller on top.

A kind of run derives from `Gateway` and defines preparation, controller, and the execution of additional instructions.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.targets import nearest
from planetary.core.clock import Clock
from planetary.core.config import Config
from planetary.core.errors import ConflictError, PlanetaryError
from planetary.core.tensors import TensorSpec
from planetary.data.fitted_keys import changes
from planetary.data.prepared_data import PreparedData
from planetary.fleet.controller.controller import RunController
from planetary.fleet.gateway.invites import InviteList
from planetary.fleet.gateway.reception import Reception
from planetary.fleet.gateway.roll_out import RollOut, StepWanted
from planetary.fleet.gateway.run_files import EVENTS, METRICS, RunLock, check_config
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.news import LastingNews
from planetary.fleet.protocol.records import CheckpointWritten, RoundFinished, RunFinished, RunResumed, RunStarted
from planetary.fleet.protocol.status import MOST_EVENTS, Leave, RoundMetrics, RunStatus
from planetary.fleet.protocol.traffic import WorkerTraffic
from planetary.fleet.shell.shell import Address, Answer, Background, Read, ServerShell, SessionTerms, TensorSource
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.journal import Record
from planetary.net.authority import Authority
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, answer_hello
from planetary.wire.limits import Limits
from planetary.wire.protocol import Protocol as WireProtocol
from planetary.wire.streams import ReceivedMessage, refuse_tensors

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
    # they are anywhere, and `train.rounds` counts
    local_threads: int | None = None
    on_loan: bool = False  # workers outlive this run or a ban by it, and go on with other runs
    again: str = ""  # command that resumes the run, for people; "": `planetary train`
    uplink: Address | None = None  # hub of the run's federation; None: as its configuration says


class Demand(msgspec.Struct, frozen=True):
    """How many workers a run can use.

    Attributes:
        least: without so many it does not go on well.
        most: more would be idle; None: it can use any number.
    """

    least: int
    most: int | None


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


class PreparedRun(Protocol):
    """The parts every kind of run is made of."""

    @property
    def param_count(self) -> int:
        """Trained parameters."""
        ...

    @property
    def data(self) -> PreparedData | None:
        """The prepared token files; None: nothing is trained."""
        ...

    @property
    def config(self) -> Config:
        """The run's configuration, fitted to the data."""
        ...


class RunStart(Protocol):
    """The state a gateway goes on from."""

    @property
    def records(self) -> Iterable[Record]:
        """New ones: to be written to the journal."""
        ...

    @property
    def metrics(self) -> list[RoundMetrics]:
        """Of earlier rounds."""
        ...


class Follower(Protocol):
    """Gets a run's metrics and events as they are written. Methods return at once and do not raise."""

    def write_round(self, line: RoundMetrics) -> None:
        """Take the metrics of a round."""
        ...

    def write_event(self, record: Record) -> None:
        """Take a record of the journal, with the time."""
        ...


PreparedT = TypeVar("PreparedT", bound=PreparedRun)
StartT = TypeVar("StartT", bound=RunStart)
ControllerT = TypeVar("ControllerT", bound=RunController[Any])


class Gateway(ABC, Generic[PreparedT, StartT, ControllerT]):
    """One run. Make it, `start` it, `run` it.

    Attributes:
        protocol: messages of this kind of run.
        traffic_of: class of the counter of bytes by round.
        compiles: name of the artifact that workers get, for users.
        synced: records that are on the disk before anything else happens, whatever becomes of the power.
        followers: receivers of metrics and events.
    """

    protocol: ClassVar[WireProtocol] = m.FABRIC
    traffic_of: ClassVar[type[WorkerTraffic]] = WorkerTraffic
    compiles: ClassVar[str] = "the training step"
    synced: ClassVar[tuple[type[Record], ...]] = (
        RunStarted,
        RunResumed,
        RoundFinished,
        RunFinished,
    )

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        *,
        system: System = SYSTEM,
    ) -> None:
        """Nothing is opened before `start`. `system`: the machine."""
        self.config = config
        self.options = options
        self.endpoint = ""  # URL that clients of the run's kind use; "": it has none
        self.traffic = self.traffic_of()
        self.web_app: Any = None  # ASGI application that answers there
        self.stage = "starting"
        self.stage_since = 0.0  # Unix time in seconds; 0: before any
        self.stage_seen: Callable[[str], None] = lambda _: None
        self.prepare_first: Callable[[], Coroutine[Any, Any, None]] | None = None  # fills the cache in another process
        self.started_at = 0.0  # Unix time in seconds
        self.ended_at: float | None = None
        self.roll_out_stage = RollOut()
        self.metrics: list[RoundMetrics] = []
        self.checkpoint_at: float | None = None  # Unix time in seconds at which the newest was written, if known
        self.bigram_loss: float | None = None  # held-out, of a bigram model of the same tokens
        self.events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)  # see `RunStatus`
        self.news = ""  # the newest event worth telling
        self.notes: list[str] = []  # decisions before training, and warnings during it
        self.followers: list[Follower] = []
        self._lasting = LastingNews()
        self.prepared: PreparedT | None = None
        self.controller: ControllerT | None = None
        self._start: StartT | None = None
        self._security = security
        self._system = system
        self._clock = system.clock
        self.store = BlobStore(options.cache / "blobs", system.files)
        self._shell: ServerShell[e.Finish] | None = None
        self._reception: Reception | None = None
        self._lock: RunLock | None = None
        self._journal: JsonLinesWriter | None = None
        self._metrics_file: JsonLinesWriter | None = None
        self._work = Background()
        self._compilations = Compilations(self._compile_for, self._post, system.clock, self._work)
        self._stop_reason: str | None = None
        self._stops_for_good = False

    # --- added by a kind of run -------------------------------------------------------------------------------

    @abstractmethod
    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""

    @abstractmethod
    def _prepare(self) -> PreparedT:
        """Make everything that does not depend on the run folder. In a thread; may take minutes."""

    @abstractmethod
    def _begin(self, prepared: PreparedT) -> StartT:
        """Read or make the run folder. In a thread."""

    @abstractmethod
    def _control(self, prepared: PreparedT, start: StartT) -> ControllerT:
        """Make the controller. In a thread."""

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        """Carry out an instruction without answer; this knows those of every kind."""
        match instruction:
            case e.Append():
                assert isinstance(instruction.record, Record)
                self._append(instruction.record)
            case e.Compile():
                self._compilations.compile(instruction)
                log.info("%s", self.compiling[0])
            case e.WriteMetrics():
                self._write_metrics(instruction.metrics)
            case e.Finish():
                self.ended_at = self._clock.wall()
                return instruction
        return None

    def _answers(self) -> Mapping[type[e.Instruction], Answer]:
        """Return the functions that answer instructions, each called in a thread."""
        return {}

    @abstractmethod
    def _limits(self) -> Limits:
        """Return the types of message a worker may send."""

    @abstractmethod
    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        """Return where a worker's tensor goes. Raises `RemoteProtocolError` for one that is not expected."""

    def _reader(self) -> Read:
        """Return the function that makes the controller's event of a message."""
        return _without_tensors

    @abstractmethod
    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        """Compile and verify the artifact that workers run."""

    async def _fit(self, prepared: PreparedT) -> PreparedT | None:
        """Fit a new run to this machine; return the parts then, None to stop."""
        return prepared

    def roll_out(self, wanted: StepWanted) -> None:
        """Begin to replace the run's training step at the end of a round. Called on the event loop.

        Raises:
            ConflictError: a run of this kind, or in this state, has none that can be replaced.
            UserError: there is no such step.
        """
        raise ConflictError(
            f"{self.compiles} of this run cannot be replaced: runs in rounds have one training step that can",
            code="step_fixed",
        )

    def _begun(self) -> None:
        """Take note that the controller decides from now on. Called on the event loop."""

    def _release(self) -> None:
        """End the work the kind has begun beside the event loop. In a thread, at the end."""

    def _source(self, payload: e.Payload | None) -> TensorSource | None:
        """Return a function that returns the tensors of a message in the message's turn."""
        if isinstance(payload, e.BlobOf):
            digest = payload.digest
            return lambda: {"blob": np.frombuffer(self.store.get(digest), np.uint8)}
        return None

    def _bytes_of(self, round_: int) -> tuple[int, int, int]:
        """Bytes of a round: from workers, to workers, among workers."""
        return *self.traffic.of_round(round_), self.traffic.of_ring(round_)

    @property
    def is_unfitted(self) -> bool:
        """Whether the run's length still has to be derived from `train.target_minutes`."""
        local = self.options.local_threads is not None and not self.options.resume
        return local and self.config.train.target_minutes > 0

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self.options.port if self._reception is None else self._reception.port

    async def start(self) -> None:
        """Open, and listen, so workers can connect and wait. Raises the errors of both."""
        await self.open()
        security = self._security
        self._reception = Reception(
            self.attend,
            self.protocol,
            self.config.timings,
            tokens=security.tokens,
            invites=security.invites,
            knows=self.knows,
            system=self._system,
        )
        await self._reception.listen(self.options.host, self.options.port, security.tls)

    async def open(self) -> None:
        """Take the run folder; peers come by `attend`, from a reception that several runs share. Raises as `start`."""
        if self.options.resume:
            check_config(self.options.folder)
        self._lock = RunLock(self.options.folder, self._system.files)
        self.started_at = self._clock.wall()

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
        return Demand(least=1, most=None)

    # --- the run ----------------------------------------------------------------------------------------------

    async def run(self, prepared: Callable[[PreparedT], None] | None = None) -> e.Finish:
        """Prepare and train until the run is finished, failed or stopped; `prepared` is called in between."""
        try:
            if self.prepare_first is not None:
                await self._interruptible(self.prepare_first())
                if self._stop_reason is not None:
                    return self._stopped()
            made = self.prepared = await self._interruptible(asyncio.to_thread(self._prepare))
            if made is None:
                return self._stopped()
            told = made.data.notes if made.data is not None else ()
            self.notes += filter(None, (*told, changes(self.config, made.config)))
            self.config = made.config
            made = self.prepared = await self._fit(made)
            if made is None:
                return self._stopped()
            self._settle_length()
            if prepared is not None:
                await asyncio.to_thread(prepared, made)
            return await self._train(made)
        finally:
            await self._close()
            await asyncio.to_thread(self._release)

    def _settle_length(self) -> None:
        """Have `train.rounds` count, and say so, where the run was not fitted to `train.target_minutes`."""
        train = self.config.train
        if not train.target_minutes:
            return
        if self.options.local_threads is None:
            why = "the workers may be on other machines"
        elif self.options.resume:
            why = "a run that goes on has its length already"
        else:
            why = "a run of this kind is not fitted to its machine"
        note = (
            f"train.target_minutes = {train.target_minutes:g} has no effect: {why}; the run has {train.rounds} rounds"
        )
        self.note(note)
        settled = msgspec.structs.replace(train, target_minutes=0.0)
        self.config = msgspec.structs.replace(self.config, train=settled)

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

    async def _train(self, prepared: PreparedT) -> e.Finish:
        self.set_stage("reading the run folder")
        start = self._start = await asyncio.to_thread(self._begin, prepared)
        # Not before: a resume may replace the file of metrics.
        self._journal = JsonLinesWriter(self.options.folder / EVENTS, self._system.files, checksums=True)
        self._metrics_file = JsonLinesWriter(self.options.folder / METRICS, self._system.files)
        self.metrics = start.metrics
        for record in start.records:
            self._append(record)
        controller = self.controller = await asyncio.to_thread(self._control, prepared, start)
        self._shell = ServerShell(
            controller,
            self._carry_out,
            self._clock,
            self._system.observe,
            read=self._reader(),
            answers=self._answers(),
            source=self._source,
            background=self._work,
            shutdown_s=self.config.timings.shutdown_s,
        )
        if self._stop_reason is not None:
            self._shell.post(e.StopRequested(self._stop_reason, self._stops_for_good))
        self.set_stage("waiting for workers")
        self._begun()
        return await self._shell.run()

    async def _interruptible(self, work: Coroutine[Any, Any, Work]) -> Work | None:
        """Wait for `work`, or for `stop`. A thread cannot be stopped; the process ends without waiting for it."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait((task,), timeout=0.1)
            if self._stop_reason is not None and not task.done():
                task.cancel()
                return None
        return task.result()

    async def _close(self) -> None:
        await self._work.finish()  # a checkpoint under way is
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
        for target, since in reversed(self._compilations.compiling.items()):
            return f"compiling and verifying {self.compiles} for {target}, kept for the next run", since
        return "", max(self.stage_since, self._compilations.compiled_at)

    def wall_of(self, monotonic: float) -> float:
        """Return the Unix time, in seconds, of a moment on the controller's clock."""
        return self._clock.wall() + monotonic - self._clock.monotonic()

    def prepare(self, stage: Callable[[str], None]) -> None:
        """Fill the cache with everything that `run` prepares; `stage` is called with each activity. Blocks."""
        self.stage_seen = stage
        self._prepare()

    def set_stage(self, stage: str) -> None:
        """Show users the activity that begins, before the run is under way."""
        self.stage, self.stage_since = stage, self._clock.wall()
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

    def _is_on_loan(self, hello: m.Hello) -> bool:
        """Whether a peer goes on with other runs when this one has ended."""
        return self.options.on_loan

    def _terms(self, hello: m.Hello) -> SessionTerms:
        """Return which messages a peer with a valid token may send; only a worker's have tensors."""
        timings, is_worker = self.config.timings, hello.role == "worker"
        return SessionTerms(
            limits=self._limits() if is_worker else None,
            allocate=self._allocate if is_worker else refuse_tensors,
            heartbeat_s=timings.heartbeat_s,
            silent_after_s=timings.silent_after_s,
            traffic=self.traffic if is_worker else None,
            on_loan=self._is_on_loan(hello),
        )

    def _post(self, event: e.Event) -> None:
        assert self._shell is not None
        self._shell.post(event)

    # --- instructions -----------------------------------------------------------------------------------------

    def _append(self, record: Record) -> None:
        assert self._journal is not None
        # Whatever happens to the power: a checkpoint must not outlive the records of the round it is of, nor tasks on
        # workers the record from which their numbers are counted.
        record = msgspec.structs.replace(record, t=self._clock.wall())
        self._journal.append(record, durable=isinstance(record, self.synced))
        for follower in self.followers:
            follower.write_event(record)
        text = record.news
        if text:
            # The displays show the rounds themselves; one that is finished makes older news old.
            self.news = "" if isinstance(record, RoundFinished) else text
            if self.news:
                self.events.append((record.t, text))
            log.info("%s", text)
        if isinstance(record, CheckpointWritten):
            self.checkpoint_at = record.t
        if note := self._lasting.of(record):
            self.warn(note)

    def _write_metrics(self, metrics: RoundMetrics) -> None:
        assert self._metrics_file is not None
        up, down, ring = self._bytes_of(metrics.round)
        metrics = msgspec.structs.replace(  # an earlier gateway may have counted some
            metrics,
            bytes_up=metrics.bytes_up + up,
            bytes_down=metrics.bytes_down + down,
            bytes_ring=metrics.bytes_ring + ring,
        )
        self._metrics_file.append(metrics)
        self.metrics.append(metrics)
        for follower in self.followers:
            follower.write_round(metrics)


async def _without_tensors(session: int, received: ReceivedMessage) -> e.Event:
    return e.Received(session, received.message)


class Compilations:
    """The artifacts a run has made for workers. Methods are called on the event loop.

    Attributes:
        free_compilers: held by whatever compiles.
        compiled_at: Unix time in seconds at which compiling last ended; 0: it never did.
        compiling: target -> Unix time in seconds at which it began.
    """

    def __init__(
        self,
        compile_for: Callable[[CompileTarget], Awaitable[PublishedArtifact]],
        post: Callable[[e.Event], None],
        clock: Clock,
        background: Background,
    ) -> None:
        """`compile_for` compiles and verifies an artifact; `post` takes the events."""
        # One at a time: a compilation uses all cores, and takes some hundred MB.
        self.free_compilers = asyncio.Semaphore(1)
        self._compile_for, self.post, self._clock, self._background = compile_for, post, clock, background
        self.compiled_at = 0.0
        self.compiling: dict[str, float] = {}

    def compile(self, instruction: e.Compile) -> None:
        """Begin; `Compiled` or `CompileFailed` is posted. At the end a compiler is killed with its parent process."""
        self.compiling[f"{instruction.backend}:{instruction.target}"] = self._clock.wall()
        self._background.add(self._compile(instruction), cancels=True)

    async def _compile(self, instruction: e.Compile) -> None:
        backend, target, features = instruction.backend, instruction.target, instruction.features
        began, name = self._clock.monotonic(), f"{backend}:{target}"
        try:
            if note := nearest(backend, target)[1]:
                log.info("%s", note)
            async with self.free_compilers:  # each takes some hundred MB, and every invite can ask for one
                began, self.compiling[name] = self._clock.monotonic(), self._clock.wall()
                published = await self._compile_for(CompileTarget(backend, target, features))
        except PlanetaryError as error:
            self.post(e.CompileFailed(backend, target, features, str(error), instruction.edition))
            return
        except Exception as error:
            log.exception("compiling for %s:%s failed", backend, target)
            text = f"{type(error).__name__}: {error}"
            self.post(e.CompileFailed(backend, target, features, text, instruction.edition))
            return
        finally:
            self.compiling.pop(name, None)
            self.compiled_at = self._clock.wall()
        seconds = self._clock.monotonic() - began
        self.post(compiled_event(CompileTarget(backend, target, features), published, seconds, instruction.edition))


def compiled_event(
    target: CompileTarget, published: PublishedArtifact, seconds: float = 0.0, edition: int = 0
) -> e.Compiled:
    """Return the event of an artifact published for a target, after `seconds` of work."""
    return e.Compiled(
        target.backend,
        target.name,
        target.features,
        published.digest,
        published.nbytes,
        seconds,
        published.verified,
        published.reference,
        edition,
    )
