"""Reinforcement learning at its gateway: rollouts, environments, parameters and checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.artifacts.packed_arrays import pack_arrays
from planetary.core import decoding
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.errors import PlanetaryError, RemoteProtocolError, ResourceError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import SYNCED, Parts, Setup, constant
from planetary.fleet.gateway.run_files import CHECKPOINTS, kept_place
from planetary.fleet.gateway.status import connected_worker, stage_of, workers_seen
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_program_apart
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import RunState, WorkerState
from planetary.fleet.shell.shell import TensorSource
from planetary.runs.rl.config import RlConfig
from planetary.runs.rl.controller import ReinforcementController, ReinforcementDesk
from planetary.runs.rl.environments.judges import JudgeLimits, JudgeProcesses, Judges
from planetary.runs.rl.events import (
    BatchesOf,
    ForgetGroups,
    ForgetTask,
    GroupOutcome,
    JudgeRollouts,
    KeepReference,
    PolicyWeightsOf,
    ReferenceWeights,
    RolloutsJudged,
    RolloutsOf,
)
from planetary.runs.rl.messages import (
    BASE,
    REINFORCEMENT,
    RolloutsLearned,
    RolloutsSampled,
)
from planetary.runs.rl.objectives.objective import IMITATION
from planetary.runs.rl.preparation import PreparedPolicy, judge_limits, policy_of_run
from planetary.runs.rl.rollouts.dialogues import Dialogue, Rollouts, outcome_of
from planetary.runs.rl.rollouts.packing import pack
from planetary.runs.rl.rollouts.recomputation import Recomputation
from planetary.runs.rl.start import PolicyStart, begin_policy, keep_reference
from planetary.runs.rl.status import READER
from planetary.runs.rounds import events as e
from planetary.runs.rounds.news import TrainingNews
from planetary.runs.rounds.progress import training_status
from planetary.runs.rounds.records import RoundClosed, RoundFinished
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus
from planetary.runs.rounds.training_traffic import TrainingTraffic
from planetary.sync.contributions import check_contribution
from planetary.wire.limits import MIB, Limits
from planetary.wire.streams import ReceivedMessage

log = logging.getLogger(__name__)

_SAMPLED: Mapping[str, str] = {"tokens": "i32", "logprobs": "f32", "lengths": "i32"}
"""Element types of the tensors of `RolloutsSampled`, by name."""

Prepare = Callable[[Config, Callable[[str], None]], PreparedPolicy]
"""As `prepare_policy`, with the functions that load models."""
CompileFor = Callable[[PreparedPolicy, CompileTarget, Path], Awaitable[PublishedArtifact]]
"""As `compile_policy`."""
MakeJudges = Callable[[str, JudgeLimits], Judges]
"""`(task, limits)` -> the judges of a run."""


async def compile_policy(prepared: PreparedPolicy, target: CompileTarget, cache: Path) -> PublishedArtifact:
    """Compile and verify a policy's program in a separate process."""
    below = prepared.shape.serving.integers_below
    return await compile_program_apart(prepared.program, prepared.model.name, below, target, cache)


