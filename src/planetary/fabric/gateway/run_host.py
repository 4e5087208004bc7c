"""What every gateway process is, whatever it trains: a run folder, a server, sessions, background work, a journal."""

from __future__ import annotations

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.artifacts.store import BlobStore
from planetary.core.clock import Clock, SystemClock
from planetary.core.config import Config
from planetary.core.errors import PlanetaryError
from planetary.fabric.gateway.background import Background
from planetary.fabric.gateway.run_files import RunLock
from planetary.fabric.preparation.compiling import CompileTarget, Published
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.news import news_of
from planetary.fabric.protocol.records import Record, RoundFinished, RunFinished
from planetary.fabric.protocol.status import RoundMetrics, RunStatus
from planetary.fabric.protocol.traffic import Traffic
from planetary.fabric.shell.outbox import Outbox
from planetary.fabric.shell.shell import Shell
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, answer_hello, judge_hello, receive_hello
from planetary.net.server import Server, serve
from planetary.version import __version__
from planetary.wire import messages as m
from planetary.wire.inbox import Received

log = logging.getLogger(__name__)

Work = TypeVar("Work")


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is started."""

    folder: Path  # of the run
    cache: Path  # of prepared data and compiled modules; survives the run
    host: str
    port: int
    resume: bool
    resume_from: Path | None = None  # a checkpoint to resume from instead of the newest
    # threads of each of the run's workers, which are all on this machine: `train.target_minutes` is then kept to. None:
    # they are anywhere, and `train.rounds` counts
    local_threads: int | None = None


class RunHost(ABC):
    """One run. Make it, `start` it, `run` it; what is trained is the business of its two kinds."""

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        tls: ssl.SSLContext | None,
        tokens: TokenCheck | None,
        *,
        clock: Clock | None = None,
    ) -> None:
        """`tls` and `tokens` None: plain connections, on loopback only."""
        self.config = config
        self.options = options
        self.traffic = Traffic()
        self.stage = "starting"
        self.stage_since = 0.0  # Unix time in seconds; 0: before any
        self.started_at = 0.0  # Unix time in seconds
        self.ended_at: float | None = None
        self.metrics: list[RoundMetrics] = []
        self.news = ""  # the newest event worth telling
        self.notes: list[str] = []  # what was decided before training
        self._tls, self._tokens = tls, tokens
        self._clock = clock or SystemClock()
        self._store = BlobStore(options.cache / "blobs")
        self._shell: Shell[e.Finish] | None = None
        self._server: Server | None = None
        self._lock: RunLock | None = None
        self._journal: JsonLinesWriter | None = None
        self._metrics_file: JsonLinesWriter | None = None
        self._sessions = 0
        self._outboxes: dict[int, Outbox] = {}
        self._work = Background(self._compile_for, self._post)
        self._stop_reason: str | None = None

    # --- what the two kinds differ in -------------------------------------------------------------------------

    @abstractmethod
    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""

    @abstractmethod
    def _admit(self, connection: Connection, session: int, *, is_worker: bool) -> None:
        """Say what a peer that showed its token may send."""

    @abstractmethod
    async def _pass_on(self, session: int, received: Received) -> None:
        """Give a message to the controller."""

    @abstractmethod
    async def _compile_for(self, target: CompileTarget) -> Published:
        """Compile and verify what workers run."""

    def _source(self, payload: e.Payload | None) -> Callable[[], Mapping[str, np.ndarray]] | None:
        """Return what gives the tensors of a message when it is its turn."""
        if isinstance(payload, e.BlobOf):
            digest = payload.digest
            return lambda: {"blob": np.frombuffer(self._store.get(digest), np.uint8)}
        return None

    def _bytes_of(self, round_: int) -> tuple[int, int, int]:
        """Bytes of a round: from workers, to workers, among workers."""
        return *self.traffic.of_round(round_), self.traffic.of_ring(round_)

    def _news_of(self, record: Record) -> str:
        return news_of(record)

    @property
    def is_unfitted(self) -> bool:
        """Whether the run's length still has to be derived from `train.target_minutes`."""
        local = self.options.local_threads is not None and not self.options.resume
        return local and self.config.train.target_minutes > 0

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        assert self._server is not None
        return self._server.port

    async def start(self) -> None:
        """Take the run folder and listen, so that workers can connect and wait. Raises what is wrong with either."""
        self._lock = RunLock(self.options.folder)
        self.started_at = self._clock.wall()
        self._server = await serve(self.options.host, self.options.port, self._attend, tls=self._tls)

    def stop(self, reason: str) -> None:
        """End the run in order; it can be resumed. Called on the event loop."""
        self._stop_reason = self._stop_reason or reason
        if self._shell is not None:
            self._shell.post(e.StopRequested(reason))

    # --- the run ----------------------------------------------------------------------------------------------

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
        for outbox in list(self._outboxes.values()):
            try:
                async with asyncio.timeout(self.config.timings.shutdown_s):
                    await outbox.drain()
            except TimeoutError:
                log.info("%s did not take the last messages in time", outbox.connection.peer)
        if self._server is not None:
            await self._server.close("the gateway ends")
        for writer in (self._journal, self._metrics_file):
            if writer is not None:
                writer.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def compiling(self) -> tuple[str, float]:
        """What is being compiled, for people, and since when (Unix time in seconds).

        When nothing is: "", and when the last thing was, or since when the stage is what it is.
        """
        for target, since in self._work.compiling.items():
            return f"compiling and verifying the training step for {target}, kept for the next run", since
        return "", max(self.stage_since, self._work.compiled_at)

    def _set_stage(self, stage: str) -> None:
        self.stage, self.stage_since = stage, self._clock.wall()
        log.info("%s", stage)

    # --- connections ------------------------------------------------------------------------------------------

    async def _attend(self, connection: Connection) -> None:
        timings = self.config.timings
        hello = await receive_hello(connection, timings.connect_s)
        welcome = m.Welcome(
            run=self.config.run.name, heartbeat_s=timings.heartbeat_s, silent_after_s=timings.silent_after_s
        )
        verdict = judge_hello(hello, welcome=welcome, software=__version__, tokens=self._tokens, now=self._clock.wall())
        if isinstance(verdict, m.Welcome) and self._shell is None:
            verdict = m.Refused(code="busy", reason=f"the gateway is not ready yet: {self.stage}", retry=True)
        if isinstance(verdict, m.Refused):
            await answer_hello(connection, verdict, timings.connect_s)
            return
        self._sessions += 1
        session = self._sessions
        is_worker = hello.role == "worker"
        shell = self._shell

        def sent(message: m.Message, nbytes: int, has_tensors: bool) -> None:
            if is_worker:
                self.traffic.add_down(message, nbytes)
            if has_tensors and shell is not None:
                shell.post(e.PayloadSent(session, message))

        outbox = Outbox(
            connection,
            sent,
            lambda reason: shell.post(e.SendFailed(session, reason)) if shell is not None else None,
        )
        self._outboxes[session] = outbox
        reason = "the connection ended"
        assert self._shell is not None
        try:
            self._admit(connection, session, is_worker=is_worker)
            self._shell.post(e.Received(session, hello))
            counted = connection.bytes_received
            while True:
                received = await connection.receive()
                if is_worker:  # with what came in while the message before was passed on
                    self.traffic.add_up(received.message, connection.bytes_received - counted)
                counted = connection.bytes_received
                await self._pass_on(session, received)
        except PlanetaryError as error:
            reason = str(error)
            raise
        finally:
            outbox.abandon()
            self._outboxes.pop(session, None)
            self._shell.post(e.Closed(session, reason))

    def _post(self, event: e.Event) -> None:
        assert self._shell is not None
        self._shell.post(event)

    # --- instructions -----------------------------------------------------------------------------------------

    def _carry_out_common(self, instruction: e.Instruction) -> e.Finish | None:
        match instruction:
            case e.Append():
                self._append(instruction.record)
            case e.Send():
                outbox = self._outboxes.get(instruction.session)
                if outbox is not None:
                    outbox.put(instruction.message, self._source(instruction.payload))
            case e.Close():
                outbox = self._outboxes.get(instruction.session)
                if outbox is not None:
                    self._work.add(self._close_session(outbox, instruction.reason))
            case e.Compile():
                target = f"{instruction.backend}:{instruction.target}"
                self._set_stage(f"compiling and verifying the training step for {target}")
                self._work.compile(instruction)
            case e.WriteMetrics():
                self._write_metrics(instruction.metrics)
            case e.Finish():
                self.ended_at = self._clock.wall()
                return instruction
        return None

    def _append(self, record: Record) -> None:
        assert self._journal is not None
        durable = isinstance(record, RoundFinished | RunFinished)
        self._journal.append(msgspec.structs.replace(record, t=self._clock.wall()), durable=durable)
        text = self._news_of(record)
        if text:
            # The displays show the rounds themselves; one that is finished makes older news old.
            self.news = "" if isinstance(record, RoundFinished) else text
            log.info("%s", text)

    def _write_metrics(self, metrics: RoundMetrics) -> None:
        assert self._metrics_file is not None
        up, down, ring = self._bytes_of(metrics.round)
        metrics = msgspec.structs.replace(metrics, bytes_up=up, bytes_down=down, bytes_ring=ring)
        self._metrics_file.append(metrics)
        self.metrics.append(metrics)

    async def _close_session(self, outbox: Outbox, reason: str) -> None:
        try:
            async with asyncio.timeout(self.config.timings.shutdown_s):
                await outbox.drain()
        except TimeoutError:
            log.info("%s did not take the last messages in time", outbox.connection.peer)
        await outbox.connection.close(reason)
