"""The gateway of a mixture: a controller on real connections, with payloads and a real disk."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.config import Config, config_hash
from planetary.core.errors import PlanetaryError, RemoteProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.gateway.gateway import Demand, Gateway, GatewayOptions, Security
from planetary.fleet.gateway.run_files import CHECKPOINTS, PAYLOADS
from planetary.fleet.gateway.status import (
    base_status,
    connected_worker,
    message_of,
    stage_of,
    workers_seen,
)
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_program_apart
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.records import Mark
from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import RunState, RunStatus, WorkerState, WorkerStatus
from planetary.fleet.shell.shell import Answer, Read, TensorSource
from planetary.fleet.shell.system import SYSTEM, System
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.data import tokens_payload
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.controller.controller import MixtureController
from planetary.runs.mixture.controller.events import (
    AssembleModel,
    CollectPayloads,
    ExpertsJudged,
    JudgeExperts,
    MakeFragment,
    ModelAssembled,
    NothingNew,
    SliceTokens,
    StoredPayload,
    WeightsOf,
    WorkOf,
)
from planetary.runs.mixture.gateway.payload_work import (
    KINDS,
    PayloadChecks,
    assembled_model,
    expert_weights,
    expert_work,
    judge_experts,
    make_fragment,
    routing_of,
)
from planetary.runs.mixture.gateway.preparation import (
    MixtureStart,
    PreparedMixture,
    ProgramRecord,
    begin_mixture,
    owners_of_run,
    prepare_mixture,
)
from planetary.runs.mixture.payloads.shard import model_bytes
from planetary.runs.mixture.plan import OwnerMap
from planetary.runs.mixture.records import MixtureStarted, ShardGranted
from planetary.runs.mixture.status import mixture_part
from planetary.runs.rounds.gateway.run_step import own_record, step_news
from planetary.wire.limits import MIB, Limits
from planetary.wire.streams import ReceivedMessage

if TYPE_CHECKING:
    from planetary.runs.mixture.controller.controller import MixtureController


log = logging.getLogger(__name__)

KEPT_KINDS = ("fragment", "surrogate", "refresh", "shard", "model", "sketch", "experts", "change", "view")

Prepare = Callable[
    [Config, Path, Callable[[str], None], OwnerMap | None, ProgramRecord | None],
    PreparedMixture,
]
"""As `prepare_mixture`."""
CompileFor = Callable[[PreparedMixture, CompileTarget, Path], Awaitable[PublishedArtifact]]
"""As `compile_mixture`."""


async def compile_mixture(prepared: PreparedMixture, target: CompileTarget, cache: Path) -> PublishedArtifact:
    """Compile and verify a mixture's program in a separate process."""
    return await compile_program_apart(prepared.program, "latent_moe", prepared.plan.model.vocab_size, target, cache)


