"""A run in rounds at its gateway: real parameters, a real disk, and the topology."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.configuration.derived import why_chosen
from planetary.core.configuration.ranges import RELAY
from planetary.core.configuration.schema import Config
from planetary.core.errors import ConflictError, PlanetaryError, TrustError, UserError
from planetary.core.extension_points import OVERLAPS, TOPOLOGIES
from planetary.core.tensors import TensorSpec
from planetary.data.fitting import changes
from planetary.data.reader import read_slices
from planetary.fleet.gateway.compilations import compiled_event
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import SYNCED, Parts, Setup, constant
from planetary.fleet.gateway.run_files import STEPS
from planetary.fleet.preparation.compiling import (
    CompileTarget,
    PublishedArtifact,
    StepToCompile,
    compile_apart,
)
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.kind_reader import KindReader
from planetary.fleet.shell.shell import TensorSource
from planetary.net.authority import Authority
from planetary.net.loop_thread import LoopThread
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.gateway.checkpoints import RoundCheckpoints
from planetary.runs.rounds.gateway.disk_room import DiskRoom
from planetary.runs.rounds.gateway.status import status_of
from planetary.runs.rounds.gateway.topology import GatewayTopology, StarGateway, topology_of
from planetary.runs.rounds.kept_metrics import trim_metrics
from planetary.runs.rounds.messages import ROUNDS
from planetary.runs.rounds.news import TrainingNews
from planetary.runs.rounds.preparation.budget import MachineSpeed
from planetary.runs.rounds.preparation.machine_speed import fit_run, local_target, measure_speed
from planetary.runs.rounds.preparation.next_step import ExportStep, export_apart, in_place_of
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared, prepare_run
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runs.rounds.preparation.run_step import keep_step, own_record, record_of, step_news
from planetary.runs.rounds.progress import training_status
from planetary.runs.rounds.records import RoundClosed, RoundFinished, StepReplaced
from planetary.runs.rounds.roll_out import BEFORE, RollOut, StepWanted
from planetary.runs.rounds.start import RoundsStart, begin
from planetary.runs.rounds.state import ControllerState
from planetary.runs.rounds.status import READER, TrainingStatus
from planetary.runs.rounds.traffic import RoundTraffic
from planetary.sync.outer_optimizers import optimizer_of
from planetary.wire.limits import MIB, Limits

log = logging.getLogger(__name__)

_STOP_S = 5.0  # seconds that a compiler has to end


Prepare = Callable[[Config, Path, Callable[[str], None], StepRecord | None, Callable[[StepToCompile], None]], Prepared]
"""As `prepare_run`."""
CompileFor = Callable[[StepToCompile, CompileTarget, Path], Coroutine[Any, Any, PublishedArtifact]]
"""As `compile_apart`."""
TopologyOf = Callable[[Config, str, Authority | None], GatewayTopology]
"""As `topology_of`."""


class RoundsSetup(Setup[Prepared, "RoundsRun"]):
    """How a run in rounds begins: leases of tokens, and one outer step a round."""

    protocol = ROUNDS
    traffic_of, news_of = RoundTraffic, TrainingNews
    synced = (*SYNCED, RoundFinished, StepReplaced, RoundClosed)

    def __init__(
        self,
        *,
        prepare: Prepare = prepare_run,
        compile_for: CompileFor = compile_apart,
        topology: TopologyOf = topology_of,
        export_step: ExportStep = export_apart,
    ) -> None:
        """A simulation replaces the functions."""
        self.prepare_run, self.compile_apart, self.export_step = prepare, compile_for, export_step
        self._topology_of = topology

    def prepare(self, gateway: Gateway[Any]) -> Prepared:
        own = own_record(gateway.options, StepRecord)
        prepared = self.prepared(gateway, gateway.config, own)
        told = (step_news(own, prepared.record), *prepared.step.notes, *prepared.data.notes)
        gateway.notes += filter(None, (*told, changes(gateway.config, prepared.config)))
        return prepared

    async def fit(self, gateway: Gateway[Any], prepared: Prepared) -> Prepared | None:
        """Set length and model of a new run whose time is given; return the parts then, None to stop."""
        threads, cache, stage = gateway.options.local_threads, gateway.options.cache, gateway.set_stage
        if threads is None or not is_fitted_here(gateway):
            _settle_length(gateway)
            return prepared

        async def measure(config: Config, prepared: Prepared) -> MachineSpeed | None:
            work = measure_speed(config, prepared, local_target(config), threads=threads, cache=cache, stage=stage)
            return await gateway.interruptible(work)

        async def prepare_again(config: Config) -> Prepared | None:
            return await gateway.interruptible(asyncio.to_thread(self.prepared, gateway, config, None))

        fitted = await fit_run(gateway.config, prepared, measure, prepare_again, gateway.note)
        if fitted is None:
            return None
        gateway.config, prepared = fitted
        return prepared

    def prepared(self, gateway: Gateway[Any], config: Config, own: StepRecord | None) -> Prepared:
        """Prepare; on a local run compile a new step for this machine's workers beside its checks. In a thread."""
        options = gateway.options
        if options.local_threads is None:
            return self.prepare_run(config, options.cache, gateway.set_stage, own, _nothing)
        with self._compiling(config, options.cache, gateway.set_stage) as compile_early:
            return self.prepare_run(config, options.cache, gateway.set_stage, own, compile_early)

    @contextlib.contextmanager
    def _compiling(
        self, config: Config, cache: Path, stage: Callable[[str], None]
    ) -> Iterator[Callable[[StepToCompile], None]]:
        """Yield a function that begins to compile a step. The end waits for that; an error before ends it.

        Raises:
            CompileError: the step cannot be compiled.
        """
        loop, begun = LoopThread("planetary compiles a step"), list[Future[PublishedArtifact]]()
        try:
            yield lambda step: begun.append(loop.begin(self.compile_apart(step, local_target(config), cache)))
            for one in begun:
                stage("compiling and verifying the training step")
                one.result()
        finally:
            loop.stop(_STOP_S)

    def status(self, gateway: Gateway[Any], kind: str = "rounds") -> TrainingStatus:
        status = training_status(gateway, kind, None)
        return msgspec.structs.replace(status, rounds=0) if is_fitted_here(gateway) else status

    def begin(self, gateway: Gateway[Any], prepared: Prepared) -> Parts[RoundsRun]:
        run = self.run(gateway, prepared)
        start, config = run.start, gateway.config
        for why in (start.policy.length.why_shorter(), why_chosen(config.outer, config.train.rounds)):
            if why:
                gateway.note(why)
        controller = Controller(start.policy, start.state, gateway.clock.monotonic(), start.unreported)
        return run.parts(controller)

    def run(
        self,
        gateway: Gateway[Any],
        prepared: Prepared,
        reader: KindReader[ControllerState] = READER,
        topology: GatewayTopology | None = None,
    ) -> RoundsRun:
        """Read or make the run folder with `reader`; `topology` None: the configuration's. In a thread."""
        config, security = gateway.config, gateway.security
        room = DiskRoom(gateway.options.folder, gateway.system.files)
        shown = config.sync.broadcast_compression not in ("none", RELAY)
        copies = 1 + optimizer_of(config.outer).copies + shown
        text, fits = room.check(prepared.step.spec.params, config.checkpoint.keep, copies)
        if text:
            gateway.note(text) if fits else gateway.warn(text)
        topology = topology or self._topology_of(config, gateway.options.host, security.authority)
        gateway.after_close.push_async_callback(asyncio.to_thread, topology.stop)
        topology.start()
        start = begin(config, gateway.options, prepared, topology.extend, files=gateway.system.files, reader=reader)
        return RoundsRun(gateway, self, prepared, start=start, topology=topology, room=room)


