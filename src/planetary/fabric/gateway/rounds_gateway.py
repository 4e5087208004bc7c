"""The gateway of a run in rounds: its controller on real connections, with real parameters and a real disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.core.config import Config
from planetary.core.configuration.outer_rule import why_chosen
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import TensorSpec
from planetary.data.reader import read_slice
from planetary.fabric.controller.controller import Controller
from planetary.fabric.gateway.disk_room import DiskRoom
from planetary.fabric.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fabric.gateway.gateway_topology import GatewayTopology, topology_of
from planetary.fabric.gateway.round_work import RoundWork
from planetary.fabric.gateway.rounds_start import RoundsStart, begin, trim_metrics
from planetary.fabric.gateway.run_status import status_of
from planetary.fabric.gateway.run_step import own_record, step_news
from planetary.fabric.preparation.budget import MachineSpeed
from planetary.fabric.preparation.compiling import CompileTarget, PublishedArtifact, compile_apart
from planetary.fabric.preparation.machine_speed import fit_run, local_target, measure_speed
from planetary.fabric.preparation.parameters import ParameterVersions
from planetary.fabric.preparation.preparation import Prepared, prepare_run
from planetary.fabric.preparation.prepared_steps import StepRecord
from planetary.fabric.protocol import fabric_events as e
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.status import RunStatus
from planetary.fabric.shell.system import SYSTEM, System
from planetary.net.authority import Authority
from planetary.wire.inbox import ReceivedMessage
from planetary.wire.limits import MIB, Limits

Prepare = Callable[[Config, Path, Callable[[str], None], StepRecord | None], Prepared]
"""As `prepare_run`."""
CompileFor = Callable[[Prepared, CompileTarget, Path], Awaitable[PublishedArtifact]]
"""As `compile_apart`."""
TopologyOf = Callable[[Config, str, Authority | None], GatewayTopology]
"""As `topology_of`."""


class RoundsGateway(Gateway[Prepared, RoundsStart, Controller]):
    """A run in rounds: leases of tokens, and one outer step a round."""

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        *,
        system: System = SYSTEM,
        prepare: Prepare = prepare_run,
        compile_for: CompileFor = compile_apart,
        topology: TopologyOf = topology_of,
    ) -> None:
        """See `Gateway`; the other arguments are functions that a simulation replaces."""
        super().__init__(config, options, security, system=system)
        self._prepare_run, self._compile_apart = prepare, compile_for
        self.room = DiskRoom(options.folder, system.files)
        self._topology = topology(config, options.host, security.authority)

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        return status_of(self)

    # --- the run ----------------------------------------------------------------------------------------------

    async def _fit(self, prepared: Prepared) -> Prepared | None:
        """Set length and model of a new run whose time is given; return its parts then, None to stop."""
        if self.options.local_threads is None or not self.is_unfitted:
            return prepared
        fitted = await fit_run(self.config, prepared, self._measure, self._prepare_again, self.note)
        if fitted is None:
            return None
        self.config, prepared = fitted
        return prepared

    async def _prepare_again(self, config: Config) -> Prepared | None:
        work = asyncio.to_thread(self._prepare_run, config, self.options.cache, self._set_stage, None)
        return await self._interruptible(work)

    async def _measure(self, config: Config, prepared: Prepared) -> MachineSpeed | None:
        target, threads, cache = local_target(config), self.options.local_threads, self.options.cache
        assert threads is not None
        work = measure_speed(config, prepared, target, threads=threads, cache=cache, stage=self._set_stage)
        return await self._interruptible(work)

    def _prepare(self) -> Prepared:
        own = own_record(self.options, StepRecord)
        prepared = self._prepare_run(self.config, self.options.cache, self._set_stage, own)
        self.notes += filter(None, (step_news(own, prepared.record),))
        return prepared

    def _begin(self, prepared: Prepared) -> RoundsStart:
        copies = 2 if self.config.sync.broadcast_compression == "none" else 3
        text, fits = self.room.check(prepared.step.spec.params, self.config.checkpoint.keep, copies)
        if text:
            self.note(text) if fits else self.warn(text)
        self._topology.start()
        return begin(self.config, self.options, prepared, self._topology, self._system.files)

    def _control(self, prepared: Prepared, start: RoundsStart) -> Controller:
        for why in (start.policy.length.why_shorter(), why_chosen(self.config.outer, self.config.train.rounds)):
            if why:
                self.note(why)
        return Controller(start.policy, start.state, self._clock.monotonic(), start.unreported)

    def _release(self) -> None:
        self._topology.stop()

    # --- messages of workers ------------------------------------------------------------------------------------

    @cached_property
    def _accepted(self) -> Mapping[str, TensorSpec]:
        """The tensors of a worker's result."""
        assert self._start is not None
        return {spec.name: spec for spec in self._topology.accepted(self._start.policy.spec.params)}

    def _limits(self) -> Limits:
        total = sum(spec.nbytes for spec in self._accepted.values())
        return Limits(tensor_bytes=2 * total + MIB, tensors=len(self._accepted), messages_under_way=2)

    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        """A parameter of the model, or an unknown name: checked, with the worker's name, once its tensors are here."""
        if not isinstance(message, m.TrainResult | m.RingState) or spec.name not in self._accepted:
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor named {spec.name!r} is not expected with it"
            )
        return spec.empty()

    async def _pass_on(self, session: int, received: ReceivedMessage) -> None:
        assert self._shell is not None
        message, defect, attachment = received.message, "", 0
        if isinstance(message, self._topology.brings):
            defect, tensors = await asyncio.to_thread(self.parameters.read, message, received.tensors)
            attachment = self.parameters.attach(tensors)
        self._shell.post(e.Received(session, message, defect, attachment))

    # --- instructions -----------------------------------------------------------------------------------------

    @property
    def parameters(self) -> ParameterVersions:
        """The gateway's copy of the model; there once the run folder was read."""
        assert self._start is not None
        return self._start.parameters

    @cached_property
    def _round_work(self) -> RoundWork:
        """The work of instructions in threads."""
        assert self.prepared is not None
        return RoundWork(
            self.config, self.prepared, self.parameters, self._system, folder=self.options.folder, room=self.room
        )

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        match instruction:
            case e.MeasureContributions():
                self._work.add(self._answer(partial(self._round_work.measure, instruction)))
            case e.RestoreParameters():
                self._work.add(self._answer(partial(self._round_work.restore, instruction)))
            case e.TakeOuterStep():
                self._work.add(self._answer(partial(self._round_work.take_outer_step, instruction)))
            case e.WriteCheckpoint():
                checkpoint = self._round_work.checkpoint(instruction)
                self._work.add(self._answer(partial(self._round_work.write, checkpoint, instruction.protected)))
            case e.KeepParameters():
                self.parameters.keep(instruction.versions)
            case e.DropAttachment():
                self.parameters.drop(instruction.attachment)
            case e.KeepOuterState():
                self.parameters.adopt(instruction.version, instruction.attachment)
            case e.ForgetRounds():
                self._forget_rounds(instruction.after)
            case _:
                return self._carry_out_common(instruction)
        return None

    async def _answer(self, work: Callable[[], e.Event]) -> None:
        self._post(await asyncio.to_thread(work))

    def _forget_rounds(self, after: int) -> None:
        assert self._metrics_file is not None
        self._metrics_file.close()
        self.metrics = trim_metrics(self._metrics_file.path, after, self._system.files)
        self._metrics_file = JsonLinesWriter(self._metrics_file.path, self._system.files)

    def _source(self, payload: e.Payload | None) -> Callable[[], Mapping[str, np.ndarray]] | None:
        match payload:
            case e.ParametersOf():
                params = self.parameters.of_version(payload.version)
                return lambda: params
            case e.ChangeOf():
                change = self.parameters.change_of(payload.version)
                return lambda: change
            case e.OuterStateOf():
                outer = self.parameters.outer_state(payload.version)
                return lambda: outer
            case e.TokensOf():
                assert self.prepared is not None
                data = self.prepared.data
                file = data.held_out if payload.held_out else data.train
                piece = file.slice(payload.offset, payload.count)
                return lambda: {"tokens": read_slice(piece)}
        return super()._source(payload)

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        assert self.prepared is not None
        return await self._compile_apart(self.prepared, target, self.options.cache)
