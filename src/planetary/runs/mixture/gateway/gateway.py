"""A mixture at its gateway: payloads, expert work, and a real disk."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.errors import PlanetaryError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.data.fitting import changes
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import SYNCED, Demand, Parts, Setup
from planetary.fleet.gateway.run_files import CHECKPOINTS, PAYLOADS
from planetary.fleet.gateway.status import (
    connected_worker,
    message_of,
    stage_of,
    workers_seen,
)
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_program_apart
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import RunState, WorkerState
from planetary.fleet.shell.shell import TensorSource
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
from planetary.runs.mixture.payloads.shard import model_bytes
from planetary.runs.mixture.plan import OwnerMap
from planetary.runs.mixture.preparation import PreparedMixture, ProgramRecord, prepare_mixture
from planetary.runs.mixture.records import MixtureStarted, ShardGranted
from planetary.runs.mixture.start import begin_mixture, owners_of_run
from planetary.runs.mixture.status import READER, MixtureStatus, newest_mixture
from planetary.runs.rounds.news import TrainingNews
from planetary.runs.rounds.preparation.run_step import own_record, step_news
from planetary.runs.rounds.progress import training_status
from planetary.runs.rounds.records import Mark, RoundFinished
from planetary.runs.rounds.training_status import TrainerStatus
from planetary.runs.rounds.training_traffic import TrainingTraffic
from planetary.wire.limits import MIB, Limits
from planetary.wire.streams import ReceivedMessage

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


class MixtureSetup(Setup[PreparedMixture, "MixtureRun"]):
    """How a run of a mixture begins: composers, expert workers, and the syncer between them."""

    protocol = mm.MIXTURES
    compiles = "the mixture's program"
    # A shard has one composer under an epoch: one that was granted must not be given to another after a power cut.
    traffic_of, news_of = TrainingTraffic, TrainingNews
    synced = (*SYNCED, RoundFinished, MixtureStarted, ShardGranted)

    def status(self, gateway: Gateway[Any]) -> MixtureStatus:
        return training_status(gateway, READER.name, None, status=MixtureStatus)

    def __init__(
        self,
        *,
        prepare: Prepare = prepare_mixture,
        compile_for: CompileFor = compile_mixture,
        run: type[MixtureRun] | None = None,
    ) -> None:
        """A simulation replaces the functions, and a test watches `run`, a class derived from `MixtureRun`."""
        self._prepare, self._compile_for = prepare, compile_for
        self._run = run or MixtureRun

    def prepare(self, gateway: Gateway[Any]) -> PreparedMixture:
        payloads_of(gateway).check()
        options = gateway.options
        owners = owners_of_run(options.folder) if options.resume else None
        own = own_record(options, ProgramRecord)
        prepared = self._prepare(gateway.config, options.cache, gateway.set_stage, owners, own)
        told = (step_news(own, prepared.record), *prepared.data.notes)
        gateway.notes += filter(None, (*told, changes(gateway.config, prepared.config)))
        return prepared

    def begin(self, gateway: Gateway[Any], prepared: PreparedMixture) -> Parts[MixtureRun]:
        payloads = payloads_of(gateway)
        start = begin_mixture(gateway.config, gateway.options, prepared, payloads, gateway.system)
        controller = MixtureController(start.policy, start.state, gateway.clock.monotonic(), start.late)
        run = self._run(gateway, prepared, controller, payloads)
        return Parts(
            run=run,
            controller=controller,
            records=start.records,
            metrics=start.metrics,
            status=lambda: mixture_status(gateway, controller),
            compile_for=lambda target: self._compile_for(prepared, target, gateway.options.cache),
            limits=run.limits,
            expects=run.expects,
            read=run.read,
            effects=run.effects,
            answers={
                MakeFragment: lambda asked: make_fragment(payloads, asked, prepared.plan),
                AssembleModel: run.assembled,
            },
            sources=run.sources,
        )

    def demand(self, gateway: Gateway[Any]) -> Demand:
        """A worker for every composer, and the expert workers."""
        moe = gateway.config.of(MoeConfig)
        return Demand(least=moe.composers + min(moe.expert_workers, 1), most=moe.composers + moe.expert_workers)


def payloads_of(gateway: Gateway[Any]) -> PayloadStore:
    """Return the store of a run's payloads. Raises `UserError` for an unusable URL."""
    # A superseded payload may still wait to be sent; a connection that is so slow is dropped and made again.
    lifetime = max(60.0, 30 * gateway.config.fabric.latency_budget_s)
    return PayloadStore(
        gateway.config.of(MoeConfig).store or gateway.options.folder / PAYLOADS,
        dict.fromkeys(KEPT_KINDS, lifetime),
        clock=gateway.clock,
        durable=gateway.system.files,
    )