class PolicySetup(Setup[PreparedPolicy, "PolicyRun"]):
    """How a run of reinforcement learning begins."""

    protocol = REINFORCEMENT
    compiles = "the policy's functions"
    traffic_of, news_of = TrainingTraffic, TrainingNews
    synced = (*SYNCED, RoundFinished, RoundClosed)

    def status(self, gateway: Gateway[Any]) -> TrainingStatus:
        return training_status(gateway, READER.name, None)

    def __init__(
        self, prepare: Prepare, *, compile_for: CompileFor = compile_policy, make_judges: MakeJudges = JudgeProcesses
    ) -> None:
        """`prepare` loads the policy and builds the functions, `compile_for` compiles them."""
        self._prepare, self._compile_for, self._make_judges = prepare, compile_for, make_judges

    def prepare(self, gateway: Gateway[Any]) -> PreparedPolicy:
        prepared = self._prepare(gateway.config, gateway.set_stage)
        meaning = prepared.manifest.meaning
        if meaning is not None and meaning.author != "framework":
            gateway.notes.append(meaning.summary)
        return prepared

    def begin(self, gateway: Gateway[Any], prepared: PreparedPolicy) -> Parts[PolicyRun]:
        config, options = gateway.config, gateway.options
        base = gateway.store.put(pack_arrays(BASE, None, prepared.model.arrays())) if prepared.adapters else ""
        policy = policy_of_run(config, prepared, local=options.local_threads is not None, base=base)
        start = begin_policy(config, options, prepared, policy, gateway.system.files)
        desk = ReinforcementDesk(start.policy, start.state)
        newest = next((line for line in start.metrics if line.round == start.state.round), None)
        controller = ReinforcementController(desk, config.timings.grace_s, gateway.clock.monotonic(), newest)
        judges = self._make_judges(kept_place(options.folder, config.of(RlConfig).task), judge_limits(config))
        gateway.after_close.push_async_callback(judges.close)
        run = PolicyRun(gateway, prepared, start, controller, judges)
        tokens = config.train.batch_size * config.of(RlConfig).max_tokens
        return Parts(
            run=run,
            controller=controller,
            records=start.records,
            metrics=start.metrics,
            status=run.status,
            compile_for=lambda target: self._compile_for(prepared, target, options.cache),
            limits=run.limits,
            expects=run.expects,
            read=run.read,
            effects=run.effects,
            answers={e.TakeOuterStep: partial(start.parameters.step, config.outer, tokens)},
            sources=run.sources,
        )