class MixtureGateway(Gateway[PreparedMixture, MixtureStart, MixtureController]):
    """A run of a mixture: composers, expert workers, and the syncer between them."""

    protocol = mm.MIXTURES
    compiles = "the mixture's program"
    # A shard has one composer under an epoch: one that was granted must not be given to another after a power cut.
    synced = (*Gateway.synced, MixtureStarted, ShardGranted)

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        *,
        system: System = SYSTEM,
        prepare: Prepare = prepare_mixture,
        compile_for: CompileFor = compile_mixture,
    ) -> None:
        """A simulation replaces the functions among the arguments.

        Raises:
            UserError: the payload store's URL is unusable.
        """
        super().__init__(config, options, security, system=system)
        self._prepare_mixture, self._compile_program = prepare, compile_for
        # A superseded payload may still wait to be sent; a connection that is so slow is dropped and made again.
        lifetime = max(60.0, 30 * config.fabric.latency_budget_s)
        self._payloads = PayloadStore(
            config.of(MoeConfig).store or options.folder / PAYLOADS,
            dict.fromkeys(KEPT_KINDS, lifetime),
            clock=system.clock,
            durable=system.files,
        )
        self._results: dict[int, Packed] = {}  # expert workers' results, not judged yet
        self._results_taken = 0
        self._checks: PayloadChecks | None = None

    def _prepare(self) -> PreparedMixture:
        self._payloads.check()
        owners = owners_of_run(self.options.folder) if self.options.resume else None
        own = own_record(self.options, ProgramRecord)
        prepared = self._prepare_mixture(self.config, self.options.cache, self.set_stage, owners, own)
        self.notes += filter(None, (step_news(own, prepared.record),))
        return prepared

    def _begin(self, prepared: PreparedMixture) -> MixtureStart:
        return begin_mixture(self.config, self.options, prepared, self._payloads, self._system)

    def _control(self, prepared: PreparedMixture, start: MixtureStart) -> MixtureController:
        self._checks = PayloadChecks(prepared.plan, prepared.dense, prepared.experts)
        return MixtureController(start.policy, start.state, self._clock.monotonic(), start.late)

    @property
    def kept_results(self) -> int:
        """Results of expert workers that are here and not judged yet."""
        return len(self._results)

    @property
    def demand(self) -> Demand:
        """A worker for every composer, and the expert workers."""
        moe = self.config.of(MoeConfig)
        return Demand(least=moe.composers + min(moe.expert_workers, 1), most=moe.composers + moe.expert_workers)

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        return mixture_status(self)

    # --- messages of workers ----------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        assert self.prepared is not None
        # A shard's state at most: dense parameters and experts, each with the optimizer's state.
        largest = 8 * 4 * self.prepared.param_count + MIB
        return Limits(tensor_bytes=2 * largest, tensors=1, messages_under_way=4)

    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        expected = type(message) in KINDS or isinstance(message, mm.ExpertsImproved)
        if not expected or spec.name != "payload" or spec.dtype != "ui8" or len(spec.shape) != 1:
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor {spec.name!r} is not expected with it"
            )
        return spec.empty()

    def _reader(self) -> Read:
        return self._read

    async def _read(self, session: int, received: ReceivedMessage) -> e.Event:
        message, payload, defect, attachment, size = received.message, "", "", 0, 0
        if type(message) in KINDS:
            data = _payload(received.tensors)
            size = len(data)
            payload, defect = await asyncio.to_thread(self._keep, message, data)
        elif isinstance(message, mm.ExpertsImproved):
            self._results_taken += 1
            attachment = self._results_taken
            self._results[attachment] = _payload(received.tensors)
        return e.Received(session, message, defect, attachment, payload, size)

    def _keep(self, message: m.Message, data: Packed) -> tuple[str, str]:
        """Check a message's payload and put it into the store; return the name, or the defect."""
        assert self._checks is not None
        return self._checks.keep(self._payloads, message, data)

    def _source(self, payload: e.Payload | None) -> TensorSource | None:
        if isinstance(payload, StoredPayload):
            name = payload.name
            return lambda: {"payload": np.frombuffer(self._payloads.get(name), np.uint8)}
        if isinstance(payload, WeightsOf):
            assert self.prepared is not None
            experts, plan = payload.experts, self.prepared.plan
            return lambda: {"payload": np.frombuffer(expert_weights(self._payloads, experts, plan), np.uint8)}
        if isinstance(payload, NothingNew):
            return lambda: {"payload": np.zeros(1, np.uint8)}
        if isinstance(payload, SliceTokens):
            slices = payload.slices
            return lambda: {"payload": tokens_payload(slices)}
        if isinstance(payload, WorkOf):
            return lambda: {"payload": np.frombuffer(expert_work(self._payloads, payload), np.uint8)}
        return super()._source(payload)

    # --- instructions -----------------------------------------------------------------------------------------

    def _answers(self) -> Mapping[type[e.Instruction], Answer]:
        assert self.prepared is not None
        plan = self.prepared.plan
        return {
            MakeFragment: lambda instruction: make_fragment(self._payloads, instruction, plan),
            AssembleModel: self._assembled,
        }

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        match instruction:
            case CollectPayloads():
                self._work.add(self._collect(instruction.keep))
            case JudgeExperts():
                named = (instruction.attachment, instruction.second)
                self._work.add(self._judge(instruction, [self._results.pop(name) for name in named if name]))
            case e.DropAttachment():
                self._results.pop(instruction.attachment, None)
            case _:
                return super()._carry_out(instruction)
        return None

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        assert self.prepared is not None
        return await self._compile_program(self.prepared, target, self.options.cache)

    def _assembled(self, instruction: AssembleModel) -> ModelAssembled:
        assert self.prepared is not None
        began = self._clock.monotonic()
        try:
            model = assembled_model(self._payloads, instruction.shards, instruction.experts, self.prepared.plan)
            payload = self._payloads.put("model", model_bytes(instruction.round, model))
            checkpoint = self._checkpoint(instruction.round, model) if instruction.checkpoint else ""
        except PlanetaryError as error:
            return ModelAssembled(instruction.round, failed=str(error))
        seconds, routing = self._clock.monotonic() - began, None
        try:
            routing = routing_of(self._payloads, instruction.views, self.prepared.plan)
        except PlanetaryError as error:  # the model is there without it
            log.warning("how far composers agree in round %d is not known: %s", instruction.round, error)
        return ModelAssembled(instruction.round, payload, checkpoint, seconds, routing=routing)

    def _checkpoint(self, round_: int, model: Tensors) -> str:
        """Write the ordinary model as a checkpoint, which `planetary generate` reads; return the folder's name."""
        assert self.prepared is not None
        specs = self.prepared.model
        info = CheckpointInfo(
            round=round_,
            config_hash=config_hash(self.config),
            model="latent_moe",
            model_digest=self.prepared.program.digest,
            param_specs=specs,
            data_key=self.prepared.data.key,
            controller=msgspec.Raw(msgspec.json.encode(Mark(round_, 0, 1))),
            random_state={"seed": self.config.run.seed},
        )
        nothing = {spec.name: np.zeros(spec.shape, np.float32) for spec in specs}  # merges keep no velocity
        folder = self.options.folder / CHECKPOINTS
        return write_checkpoint(
            folder, Checkpoint(info, model, nothing), keep=self.config.checkpoint.keep, files=self._system.files
        ).name

    async def _judge(self, instruction: JudgeExperts, results: list[Packed]) -> None:
        assert self._shell is not None
        assert self.prepared is not None
        try:
            judged = await asyncio.to_thread(judge_experts, self._payloads, instruction, results, self.prepared.plan)
        except Exception as error:  # a worker's bytes: no other worker gets the work before it is judged
            log.exception("the result of task %d cannot be judged", instruction.task)
            judged = ExpertsJudged(instruction.task, failed=f"{type(error).__name__}: {error}")
        self._shell.post(judged)

    async def _collect(self, keep: frozenset[str]) -> None:
        assert self._journal is not None
        try:
            # After a power cut the run goes on from older records, whose payloads have to be there.
            self._journal.sync()
            await asyncio.to_thread(self._payloads.collect, keep)
        except PlanetaryError as error:
            log.warning("old payloads were not removed: %s", error)


