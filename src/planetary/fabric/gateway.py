"""The gateway process: the training controller on real connections, with real parameters and a real disk."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.artifacts.store import BlobStore
from planetary.core.clock import Clock, SystemClock
from planetary.core.config import Config
from planetary.core.errors import CompileError, PlanetaryError, RemoteProtocolError
from planetary.core.tensors import TensorSpec
from planetary.data.reader import read_slice
from planetary.diloco.ring import state_specs
from planetary.fabric import events as e
from planetary.fabric.controller import Controller
from planetary.fabric.gateway_start import Start, begin, trim_metrics
from planetary.fabric.gateway_status import status_of
from planetary.fabric.gateway_work import GatewayWork
from planetary.fabric.news import news_of
from planetary.fabric.outbox import Outbox
from planetary.fabric.preparation import Prepared, prepare_run
from planetary.fabric.records import AnyRecord, RoundFinished, RunFinished
from planetary.fabric.ring_master import RingMaster
from planetary.fabric.run_files import EVENTS, METRICS, RunLock
from planetary.fabric.shell import Shell
from planetary.fabric.status import RoundMetrics, RunStatus
from planetary.fabric.traffic import Traffic
from planetary.net.authority import Authority
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, answer_hello, judge_hello, receive_hello
from planetary.net.server import Server, serve
from planetary.version import __version__
from planetary.wire import messages as m
from planetary.wire.inbox import Received, refuse_tensors
from planetary.wire.limits import MIB, Limits

log = logging.getLogger(__name__)


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is started."""

    folder: Path  # of the run
    cache: Path  # of prepared data and compiled modules; survives the run
    host: str
    port: int
    resume: bool
    resume_from: Path | None = None  # a checkpoint to resume from instead of the newest