def _nothing(step: StepToCompile) -> None:
    """Compile nothing ahead: the workers' machines are not known."""


def is_fitted_here(gateway: Gateway[Any]) -> bool:
    """Return whether the run's length still has to be derived from `train.target_minutes`."""
    local = gateway.options.local_threads is not None and not gateway.options.resume
    return local and gateway.config.train.target_minutes > 0


def _settle_length(gateway: Gateway[Any]) -> None:
    """Have `train.rounds` count, and say so, where the run is not fitted to `train.target_minutes`."""
    train = gateway.config.train
    if not train.target_minutes:
        return
    local = gateway.options.local_threads is not None
    why = "a run that goes on has its length already" if local else "the workers may be on other machines"
    gateway.note(
        f"train.target_minutes = {train.target_minutes:g} has no effect: {why}; the run has {train.rounds} rounds"
    )
    settled = msgspec.structs.replace(train, target_minutes=0.0)
    gateway.config = msgspec.structs.replace(gateway.config, train=settled)


class RoundsRun:
    """A run in rounds that has begun, at its gateway.

    Attributes:
        prepared: the run's parts, with the training step in use.
        start: policy, state and parameters, as the controller began with them.
        controller: decides.
        room: on the disk.
        fixed_step: why no training step can be rolled out; "": one can.
        stage: of the last replacement of the step since this gateway began.
        unfit: returns why a step is not for this run, though the signature is equal; "": the step fits.
    """

    def __init__(
        self,
        gateway: Gateway[Any],
        setup: RoundsSetup,
        prepared: Prepared,
        *,
        start: RoundsStart,
        topology: GatewayTopology,
        room: DiskRoom,
    ) -> None:
        """`start` is what `begin` returned with the topology."""
        self.gateway, self.prepared, self.start, self.room = gateway, prepared, start, room
        self.fixed_step: str = TOPOLOGIES.find(gateway.config.sync.topology).fixed_step
        self.stage = RollOut()
        self.unfit: Callable[[Prepared], str] = lambda made: ""
        self.controller: Controller
        self._setup, self._topology = setup, topology
        self._next: Prepared | None = None  # run with the offered next step

    def parts(self, controller: Controller) -> Parts[RoundsRun]:
        """Return the run as the gateway has it."""
        self.controller = controller
        tokens = self.gateway.config.targets_per_batch
        return Parts(
            run=self,
            controller=controller,
            records=self.start.records,
            metrics=self.start.metrics,
            status=lambda: status_of(self),
            compile_for=self.compile_for,
            limits=self._limits,
            expects=self._expects,
            read=lambda session, received: self.parameters.receive(self._topology.brings, session, received),
            effects={
                e.WriteCheckpoint: self._write_checkpoint,
                e.KeepParameters: lambda asked: self.parameters.keep(asked.versions),
                e.DropAttachment: lambda asked: self.parameters.drop(asked.attachment),
                e.KeepOuterState: lambda asked: self.parameters.adopt(asked.version, asked.attachment),
                e.ForgetRounds: self._forget_rounds,
                e.UseStep: self._use_step,
                e.UseStar: self._use_star,
            },
            answers={
                e.MeasureContributions: self.parameters.compare,
                e.TakeOuterStep: partial(self.parameters.step, self.gateway.config.outer, tokens),
                e.RestoreParameters: self._restore,
            },
            sources={
                e.ParametersOf: lambda payload: constant(self.parameters.of_version(payload.version)),
                e.ChangeOf: lambda payload: constant(self.parameters.change_of(payload.version, payload.own)),
                e.OuterStateOf: lambda payload: constant(self.parameters.outer_state(payload.version)),
                e.TokensOf: self._tokens,
            },
        )

    # --- another training step --------------------------------------------------------------------------------

    def roll_out(self, wanted: StepWanted) -> None:
        """The step is made, compiled and verified, then used from the next round on."""
        stage, sync = self.stage, self.gateway.config.sync
        if self.fixed_step:
            raise ConflictError(self.fixed_step, code="step_fixed")
        if OVERLAPS.find(sync.overlap).overlaps:
            raise ConflictError(
                f'with sync.overlap = "{sync.overlap}" a round is always under way, so that no step can be '
                "replaced between two: resume the run with --set",
                code="step_fixed",
            )
        if stage.state in ("preparing", "verified"):
            raise ConflictError(f"another step is being rolled out: {stage.state}", code="rolling_out")
        digest = self._earlier(wanted.back_to) if wanted.back_to else ""
        self.stage = RollOut("preparing", digest, wanted.overrides, wanted.by, wanted.why)
        self.gateway.work.add(self._offer_step(msgspec.structs.replace(wanted, back_to=digest)), cancels=True)

    def _earlier(self, wanted: str) -> str:
        """Return the digest of an earlier step. Raises `UserError` unless exactly one begins so."""
        steps = self.controller.state.steps
        found = [one for one in steps[:-1] if one.startswith(wanted)] if wanted != BEFORE else steps[-2:-1]
        if len(found) != 1:
            known = ", ".join(one[:12] for one in steps[:-1]) or "none: it has the step that it began with"
            raise UserError(f"no earlier step of the run is {wanted!r}; there are {known}")
        return found[0]

    async def _offer_step(self, wanted: StepWanted) -> None:
        try:
            offered = await self._step_to_offer(wanted)
        except PlanetaryError as error:
            self._refuse_step(str(error))
        except Exception as error:
            log.exception("preparing another training step failed")
            self._refuse_step(f"{type(error).__name__}: {error}")
        else:
            self._show_stage(state="verified", step=offered.spec.stablehlo_digest)
            self.gateway.post(offered)

    def _refuse_step(self, reason: str) -> None:
        self._show_stage(state="refused", reason=reason)
        self.gateway.warn(f"the training step is not replaced: {reason}")

    def _show_stage(self, **changed: Any) -> None:
        self.stage = msgspec.structs.replace(self.stage, **changed)

    async def _step_to_offer(self, wanted: StepWanted) -> e.StepOffered:
        """Make a step, compile it for the targets in use, and verify it there. Raises `PlanetaryError`."""
        gateway, setup, current = self.gateway, self._setup, self.prepared
        cache, folder, files = gateway.options.cache, gateway.options.folder, gateway.system.files
        if wanted.back_to:
            record = record_of(folder / STEPS / f"{wanted.back_to}.json", StepRecord)
            if record is None:
                raise TrustError(f"the run folder has no usable record of the step {wanted.back_to[:12]}")
            made = await asyncio.to_thread(
                setup.prepare_run, gateway.config, cache, lambda stage: None, record, _nothing
            )
        else:
            made = await setup.export_step(gateway.config, wanted.overrides, cache)
            if why := self.unfit(made):
                raise UserError(why)
        offered = in_place_of(made, current)
        compiled = []
        for target in (CompileTarget(*one) for one in self.controller.membership.targets):
            async with gateway.compilations.free_compilers:
                began = gateway.clock.monotonic()
                published = await setup.compile_apart(offered, target, cache)
            compiled.append(compiled_event(target, published, gateway.clock.monotonic() - began))
        await asyncio.to_thread(keep_step, folder, current.record, files)
        await asyncio.to_thread(keep_step, folder, offered.record, files)
        self._next = offered
        for text in offered.step.notes:
            if text not in gateway.notes:
                gateway.note(text)
        return e.StepOffered(
            spec=offered.step.spec,
            buffers=offered.buffers,
            compiled=tuple(compiled),
            by=wanted.by,
            why="; ".join(filter(None, (wanted.why, ", ".join(wanted.overrides)))),
            back=bool(wanted.back_to),
        )

    def _use_step(self, asked: e.UseStep) -> None:
        assert self._next is not None
        self.prepared, self._next = self._next, None
        self.start.policy = self.controller.policy
        self._show_stage(state="in use", step=asked.model)

    # --- messages of workers ------------------------------------------------------------------------------------

    @cached_property
    def _accepted(self) -> Mapping[str, TensorSpec]:
        """The tensors of a worker's result."""
        return {spec.name: spec for spec in self._topology.accepted(self.start.policy.spec.params)}

    def _limits(self) -> Limits:
        total = sum(spec.nbytes for spec in self._accepted.values())
        return Limits(tensor_bytes=2 * total + MIB, tensors=len(self._accepted), messages_under_way=2)

    def _expects(self, message: m.Message, spec: TensorSpec) -> bool:
        """Parameters of the model are checked, with the worker's name, once the tensors are here."""
        return isinstance(message, rm.TrainResult | rm.RingState) and spec.name in self._accepted

    # --- instructions -----------------------------------------------------------------------------------------

    @property
    def parameters(self) -> ParameterVersions:
        """The gateway's copy of the model."""
        return self.start.parameters

    @property
    def _checkpoints(self) -> RoundCheckpoints:
        """The checkpoints in the run folder."""
        gateway = self.gateway
        return RoundCheckpoints(
            gateway.config,
            self.prepared,
            self.parameters,
            gateway.system,
            folder=gateway.options.folder,
            room=self.room,
        )

    def _write_checkpoint(self, asked: e.WriteCheckpoint) -> None:
        checkpoint = self._checkpoints.checkpoint(asked)  # now: the next outer step may follow
        self.gateway.answer(partial(self._checkpoints.write, checkpoint, asked.protected))

    def _restore(self, asked: e.RestoreParameters) -> e.Event:
        return self._checkpoints.restore(asked)

    def _use_star(self, asked: e.UseStar) -> None:
        """Take results from now on. The configuration stays: a run that is resumed tries the ring again."""
        self.gateway.work.add(asyncio.to_thread(self._topology.stop))
        self._topology = StarGateway()
        vars(self).pop("_accepted", None)  # of the ring
        self.parameters.go_back(self.parameters.state, asked.version, {})
        self.gateway.warn(f"the run goes on in a star: {asked.why}")

    def _forget_rounds(self, asked: e.ForgetRounds) -> None:
        self.gateway.rewrite_metrics(lambda path, files: trim_metrics(path, asked.after, files))

    def _tokens(self, payload: e.TokensOf) -> TensorSource:
        data = self.prepared.data
        slices = payload.slices
        pieces = slices if payload.held_out else [data.train.slice(one.offset, one.count) for one in slices]
        return lambda: {"tokens": read_slices(pieces)}

    async def compile_for(self, target: CompileTarget) -> PublishedArtifact:
        """Compile and verify the training step in use."""
        return await self._setup.compile_apart(self.prepared, target, self.gateway.options.cache)