class MixtureRun:
    """A mixture that has begun, at its gateway.

    Attributes:
        controller: decides.
        effects: instructions that are carried out at once, by class.
        sources: returns the tensors of a payload, by class.
    """

    def __init__(
        self,
        gateway: Gateway[Any],
        prepared: PreparedMixture,
        controller: MixtureController,
        payloads: PayloadStore,
    ) -> None:
        """`payloads` are those of `payloads_of`."""
        self._gateway, self._prepared, self._payloads = gateway, prepared, payloads
        self.controller = controller
        self._results: dict[int, Packed] = {}  # expert workers' results, not judged yet
        self._results_taken = 0
        self._checks = PayloadChecks(prepared.plan, prepared.dense, prepared.experts)
        self.effects: dict[type[e.Instruction], Callable[[Any], object]] = {
            CollectPayloads: lambda asked: gateway.work.add(self._collect(asked.keep)),
            JudgeExperts: self._begin_judgement,
            e.DropAttachment: lambda asked: self._results.pop(asked.attachment, None),
        }
        plan = prepared.plan
        self.sources: dict[type[e.Payload], Callable[[Any], TensorSource]] = {
            StoredPayload: lambda payload: _source(lambda: payloads.get(payload.name)),
            WeightsOf: lambda payload: _source(lambda: expert_weights(payloads, payload.experts, plan)),
            NothingNew: lambda payload: _source(lambda: bytes(1)),
            SliceTokens: lambda payload: lambda: {"payload": tokens_payload(payload.slices)},
            WorkOf: lambda payload: _source(lambda: expert_work(payloads, payload)),
        }

    @property
    def kept_results(self) -> int:
        """Results of expert workers that are here and not judged yet."""
        return len(self._results)

    # --- messages of workers ----------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """Return the limits of a worker's messages."""
        # A shard's state at most: dense parameters and experts, each with the optimizer's state.
        largest = 8 * 4 * self._prepared.param_count + MIB
        return Limits(tensor_bytes=2 * largest, tensors=1, messages_under_way=4)

    def expects(self, message: m.Message, spec: TensorSpec) -> bool:
        """Return whether a worker's message may bring a tensor."""
        has_payload = type(message) in KINDS or isinstance(message, mm.ExpertsImproved)
        return has_payload and spec.name == "payload" and spec.dtype == "ui8" and len(spec.shape) == 1

    async def read(self, session: int, received: ReceivedMessage) -> e.Event:
        """Make the controller's event of a message."""
        message, payload, defect, attachment, size = received.message, "", "", 0, 0
        if type(message) in KINDS:
            data = _payload(received.tensors)
            size = len(data)
            payload, defect = await asyncio.to_thread(self._checks.keep, self._payloads, message, data)
        elif isinstance(message, mm.ExpertsImproved):
            self._results_taken += 1
            attachment = self._results_taken
            self._results[attachment] = _payload(received.tensors)
        return e.Received(session, message, defect, attachment, payload, size)

    # --- instructions -----------------------------------------------------------------------------------------

    def assembled(self, instruction: AssembleModel) -> ModelAssembled:
        """Make the ordinary model of the shards, and a checkpoint. In a thread."""
        clock, plan = self._gateway.clock, self._prepared.plan
        began = clock.monotonic()
        try:
            model = assembled_model(self._payloads, instruction.shards, instruction.experts, plan)
            payload = self._payloads.put("model", model_bytes(instruction.round, model))
            checkpoint = self._checkpoint(instruction.round, model) if instruction.checkpoint else ""
        except PlanetaryError as error:
            return ModelAssembled(instruction.round, failed=str(error))
        seconds, routing = clock.monotonic() - began, None
        try:
            routing = routing_of(self._payloads, instruction.views, plan)
        except PlanetaryError as error:  # the model is there without it
            log.warning("how far composers agree in round %d is not known: %s", instruction.round, error)
        return ModelAssembled(instruction.round, payload, checkpoint, seconds, routing=routing)

    def _checkpoint(self, round_: int, model: Tensors) -> str:
        """Write the ordinary model as a checkpoint, which `planetary generate` reads; return the folder's name."""
        specs, gateway = self._prepared.model, self._gateway
        info = CheckpointInfo(
            round=round_,
            config_hash=config_hash(gateway.config),
            model="latent_moe",
            model_digest=self._prepared.program.digest,
            param_specs=specs,
            data_key=self._prepared.data.key,
            controller=msgspec.Raw(msgspec.json.encode(Mark(round_, 0, 1))),
            random_state={"seed": gateway.config.run.seed},
        )
        nothing = {spec.name: np.zeros(spec.shape, np.float32) for spec in specs}  # merges keep no velocity
        keep, files = gateway.config.checkpoint.keep, gateway.system.files
        folder = gateway.options.folder / CHECKPOINTS
        return write_checkpoint(folder, Checkpoint(info, model, nothing), keep=keep, files=files).name

    def _begin_judgement(self, asked: JudgeExperts) -> None:
        results = [self._results.pop(name) for name in (asked.attachment, asked.second) if name]
        self._gateway.work.add(self._judge(asked, results))

    async def _judge(self, instruction: JudgeExperts, results: list[Packed]) -> None:
        try:
            judged = await asyncio.to_thread(judge_experts, self._payloads, instruction, results, self._prepared.plan)
        except Exception as error:  # a worker's bytes: no other worker gets the work before it is judged
            log.exception("the result of task %d cannot be judged", instruction.task)
            judged = ExpertsJudged(instruction.task, failed=f"{type(error).__name__}: {error}")
        self._gateway.post(judged)

    async def _collect(self, keep: frozenset[str]) -> None:
        try:
            # After a power cut the run goes on from older records, whose payloads have to be there.
            self._gateway.sync_files()
            await asyncio.to_thread(self._payloads.collect, keep)
        except PlanetaryError as error:
            log.warning("old payloads were not removed: %s", error)


