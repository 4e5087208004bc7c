"""The gateway of a run in rounds: a controller on real connections, with real parameters and a real disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.core.config import Config
from planetary.core.configuration.outer_rule import why_chosen
from planetary.core.configuration.ranges import RELAY
from planetary.core.errors import ConflictError, PlanetaryError, RemoteProtocolError, TrustError, UserError
from planetary.core.extension_points import OVERLAPS
from planetary.core.tensors import TensorSpec
from planetary.data.reader import read_slices
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security, compiled_event
from planetary.fleet.gateway.roll_out import BEFORE, RollOut, StepWanted
from planetary.fleet.gateway.run_files import STEPS
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_apart
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.kind_reader import KindReader
from planetary.fleet.protocol.status import RunStatus
from planetary.fleet.shell.shell import Answer, Read, TensorSource
from planetary.fleet.shell.system import SYSTEM, System
from planetary.net.authority import Authority
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.gateway.checkpoints import RoundCheckpoints
from planetary.runs.rounds.gateway.disk_room import DiskRoom
from planetary.runs.rounds.gateway.run_step import keep_step, own_record, record_of, step_news
from planetary.runs.rounds.gateway.start import RoundsStart, begin
from planetary.runs.rounds.gateway.status import status_of
from planetary.runs.rounds.gateway.topology import GatewayTopology, StarGateway, topology_of
from planetary.runs.rounds.messages import ROUNDS
from planetary.runs.rounds.metrics import trim_metrics
from planetary.runs.rounds.preparation.budget import MachineSpeed
from planetary.runs.rounds.preparation.machine_speed import fit_run, local_target, measure_speed
from planetary.runs.rounds.preparation.next_step import ExportStep, export_apart, in_place_of
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared, prepare_run
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runs.rounds.records import RoundClosed, StepReplaced
from planetary.runs.rounds.state import ControllerState
from planetary.runs.rounds.status import READER
from planetary.runs.rounds.traffic import RoundTraffic
from planetary.sync.outer_optimizers import optimizer_of
from planetary.wire.limits import MIB, Limits

log = logging.getLogger(__name__)


Prepare = Callable[[Config, Path, Callable[[str], None], StepRecord | None], Prepared]
"""As `prepare_run`."""
CompileFor = Callable[[Prepared, CompileTarget, Path], Awaitable[PublishedArtifact]]
"""As `compile_apart`."""
TopologyOf = Callable[[Config, str, Authority | None], GatewayTopology]
"""As `topology_of`."""


class RoundsGateway(Gateway[Prepared, RoundsStart, Controller]):
    """A run in rounds: leases of tokens, and one outer step a round."""

    protocol = ROUNDS
    traffic_of = RoundTraffic
    synced = (*Gateway.synced, StepReplaced, RoundClosed)
    reader: ClassVar[KindReader[ControllerState]] = READER

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
        export_step: ExportStep = export_apart,
    ) -> None:
        """A simulation replaces the functions among the arguments."""
        super().__init__(config, options, security, system=system)
        self._prepare_run, self._compile_apart, self._export_step = prepare, compile_for, export_step
        self._next: Prepared | None = None  # run with the offered next step
        self.room = DiskRoom(options.folder, system.files)
        self._topology = topology(config, options.host, security.authority)

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        return status_of(self)

    # --- the run ----------------------------------------------------------------------------------------------

    async def _fit(self, prepared: Prepared) -> Prepared | None:
        """Set length and model of a new run whose time is given; return the parts then, None to stop."""
        if self.options.local_threads is None or not self.is_unfitted:
            return prepared
        fitted = await fit_run(self.config, prepared, self._measure, self._prepare_again, self.note)
        if fitted is None:
            return None
        self.config, prepared = fitted
        return prepared

    async def _prepare_again(self, config: Config) -> Prepared | None:
        work = asyncio.to_thread(self._prepare_run, config, self.options.cache, self.set_stage, None)
        return await self._interruptible(work)

    async def _measure(self, config: Config, prepared: Prepared) -> MachineSpeed | None:
        target, threads, cache = local_target(config), self.options.local_threads, self.options.cache
        assert threads is not None
        work = measure_speed(config, prepared, target, threads=threads, cache=cache, stage=self.set_stage)
        return await self._interruptible(work)

    def _prepare(self) -> Prepared:
        own = own_record(self.options, StepRecord)
        prepared = self._prepare_run(self.config, self.options.cache, self.set_stage, own)
        self.notes += filter(None, (step_news(own, prepared.record), *prepared.step.notes))
        return prepared

    def _begin(self, prepared: Prepared) -> RoundsStart:
        shown = self.config.sync.broadcast_compression not in ("none", RELAY)
        copies = 1 + optimizer_of(self.config.outer).copies + shown
        text, fits = self.room.check(prepared.step.spec.params, self.config.checkpoint.keep, copies)
        if text:
            self.note(text) if fits else self.warn(text)
        self._topology.start()
        return begin(self.config, self.options, prepared, self._topology, files=self._system.files, reader=self.reader)

    def _control(self, prepared: Prepared, start: RoundsStart) -> Controller:
        for why in (start.policy.length.why_shorter(), why_chosen(self.config.outer, self.config.train.rounds)):
            if why:
                self.note(why)
        return Controller(start.policy, start.state, self._clock.monotonic(), start.unreported)

    def _release(self) -> None:
        self._topology.stop()

    # --- another training step --------------------------------------------------------------------------------

    def roll_out(self, wanted: StepWanted) -> None:
        """The step is made, compiled and verified, then used from the next round on."""
        controller, stage = self.controller, self.roll_out_stage
        if controller is None or self.ended_at is not None:
            raise ConflictError(
                "the run is being prepared, or over: it has no training step that could be replaced", code="no_step"
            )
        if self.config.sync.topology != "star":
            raise ConflictError(
                "in a ring workers hold the outer state, which a worker that loads another step loses: resume the run "
                'with --set, or train with sync.topology = "star"',
                code="step_fixed",
            )
        if OVERLAPS.find(self.config.sync.overlap).overlaps:
            raise ConflictError(
                f'with sync.overlap = "{self.config.sync.overlap}" a round is always under way, so that no step can be '
                "replaced between two: resume the run with --set",
                code="step_fixed",
            )
        if stage.state in ("preparing", "verified"):
            raise ConflictError(f"another step is being rolled out: {stage.state}", code="rolling_out")
        digest = self._earlier(controller, wanted.back_to) if wanted.back_to else ""
        self.roll_out_stage = RollOut("preparing", digest, wanted.overrides, wanted.by, wanted.why)
        self._work.add(self._offer_step(controller, msgspec.structs.replace(wanted, back_to=digest)), cancels=True)

    def _earlier(self, controller: Controller, wanted: str) -> str:
        """Return the digest of an earlier step. Raises `UserError` unless exactly one begins so."""
        steps = controller.state.steps
        found = [one for one in steps[:-1] if one.startswith(wanted)] if wanted != BEFORE else steps[-2:-1]
        if len(found) != 1:
            known = ", ".join(one[:12] for one in steps[:-1]) or "none: it has the step that it began with"
            raise UserError(f"no earlier step of the run is {wanted!r}; there are {known}")
        return found[0]

    async def _offer_step(self, controller: Controller, wanted: StepWanted) -> None:
        try:
            offered = await self._step_to_offer(controller, wanted)
        except PlanetaryError as error:
            self._refuse_step(str(error))
        except Exception as error:
            log.exception("preparing another training step failed")
            self._refuse_step(f"{type(error).__name__}: {error}")
        else:
            self.roll_out_stage = msgspec.structs.replace(
                self.roll_out_stage, state="verified", step=offered.spec.stablehlo_digest
            )
            self._post(offered)

    def _refuse_step(self, reason: str) -> None:
        self.roll_out_stage = msgspec.structs.replace(self.roll_out_stage, state="refused", reason=reason)
        self.warn(f"the training step is not replaced: {reason}")

    async def _step_to_offer(self, controller: Controller, wanted: StepWanted) -> e.StepOffered:
        """Make a step, compile it for the targets in use, and verify it there. Raises `PlanetaryError`."""
        current, cache, folder = self.prepared, self.options.cache, self.options.folder
        assert current is not None
        if wanted.back_to:
            record = record_of(folder / STEPS / f"{wanted.back_to}.json", StepRecord)
            if record is None:
                raise TrustError(f"the run folder has no usable record of the step {wanted.back_to[:12]}")
            made = await asyncio.to_thread(self._prepare_run, self.config, cache, lambda stage: None, record)
        else:
            made = await self._export_step(self.config, wanted.overrides, cache)
            if why := self._unfit(made):
                raise UserError(why)
        offered = in_place_of(made, current)
        compiled = []
        for target in (CompileTarget(*one) for one in controller.membership.targets):
            async with self._compilations.free_compilers:
                began = self._clock.monotonic()
                published = await self._compile_apart(offered, target, cache)
            compiled.append(compiled_event(target, published, self._clock.monotonic() - began))
        await asyncio.to_thread(keep_step, folder, current.record, self._system.files)
        await asyncio.to_thread(keep_step, folder, offered.record, self._system.files)
        self._next = offered
        for text in offered.step.notes:
            if text not in self.notes:
                self.note(text)
        return e.StepOffered(
            spec=offered.step.spec,
            buffers=offered.buffers,
            compiled=tuple(compiled),
            by=wanted.by,
            why="; ".join(filter(None, (wanted.why, ", ".join(wanted.overrides)))),
            back=bool(wanted.back_to),
        )

    def _unfit(self, made: Prepared) -> str:
        """Return why a step is not for this run, though the signature is equal; "" where it is."""
        return ""

    def _use_step(self, model: str) -> None:
        following, start, controller = self._next, self._start, self.controller
        assert following is not None
        assert start is not None
        assert controller is not None
        self.prepared, self._next = following, None
        start.policy = controller.policy
        self.roll_out_stage = msgspec.structs.replace(self.roll_out_stage, state="in use", step=model)

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
        """A parameter of the model, or an unknown name: checked, with the worker's name, once the tensors are here."""
        if not isinstance(message, rm.TrainResult | rm.RingState) or spec.name not in self._accepted:
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor named {spec.name!r} is not expected with it"
            )
        return spec.empty()

    def _reader(self) -> Read:
        return lambda session, received: self.parameters.receive(self._topology.brings, session, received)

    # --- instructions -----------------------------------------------------------------------------------------

    @property
    def parameters(self) -> ParameterVersions:
        """The gateway's copy of the model; there once the run folder was read."""
        assert self._start is not None
        return self._start.parameters

    @property
    def _round_checkpoints(self) -> RoundCheckpoints:
        """The checkpoints in the run folder."""
        assert self.prepared is not None
        return RoundCheckpoints(
            self.config, self.prepared, self.parameters, self._system, folder=self.options.folder, room=self.room
        )

    def _answers(self) -> Mapping[type[e.Instruction], Answer]:
        tokens = self.config.train.batch_size * self.config.train.sequence_length
        return {
            e.MeasureContributions: self.parameters.compare,
            e.TakeOuterStep: partial(self.parameters.step, self.config.outer, tokens),
            e.RestoreParameters: self._restore,
        }

    def _restore(self, instruction: e.RestoreParameters) -> e.Event:
        return self._round_checkpoints.restore(instruction)

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        match instruction:
            case e.WriteCheckpoint():
                assert self._shell is not None
                checkpoint = self._round_checkpoints.checkpoint(instruction)  # now: the next outer step may follow
                self._shell.answer(partial(self._round_checkpoints.write, checkpoint, instruction.protected))
            case e.KeepParameters():
                self.parameters.keep(instruction.versions)
            case e.DropAttachment():
                self.parameters.drop(instruction.attachment)
            case e.KeepOuterState():
                self.parameters.adopt(instruction.version, instruction.attachment)
            case e.ForgetRounds():
                self._forget_rounds(instruction.after)
            case e.UseStep():
                self._use_step(instruction.model)
            case e.UseStar():
                self._use_star(instruction)
            case _:
                return super()._carry_out(instruction)
        return None

    def _use_star(self, instruction: e.UseStar) -> None:
        """Take results from now on. The configuration stays: a run that is resumed tries the ring again."""
        self._work.add(asyncio.to_thread(self._topology.stop))
        self._topology = StarGateway()
        vars(self).pop("_accepted", None)  # of the ring
        self.parameters.go_back(self.parameters.state, instruction.version, {})
        self.warn(f"the run goes on in a star: {instruction.why}")

    def _forget_rounds(self, after: int) -> None:
        assert self._metrics_file is not None
        self._metrics_file.close()
        self.metrics = trim_metrics(self._metrics_file.path, after, self._system.files)
        self._metrics_file = JsonLinesWriter(self._metrics_file.path, self._system.files)

    def _source(self, payload: e.Payload | None) -> TensorSource | None:
        match payload:
            case e.ParametersOf():
                params = self.parameters.of_version(payload.version)
                return lambda: params
            case e.ChangeOf():
                change = self.parameters.change_of(payload.version, payload.own)
                return lambda: change
            case e.OuterStateOf():
                outer = self.parameters.outer_state(payload.version)
                return lambda: outer
            case e.TokensOf():
                assert self.prepared is not None
                data = self.prepared.data
                file = data.held_out if payload.held_out else data.train
                pieces = [file.slice(piece.offset, piece.count) for piece in payload.slices]
                return lambda: {"tokens": read_slices(pieces)}
        return super()._source(payload)

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        assert self.prepared is not None
        return await self._compile_apart(self.prepared, target, self.options.cache)