def _payload(tensors: Tensors) -> Packed:
    return tensors["payload"].data.toreadonly() if "payload" in tensors else b""


def mixture_status(gateway: MixtureGateway) -> RunStatus:
    """Build the status."""
    controller = gateway.controller
    if controller is None:
        return base_status(gateway, None)
    state, run_state = controller.state, _run_state(controller)
    finishing = "evaluating the last round's model" if run_state == "finishing" else ""
    stage, since = stage_of(gateway, run_state, controller.stalls.why or finishing)
    return msgspec.structs.replace(
        base_status(gateway, state),
        state=run_state,
        stage=stage,
        stage_since=since,
        round=min(state.round + 1, gateway.config.train.rounds),
        workers=workers_seen(controller.desk, lambda worker: worker_status(controller, worker)),
        own=mixture_part(gateway.metrics),
        message=message_of(gateway, controller.stalls.why),
    )


def _run_state(controller: MixtureController) -> RunState:
    ended = ended_as(controller.state.ended)
    if ended is not None:
        return ended
    if controller.state.round >= controller.policy.rounds:
        return "finishing"
    return "training" if controller.composing else "waiting"


def worker_status(controller: MixtureController, worker: WorkerSession) -> WorkerStatus:
    """Describe a connected worker.

    A round is a number of steps of the run and not of a composer: one that is faster than others takes more than their
    mean in it, and is in the next round once the state at the end of this one is saved.
    """
    composing = controller.composing.get(worker.session)
    state: WorkerState = "ready" if worker.phase is Phase.READY else "fetching"
    round_, step, loss = 0, 0, None
    if composing is not None:
        done = controller.rounds.has_ended(composing.shard)
        state = "ready" if done else "training"
        shard = controller.state.shards[composing.shard]
        ended = max(shard.marks, default=controller.state.round)
        began = shard.marks[ended].step if ended in shard.marks else shard.round_step
        round_, step = min(ended + 1, controller.policy.rounds), max(0, composing.step - began)
        loss = composing.loss if composing.loss is not None and math.isfinite(composing.loss) else None
    if controller.rounds.evaluates(worker.session):
        state = "evaluating"
    seen = connected_worker(worker, state, controller.state.losses.get(worker.worker, 0))
    return msgspec.structs.replace(seen, round=round_, step=step, loss=loss)