def _source(read: Callable[[], bytes | bytearray | memoryview]) -> TensorSource:
    """Return the source of a payload whose bytes `read` returns, in the message's turn."""
    return lambda: {"payload": np.frombuffer(read(), np.uint8)}


def _payload(tensors: Tensors) -> Packed:
    return tensors["payload"].data.toreadonly() if "payload" in tensors else b""


def mixture_status(gateway: Gateway[Any], controller: MixtureController) -> MixtureStatus:
    """Build the status."""
    state, run_state = controller.state, _run_state(controller)
    finishing = "evaluating the last round's model" if run_state == "finishing" else ""
    stage, since = stage_of(gateway, run_state, controller.stalls.why or finishing)
    return msgspec.structs.replace(
        training_status(gateway, READER.name, state, status=MixtureStatus),
        state=run_state,
        stage=stage,
        stage_since=since,
        round=min(state.round + 1, gateway.config.train.rounds),
        workers=workers_seen(controller.desk, TrainerStatus, lambda worker: worker_status(controller, worker)),
        newest=newest_mixture(gateway.metrics),
        message=message_of(gateway, controller.stalls.why),
    )


def _run_state(controller: MixtureController) -> RunState:
    ended = ended_as(controller.state.ended)
    if ended is not None:
        return ended
    if controller.state.round >= controller.policy.rounds:
        return "finishing"
    return "training" if controller.composing else "waiting"


def worker_status(controller: MixtureController, worker: WorkerSession) -> TrainerStatus:
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
    lost = controller.state.losses.get(worker.worker, 0)
    return connected_worker(worker, state, lost, TrainerStatus, round=round_, step=step, loss=loss)