class PolicyRun:
    """A run of reinforcement learning that has begun, at its gateway.

    Attributes:
        parameters: the versions of the policy's parameters that are kept.
        effects: instructions that are carried out at once, by class.
        sources: returns the tensors of a payload, by class.
    """

    def __init__(
        self,
        gateway: Gateway[Any],
        prepared: PreparedPolicy,
        start: PolicyStart,
        controller: ReinforcementController,
        judges: Judges,
    ) -> None:
        """`judges` decide on rewards."""
        config = gateway.config
        rl, model = config.of(RlConfig), prepared.model
        self.parameters = start.parameters
        self._gateway, self._prepared, self._controller, self._judges = gateway, prepared, controller, judges
        self._rollouts = Rollouts(
            prepared.problems, model.tokenizer, prepared.limits, config.run.seed, rl.completions, chats=prepared.chats
        )
        if prepared.chats is not None:
            gateway.after_close.callback(prepared.chats.close)
        self._rollouts_turn = asyncio.Lock()  # rollouts are used by one thread at a time
        self._recomputation = Recomputation(
            model.decode,
            model.params,
            model.specs,
            length=prepared.shape.length,
            vocabulary=prepared.limits.vocabulary,
            tolerance=rl.tolerance,
        )
        self._sampled: dict[int, Tensors] = {}  # attachment -> tensors of a `RolloutsSampled`
        self._attachments = 0
        self._batches: dict[int, tuple[int, int]] = {}  # task -> steps and tokens of the batches
        self._reference = start.reference
        self._reference_is_kept = True  # on the disk, or made of the configuration again
        self.effects: dict[type[e.Instruction], Callable[[Any], object]] = {
            JudgeRollouts: self._begin_judgement,
            e.WriteCheckpoint: lambda asked: gateway.answer(partial(self._write_checkpoint, self._checkpoint(asked))),
            e.KeepParameters: lambda asked: self.parameters.keep(asked.versions),
            e.DropAttachment: self._drop,
            ForgetGroups: lambda asked: self._rollouts.forget(asked.held_out, asked.groups),
            ForgetTask: lambda asked: self._batches.pop(asked.task, None),
            KeepReference: self._keep_reference,
        }
        self.sources: dict[type[e.Payload], Callable[[Any], TensorSource]] = {
            PolicyWeightsOf: lambda payload: constant(self.parameters.of_version(payload.version)),
            ReferenceWeights: self._reference_weights,
            # Now, on the event loop: rollouts change when others of them are judged.
            RolloutsOf: lambda payload: constant(self._rollouts.to_sample(payload.held_out, payload.groups)),
            BatchesOf: lambda payload: constant(self._batches_of(payload)),
        }

    def status(self) -> TrainingStatus:
        """Return the run as it is now. Called on the event loop."""
        gateway, controller = self._gateway, self._controller
        state = controller.desk.state
        run_state: RunState = ended_as(state.ended) or ("training" if controller.desk.ready_workers() else "waiting")
        stage, since = stage_of(gateway, run_state, controller.stalls.why)
        return msgspec.structs.replace(
            training_status(gateway, READER.name, state),
            state=run_state,
            stage=stage,
            stage_since=since,
            round=min(state.round + 1, gateway.config.train.rounds),
            workers=workers_seen(controller.desk, TrainerStatus, lambda worker: _seen(worker, controller)),
        )

    # --- messages of workers ----------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """Return the limits of a worker's messages."""
        total = 4 * self._prepared.param_count
        count = len(self._prepared.trained) + len(_SAMPLED)
        return Limits(tensor_bytes=total + 64 * MIB, tensors=count, messages_under_way=2)

    def expects(self, message: m.Message, spec: TensorSpec) -> bool:
        """Return whether a worker's message may bring a tensor."""
        learned = isinstance(message, RolloutsLearned) and spec in self._prepared.trained
        return learned or (isinstance(message, RolloutsSampled) and _SAMPLED.get(spec.name) == spec.dtype)

    async def read(self, session: int, received: ReceivedMessage) -> e.Event:
        """Make the controller's event of a message."""
        message, tensors = received.message, received.tensors
        match message:
            case RolloutsSampled():
                self._attachments += 1
                # Negative: the numbers above 0 are those of end parameters.
                self._sampled[-self._attachments] = tensors
                return e.Received(session, message, "", -self._attachments)
            case RolloutsLearned():
                return await self._read_learned(session, message, tensors)
            case _:
                return e.Received(session, message)

    async def _read_learned(self, session: int, message: RolloutsLearned, tensors: Tensors) -> e.Event:
        prepared = self._prepared
        defect = await asyncio.to_thread(check_contribution, prepared.trained, tensors)
        steps, tokens = self._batches.pop(message.task, (0, 0))
        if not defect and (message.steps, message.tokens) != (steps, tokens):
            defect = (
                f"it has trained {message.steps} steps of {message.tokens} tokens, and was given {steps} of {tokens}"
            )
        return e.Received(session, message, defect, self.parameters.attach(tensors))

    # --- instructions -----------------------------------------------------------------------------------------

    def _drop(self, asked: e.DropAttachment) -> None:
        if asked.attachment < 0:
            self._sampled.pop(asked.attachment, None)
        else:
            self.parameters.drop(asked.attachment)

    def _reference_weights(self, payload: ReferenceWeights) -> TensorSource:
        assert self._reference is not None
        return constant(self._reference)

    def _batches_of(self, payload: BatchesOf) -> dict[str, np.ndarray]:
        prepared, rollouts = self._prepared, self._rollouts
        groups = rollouts.answered(payload.groups) if payload.imitates else rollouts.trained(payload.groups)
        objective = IMITATION if payload.imitates else prepared.objective
        batches = pack(groups, objective, prepared.shape, self._gateway.config.of(RlConfig).max_tokens)
        self._batches[payload.task] = len(batches), sum(batch.tokens for batch in batches)
        names = batches[0].arrays
        return {name: np.stack([one.arrays[name] for one in batches]) for name in names}

    def _keep_reference(self, asked: KeepReference) -> None:
        self._reference, self._reference_is_kept = dict(self.parameters.state.params), False

    def _checkpoint(self, instruction: e.WriteCheckpoint) -> Checkpoint:
        prepared, config = self._prepared, self._gateway.config
        mark, state = instruction.mark, self.parameters.state
        info = CheckpointInfo(
            round=mark.round,
            config_hash=config_hash(config),
            model=prepared.model.name,
            model_digest=prepared.program.digest,
            param_specs=prepared.trained,
            data_key="",
            controller=msgspec.Raw(msgspec.json.encode(mark)),
            random_state={"seed": config.run.seed},
            base=self._controller.desk.policy.base,
        )
        return Checkpoint(info, state.params, state.velocity, moments=state.moments)

    def _write_checkpoint(self, checkpoint: Checkpoint) -> e.Event:
        gateway, round_ = self._gateway, checkpoint.info.round
        began, options, files = gateway.clock.monotonic(), gateway.options, gateway.system.files
        try:
            gateway.sync_files()  # a power cut takes no record and no line of the rounds before a checkpoint
            if self._reference is not None and not self._reference_is_kept:  # before a checkpoint that needs it
                keep_reference(options, checkpoint.info.param_specs, self._reference, files)
                self._reference_is_kept = True
            keep = gateway.config.checkpoint.keep
            path = write_checkpoint(options.folder / CHECKPOINTS, checkpoint, keep=keep, files=files)
        except ResourceError as error:
            return e.CheckpointLost(round_, str(error))
        return e.CheckpointDone(round_, path.name, gateway.clock.monotonic() - began)

    # --- judgement --------------------------------------------------------------------------------------------

    def _begin_judgement(self, asked: JudgeRollouts) -> None:
        weights = self.parameters.of_version(asked.version)
        self._gateway.work.add(self._judge(asked, self._sampled.pop(asked.attachment), weights))

    async def _judge(self, instruction: JudgeRollouts, sampled: Tensors, weights: Tensors) -> None:
        try:
            self._gateway.post(await self._judged(instruction, sampled, weights))
        except PlanetaryError as error:
            self._gateway.post(RolloutsJudged(instruction.task, broken=str(error)))
        except Exception as error:
            log.exception("the rollouts of task %d cannot be judged", instruction.task)
            self._gateway.post(RolloutsJudged(instruction.task, broken=f"{type(error).__name__}: {error}"))

    async def _judged(self, instruction: JudgeRollouts, sampled: Tensors, weights: Tensors) -> RolloutsJudged:
        rollouts = self._rollouts
        task, held_out, groups = instruction.task, instruction.held_out, instruction.groups
        try:
            dialogues = rollouts.take(held_out, groups, instruction.version, sampled)
        except RemoteProtocolError as error:
            return RolloutsJudged(task, defect=str(error))
        chosen = self._chosen(dialogues)
        if chosen:

            def find_defect() -> str:
                return self._recomputation.defect(chosen, self._prepared.whole(weights))

            async with self._rollouts_turn:
                defect = await asyncio.to_thread(find_defect)
            if defect:
                rollouts.untake(dialogues)
                return RolloutsJudged(task, defect=defect)
        tokens = sum(one.turns[-1].count for one in dialogues)
        verdicts = await self._judges.judge(rollouts.cases(dialogues))
        replies = await asyncio.to_thread(rollouts.replies, dialogues, verdicts)  # chats are rendered elsewhere
        # Answers of tools that do not fit are left out, and the dialogue is judged as it is.
        full = [i for i, one in enumerate(dialogues) if verdicts[i].messages and not rollouts.fits(one, replies[i])]
        for i, last in zip(
            full, await self._judges.judge(rollouts.cases([dialogues[i] for i in full], are_over=True)), strict=True
        ):
            if last.reply is None and last.messages is None:
                verdicts[i], replies[i] = last, None
        rollouts.settle(dialogues, verdicts, replies)
        outcomes = tuple(
            decoding.convert({"number": number, **outcome_of(rollouts.group(held_out, number))}, GroupOutcome)
            for number in groups
        )
        return RolloutsJudged(task, outcomes, tokens=tokens)

    def _chosen(self, dialogues: list[Dialogue]) -> list[Dialogue]:
        """Return the rollouts computed again: `rl.verified` of them, on average one at least.

        The choice is drawn from the machine's entropy after the rollouts have come, so no worker can foresee it.
        """
        if not self._gateway.config.of(RlConfig).verified or not dialogues:
            return []
        share = max(self._gateway.config.of(RlConfig).verified, 1 / len(dialogues))
        drawn = np.frombuffer(self._gateway.system.entropy(4 * len(dialogues)), np.uint32)
        return [one for one, number in zip(dialogues, drawn.tolist(), strict=True) if number < share * 2**32]


def _seen(worker: WorkerSession, controller: ReinforcementController) -> TrainerStatus:
    state: WorkerState = "ready" if worker.phase is Phase.READY else "fetching"
    for loan in controller.board.loans(worker.session):
        state = "training" if loan.kind == "learn" else "evaluating"
    lost = controller.desk.state.losses.get(worker.worker, 0)
    return connected_worker(worker, state, lost, TrainerStatus, round=controller.version + 1)