class Gateway:
    """One run. Make it, `start` it, `run` it."""

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        tls: ssl.SSLContext | None,
        tokens: TokenCheck | None,
        *,
        clock: Clock | None = None,
        authority: Authority | None = None,
    ) -> None:
        """`tls` and `tokens` None: plain connections, on loopback only.

        `authority`: the one that they come from; the ring topology needs it, for connections among workers.
        """
        self.config = config
        self.options = options
        self.traffic = Traffic()
        self.stage = "starting"
        self.prepared: Prepared | None = None
        self.controller: Controller | None = None
        self.started_at = 0.0  # Unix time in seconds
        self.ended_at: float | None = None
        self.metrics: list[RoundMetrics] = []
        self.news = ""  # the newest event worth telling
        self._tls, self._tokens = tls, tokens
        self._clock = clock or SystemClock()
        self._store = BlobStore(options.cache / "blobs")
        self._shell: Shell[e.Finish] | None = None
        self._server: Server | None = None
        self._ring = RingMaster(config.sync, options.host, authority)
        self._lock: RunLock | None = None
        self._journal: JsonLinesWriter | None = None
        self._metrics_file: JsonLinesWriter | None = None
        self._start: Start | None = None
        self._sessions = 0
        self._outboxes: dict[int, Outbox] = {}
        self._work: GatewayWork | None = None
        self._stop_reason: str | None = None

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

    async def run(self, prepared: Callable[[Prepared], None] | None = None) -> e.Finish:
        """Prepare and train until the run is finished, failed or stopped; `prepared` is called in between."""
        try:
            self.prepared = await self._interruptible(
                asyncio.to_thread(prepare_run, self.config, self.options.cache, self._set_stage)
            )
            if self.prepared is None:
                return e.Finish(False, self._stop_reason or "stopped", "stopped")
            if prepared is not None:
                await asyncio.to_thread(prepared, self.prepared)
            return await self._train(self.prepared)
        finally:
            await self._close()

    def stop(self, reason: str) -> None:
        """End the run in order; it can be resumed. Called on the event loop."""
        self._stop_reason = self._stop_reason or reason
        if self._shell is not None:
            self._shell.post(e.StopRequested(reason))

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        return status_of(self, self._clock.wall(), self._clock.monotonic())

    # --- the run ----------------------------------------------------------------------------------------------

    async def _train(self, prepared: Prepared) -> e.Finish:
        folder = self.options.folder
        self._set_stage("reading the run folder")
        self._ring.start()
        start = await asyncio.to_thread(begin, self.config, self.options, prepared, self._ring.port)
        self._start = start
        # Not before: a resume may replace the file of metrics.
        self._journal = JsonLinesWriter(folder / EVENTS)
        self._metrics_file = JsonLinesWriter(folder / METRICS)
        now = self._clock.monotonic()
        self.metrics = start.metrics
        for record in start.records:
            self._append(record)
        self.controller = Controller(start.policy, start.state, now, start.unreported)
        self._shell = Shell(self.controller, self._carry_out, self._clock)
        self._work = GatewayWork(self.config, self.options, prepared, start, self._shell.post)
        if self._stop_reason is not None:
            self._shell.post(e.StopRequested(self._stop_reason))
        self._set_stage("waiting for workers")
        return await self._shell.run()

    async def _interruptible(self, work: Coroutine[Any, Any, Prepared]) -> Prepared | None:
        """Wait for `work`, or for `stop`. A thread cannot be stopped; the process ends without waiting for it."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait((task,), timeout=0.1)
            if self._stop_reason is not None and not task.done():
                task.cancel()
                return None
        return task.result()

    async def _close(self) -> None:
        if self._work is not None:
            await self._work.finish()  # a checkpoint under way is
        for outbox in list(self._outboxes.values()):
            try:
                async with asyncio.timeout(self.config.timings.shutdown_s):
                    await outbox.drain()
            except TimeoutError:
                log.info("%s did not take the last messages in time", outbox.connection.peer)
        if self._server is not None:
            await self._server.close("the gateway ends")
        await asyncio.to_thread(self._ring.stop)
        for writer in (self._journal, self._metrics_file):
            if writer is not None:
                writer.close()
        if self._lock is not None:
            self._lock.release()

    def _set_stage(self, stage: str) -> None:
        self.stage = stage
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
        outbox = Outbox(
            connection,
            self.traffic.add_down if is_worker else None,
            lambda reason: shell.post(e.SendFailed(session, reason)) if shell is not None else None,
        )
        self._outboxes[session] = outbox
        reason = "the connection ended"
        assert self._shell is not None
        try:
            self._admit(connection, is_worker)
            self._shell.post(e.Received(session, hello))
            while True:
                before = connection.bytes_received
                received = await connection.receive()
                if is_worker:
                    self.traffic.add_up(received.message, connection.bytes_received - before)
                await self._pass_on(session, received)
        except PlanetaryError as error:
            reason = str(error)
            raise
        finally:
            outbox.abandon()
            self._outboxes.pop(session, None)
            self._shell.post(e.Closed(session, reason))

    def _admit(self, connection: Connection, is_worker: bool) -> None:
        timings = self.config.timings
        if is_worker:
            assert self._start is not None
            params = self._start.policy.spec.params
            if self._start.policy.ring is not None:
                params = state_specs(params)
            specs = {spec.name: spec for spec in params}
            total = sum(spec.nbytes for spec in specs.values())
            limits = Limits(tensor_bytes=2 * total + MIB, tensors=len(specs), messages_under_way=2)
            connection.accept_peer(limits, lambda message, spec: _allocate(specs, message, spec))
        else:
            connection.accept_peer(allocate=refuse_tensors)
        connection.keep_alive(timings.heartbeat_s, timings.silent_after_s)

    async def _pass_on(self, session: int, received: Received) -> None:
        assert self._shell is not None
        message, defect, attachment = received.message, "", 0
        parameters = self._parameters
        if isinstance(message, m.OuterState):
            defect = await asyncio.to_thread(parameters.check_state, message, received.tensors)
            attachment = parameters.attach(received.tensors)
        elif isinstance(message, m.TrainResult) and not self._ring.wanted:
            defect = await asyncio.to_thread(parameters.check, received.tensors)
            attachment = parameters.attach(received.tensors)
        self._shell.post(e.Received(session, message, defect, attachment))

    # --- instructions -----------------------------------------------------------------------------------------

    @property
    def _parameters(self) -> Any:
        assert self._start is not None
        return self._start.parameters

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        work = self._work
        assert work is not None
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
                    work.add(self._close_session(outbox, instruction.reason))
            case e.Compile():
                target = f"{instruction.backend}:{instruction.target}"
                self._set_stage(f"compiling and verifying the training step for {target}")
                work.compile(instruction)
            case e.TakeOuterStep():
                work.take_outer_step(instruction)
            case e.KeepParameters():
                self._parameters.keep(instruction.versions)
            case e.DropAttachment():
                self._parameters.drop(instruction.attachment)
            case e.KeepOuterState():
                self._parameters.adopt(instruction.version, instruction.attachment)
            case e.ForgetRounds():
                self._forget_rounds(instruction.after)
            case e.WriteCheckpoint():
                work.write_checkpoint(instruction)
            case e.WriteMetrics():
                self._write_metrics(instruction.metrics)
            case e.Finish():
                self.ended_at = self._clock.wall()
                return instruction
        return None

    def _append(self, record: AnyRecord) -> None:
        assert self._journal is not None
        durable = isinstance(record, RoundFinished | RunFinished)
        self._journal.append(msgspec.structs.replace(record, t=self._clock.wall()), durable=durable)
        text = news_of(record)
        if text:
            # The displays show the rounds themselves; one that is finished makes older news old.
            self.news = "" if isinstance(record, RoundFinished) else text
            log.info("%s", text)

    def _write_metrics(self, metrics: RoundMetrics) -> None:
        assert self._metrics_file is not None
        up, down = self.traffic.of_round(metrics.round)
        ring = self.traffic.of_ring(metrics.round)
        metrics = msgspec.structs.replace(metrics, bytes_up=up, bytes_down=down, bytes_ring=ring)
        self._metrics_file.append(metrics)
        self.metrics.append(metrics)

    def _forget_rounds(self, after: int) -> None:
        assert self._metrics_file is not None
        self._metrics_file.close()
        self.metrics = trim_metrics(self._metrics_file.path, after)
        self._metrics_file = JsonLinesWriter(self._metrics_file.path)

    def _source(self, payload: e.Payload | None) -> Callable[[], Mapping[str, np.ndarray]] | None:
        match payload:
            case e.ParametersOf():
                params = self._parameters.of_version(payload.version)
                return lambda: params
            case e.OuterStateOf():
                outer = self._parameters.outer_state(payload.version)
                return lambda: outer
            case e.BlobOf():
                digest = payload.digest
                return lambda: {"blob": np.frombuffer(self._store.get(digest), np.uint8)}
            case e.TokensOf():
                assert self.prepared is not None
                data = self.prepared.data
                file = data.held_out if payload.held_out else data.train
                piece = file.slice(payload.offset, payload.count)
                return lambda: {"tokens": read_slice(piece)}
        return None

    async def _close_session(self, outbox: Outbox, reason: str) -> None:
        try:
            async with asyncio.timeout(self.config.timings.shutdown_s):
                await outbox.drain()
        except TimeoutError:
            log.info("%s did not take the last messages in time", outbox.connection.peer)
        await outbox.connection.close(reason)


def _allocate(specs: Mapping[str, TensorSpec], message: m.Message, spec: TensorSpec) -> np.ndarray:
    """Take a parameter of the model, or what calls itself one: it is judged, and its worker named, when it is here."""
    if not isinstance(message, m.TrainResult | m.OuterState) or spec.name not in specs:
        raise RemoteProtocolError(
            f"reading {type(message).__name__}: a tensor named {spec.name!r} is not expected with it"
        )
    return spec.empty()


__all__ = ["CompileError", "Gateway", "GatewayOptions"]
