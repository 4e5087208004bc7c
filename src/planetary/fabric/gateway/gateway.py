"""The gateway process: the training controller on real connections, with real parameters and a real disk."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.core.clock import Clock
from planetary.core.config import Config
from planetary.core.errors import CompileError, RemoteProtocolError
from planetary.core.tensors import TensorSpec
from planetary.data.fitting import changes, fit_to_data
from planetary.data.reader import read_slice
from planetary.diloco.ring import state_specs
from planetary.fabric.controller.controller import Controller
from planetary.fabric.gateway.gateway_start import Start, begin, own_record, step_news, trim_metrics
from planetary.fabric.gateway.gateway_status import status_of
from planetary.fabric.gateway.gateway_work import GatewayWork
from planetary.fabric.gateway.ring_master import RingMaster
from planetary.fabric.gateway.run_files import EVENTS, METRICS
from planetary.fabric.gateway.run_host import GatewayOptions, RunHost
from planetary.fabric.preparation.budget import fit
from planetary.fabric.preparation.compiling import CompileTarget, Published, compile_apart
from planetary.fabric.preparation.fitting import local_target, measure_speed
from planetary.fabric.preparation.preparation import Prepared, prepare_run
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.status import RunStatus
from planetary.fabric.shell.shell import Shell
from planetary.net.authority import Authority
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck
from planetary.wire import messages as m
from planetary.wire.inbox import Received, refuse_tensors
from planetary.wire.limits import MIB, Limits

log = logging.getLogger(__name__)


class Gateway(RunHost):
    """A run in rounds. Make it, `start` it, `run` it."""

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
        super().__init__(config, options, tls, tokens, clock=clock)
        self.prepared: Prepared | None = None
        self.controller: Controller | None = None
        self._ring = RingMaster(config.sync, options.host, authority)
        self._start: Start | None = None
        self._rounds_work: GatewayWork | None = None

    async def run(self, prepared: Callable[[Prepared], None] | None = None) -> e.Finish:
        """Prepare and train until the run is finished, failed or stopped; `prepared` is called in between."""
        try:
            own = await asyncio.to_thread(own_record, self.options)
            self.prepared = await self._interruptible(
                asyncio.to_thread(prepare_run, self.config, self.options.cache, self._set_stage, own)
            )
            if self.prepared is None:
                return e.Finish(False, self._stop_reason or "stopped", "stopped")
            self.notes += filter(None, (changes(self.config, self.prepared.config), step_news(own, self.prepared)))
            self.config = self.prepared.config
            if not await self._fit(self.prepared):
                return e.Finish(False, self._stop_reason or "stopped", "stopped")
            if prepared is not None:
                await asyncio.to_thread(prepared, self.prepared)
            return await self._train(self.prepared)
        finally:
            await self._close()
            await asyncio.to_thread(self._ring.stop)

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        return status_of(self)

    # --- the run ----------------------------------------------------------------------------------------------

    async def _fit(self, prepared: Prepared) -> bool:
        """Set the length of a new run whose time is given; return whether to go on."""
        config, threads = self.config, self.options.local_threads
        if threads is None or not self.is_unfitted:
            return True
        target = local_target(config)
        speed = await self._interruptible(
            measure_speed(config, prepared, target, threads=threads, cache=self.options.cache, stage=self._set_stage)
        )
        if speed is None:
            return False
        chosen = fit(config, speed)
        self.config = fit_to_data(chosen.config, prepared.data)  # its rounds may be more than data.max_epochs allows
        self.notes.append(chosen.sentence(speed))
        log.info("%s", self.notes[-1])
        return True

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
        self._rounds_work = GatewayWork(self.config, self.options, prepared, start, self._work)
        if self._stop_reason is not None:
            self._shell.post(e.StopRequested(self._stop_reason))
        self._set_stage("waiting for workers")
        return await self._shell.run()

    # --- connections ------------------------------------------------------------------------------------------

    def _admit(self, connection: Connection, session: int, *, is_worker: bool) -> None:
        timings = self.config.timings
        if is_worker:
            assert self._start is not None
            params = self._start.policy.spec.params
            if self._start.policy.ring is not None:
                params = state_specs(params)
            specs = {spec.name: spec for spec in params}
            total = sum(spec.nbytes for spec in specs.values())
            limits = Limits(tensor_bytes=2 * total + MIB, tensors=len(specs), messages_under_way=2)
            last = 0  # id of the message that arrives

            def allocate(message: m.Message, spec: TensorSpec) -> np.ndarray:
                nonlocal last
                array = _allocate(specs, message, spec)
                if message.id != last:
                    last = message.id
                    self._post(e.PayloadArrives(session, message))
                return array

            connection.accept_peer(limits, allocate)
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
        work = self._rounds_work
        assert work is not None
        match instruction:
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
            case _:
                return self._carry_out_common(instruction)
        return None

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
            case e.TokensOf():
                assert self.prepared is not None
                data = self.prepared.data
                file = data.held_out if payload.held_out else data.train
                piece = file.slice(payload.offset, payload.count)
                return lambda: {"tokens": read_slice(piece)}
        return super()._source(payload)

    async def _compile_for(self, target: CompileTarget) -> Published:
        assert self.prepared is not None
        return await compile_apart(self.prepared, target, self.options.cache)


def _allocate(specs: Mapping[str, TensorSpec], message: m.Message, spec: TensorSpec) -> np.ndarray:
    """Take a parameter of the model, or what calls itself one: it is judged, and its worker named, when it is here."""
    if not isinstance(message, m.TrainResult | m.OuterState) or spec.name not in specs:
        raise RemoteProtocolError(
            f"reading {type(message).__name__}: a tensor named {spec.name!r} is not expected with it"
        )
    return spec.empty()


__all__ = ["CompileError", "Gateway", "GatewayOptions"]
