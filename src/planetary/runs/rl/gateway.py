"""The gateway of reinforcement learning: a controller on real connections, rollouts, environments and checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.core.config import Config, config_hash
from planetary.core.errors import PlanetaryError, RemoteProtocolError, ResourceError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.gateway.run_files import CHECKPOINTS, kept_place
from planetary.fleet.gateway.status import base_status, connected_worker, stage_of, workers_seen
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_program_apart
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import RoundMetrics, RunState, RunStatus, WorkerState, WorkerStatus
from planetary.fleet.shell.shell import Answer, Read, TensorSource
from planetary.fleet.shell.system import SYSTEM, System
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
from planetary.runs.rounds import events as e
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.records import RoundClosed
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


class PolicyGateway(Gateway[PreparedPolicy, PolicyStart, ReinforcementController]):
    """A run of reinforcement learning."""

    protocol = REINFORCEMENT
    synced = (*Gateway.synced, RoundClosed)
    compiles = "the policy's functions"

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        *,
        prepare: Prepare,
        system: System = SYSTEM,
        compile_for: CompileFor = compile_policy,
        make_judges: MakeJudges = JudgeProcesses,
    ) -> None:
        """`prepare` loads the policy and builds the functions, `compile_for` compiles them."""
        super().__init__(config, options, security, system=system)
        self._prepare_policy, self._compile_policy, self._make_judges = prepare, compile_for, make_judges
        self._rollouts: Rollouts | None = None
        self._rollouts_turn = asyncio.Lock()  # rollouts are used by one thread at a time
        self._judges: Judges | None = None
        self._recomputation: Recomputation | None = None
        self._sampled: dict[int, Tensors] = {}  # attachment -> tensors of a `RolloutsSampled`
        self._attachments = 0
        self._batches: dict[int, tuple[int, int]] = {}  # task -> steps and tokens of the batches
        self._reference: Tensors | None = None
        self._reference_is_kept = True  # on the disk, or made of the configuration again

    # --- the run ----------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        controller = self.controller
        if controller is None:
            return base_status(self, None)
        state = controller.desk.state
        run_state: RunState = ended_as(state.ended) or ("training" if controller.desk.ready_workers() else "waiting")
        stage, since = stage_of(self, run_state, controller.stalls.why)
        return msgspec.structs.replace(
            base_status(self, state),
            state=run_state,
            stage=stage,
            stage_since=since,
            round=min(state.round + 1, self.config.train.rounds),
            workers=workers_seen(controller.desk, lambda worker: _seen(worker, controller)),
        )

    @property
    def parameters(self) -> ParameterVersions:
        """The versions of the policy's parameters that are kept."""
        return self._parts[1].parameters

    def _prepare(self) -> PreparedPolicy:
        prepared = self._prepare_policy(self.config, self.set_stage)
        meaning = prepared.manifest.meaning
        if meaning is not None and meaning.author != "framework":
            self.notes.append(meaning.summary)
        return prepared

    def _begin(self, prepared: PreparedPolicy) -> PolicyStart:
        policy = policy_of_run(self.config, prepared, local=self.options.local_threads is not None)
        return begin_policy(self.config, self.options, prepared, policy, self._system.files)

    def _control(self, prepared: PreparedPolicy, start: PolicyStart) -> ReinforcementController:
        rl, model = self.config.of(RlConfig), prepared.model
        self._reference = start.reference
        self._rollouts = Rollouts(
            prepared.problems, model.tokenizer, prepared.limits, self.config.run.seed, rl.completions
        )
        self._judges = self._make_judges(kept_place(self.options.folder, rl.task), judge_limits(self.config))
        self._recomputation = Recomputation(
            model.decode,
            model.params,
            model.specs,
            length=prepared.shape.length,
            vocabulary=prepared.limits.vocabulary,
            tolerance=rl.tolerance,
        )
        grace_s = self.config.timings.grace_s
        desk = ReinforcementDesk(start.policy, start.state)
        newest = next((line for line in start.metrics if line.round == start.state.round), None)
        return ReinforcementController(desk, grace_s, self._clock.monotonic(), newest)

    async def _close(self) -> None:
        await super()._close()
        if self._judges is not None:
            await self._judges.close()

    @property
    def _parts(self) -> tuple[PreparedPolicy, PolicyStart, Rollouts]:
        assert self.prepared is not None
        assert self._start is not None
        assert self._rollouts is not None
        return self.prepared, self._start, self._rollouts

    # --- messages of workers ----------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        assert self.prepared is not None
        total = 4 * self.prepared.param_count
        count = len(self.prepared.model.specs) + len(_SAMPLED)
        return Limits(tensor_bytes=total + 64 * MIB, tensors=count, messages_under_way=2)

    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        assert self.prepared is not None
        learned = isinstance(message, RolloutsLearned) and spec in self.prepared.model.specs
        sampled = isinstance(message, RolloutsSampled) and _SAMPLED.get(spec.name) == spec.dtype
        if not learned and not sampled:
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor {spec.name!r} is not expected with it"
            )
        return spec.empty()

    def _reader(self) -> Read:
        return self._read

    async def _read(self, session: int, received: ReceivedMessage) -> e.Event:
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
        prepared, start, _ = self._parts
        defect = await asyncio.to_thread(check_contribution, prepared.model.specs, tensors)
        steps, tokens = self._batches.pop(message.task, (0, 0))
        if not defect and (message.steps, message.tokens) != (steps, tokens):
            defect = (
                f"it has trained {message.steps} steps of {message.tokens} tokens, and was given {steps} of {tokens}"
            )
        return e.Received(session, message, defect, start.parameters.attach(tensors))

    # --- instructions -----------------------------------------------------------------------------------------

    def _answers(self) -> Mapping[type[e.Instruction], Answer]:
        _, start, _ = self._parts
        tokens = self.config.train.batch_size * self.config.of(RlConfig).max_tokens
        return {e.TakeOuterStep: partial(start.parameters.step, self.config.outer, tokens)}

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        _, start, rollouts = self._parts
        match instruction:
            case JudgeRollouts():
                weights = start.parameters.of_version(instruction.version)
                self._work.add(self._judge(instruction, self._sampled.pop(instruction.attachment), weights))
            case e.WriteCheckpoint():
                assert self._shell is not None
                self._shell.answer(partial(self._write_checkpoint, self._checkpoint(instruction)))
            case e.KeepParameters():
                start.parameters.keep(instruction.versions)
            case e.DropAttachment() if instruction.attachment < 0:
                self._sampled.pop(instruction.attachment, None)
            case e.DropAttachment():
                start.parameters.drop(instruction.attachment)
            case ForgetGroups():
                rollouts.forget(instruction.held_out, instruction.groups)
            case ForgetTask():
                self._batches.pop(instruction.task, None)
            case KeepReference():
                self._keep_reference()
            case _:
                return super()._carry_out(instruction)
        return None

    def _source(self, payload: e.Payload | None) -> TensorSource | None:
        _, start, rollouts = self._parts
        match payload:
            case PolicyWeightsOf():
                params = start.parameters.of_version(payload.version)
                return lambda: params
            case ReferenceWeights():
                assert self._reference is not None
                reference = self._reference
                return lambda: reference
            case RolloutsOf():
                # Now, on the event loop: rollouts change when others of them are judged.
                to_sample = rollouts.to_sample(payload.held_out, payload.groups)
                return lambda: to_sample
            case BatchesOf():
                batches = self._batches_of(payload)
                return lambda: batches
        return super()._source(payload)

    def _batches_of(self, payload: BatchesOf) -> dict[str, np.ndarray]:
        prepared, _, rollouts = self._parts
        groups = rollouts.answered(payload.groups) if payload.imitates else rollouts.trained(payload.groups)
        objective = IMITATION if payload.imitates else prepared.objective
        batches = pack(groups, objective, prepared.shape, self.config.of(RlConfig).max_tokens)
        self._batches[payload.task] = len(batches), sum(batch.tokens for batch in batches)
        names = batches[0].arrays
        return {name: np.stack([one.arrays[name] for one in batches]) for name in names}

    def _keep_reference(self) -> None:
        _, start, _ = self._parts
        self._reference, self._reference_is_kept = dict(start.parameters.state.params), False

    def _checkpoint(self, instruction: e.WriteCheckpoint) -> Checkpoint:
        prepared, start, _ = self._parts
        mark, state = instruction.mark, start.parameters.state
        info = CheckpointInfo(
            round=mark.round,
            config_hash=config_hash(self.config),
            model=prepared.model.name,
            model_digest=prepared.program.digest,
            param_specs=prepared.model.specs,
            data_key="",
            controller=msgspec.Raw(msgspec.json.encode(mark)),
            random_state={"seed": self.config.run.seed},
        )
        return Checkpoint(info, state.params, state.velocity, moments=state.moments)

    def _write_checkpoint(self, checkpoint: Checkpoint) -> e.Event:
        began, round_ = self._clock.monotonic(), checkpoint.info.round
        folder, keep = self.options.folder / CHECKPOINTS, self.config.checkpoint.keep
        assert self._journal is not None
        assert self._metrics_file is not None
        try:
            # A power cut takes no record and no line of the rounds before a checkpoint.
            self._journal.sync()
            self._metrics_file.sync()
            if self._reference is not None and not self._reference_is_kept:  # before a checkpoint that needs it
                keep_reference(self.options, checkpoint.info.param_specs, self._reference, self._system.files)
                self._reference_is_kept = True
            path = write_checkpoint(folder, checkpoint, keep=keep, files=self._system.files)
        except ResourceError as error:
            return e.CheckpointLost(round_, str(error))
        return e.CheckpointDone(round_, path.name, self._clock.monotonic() - began)

    def _write_metrics(self, metrics: RoundMetrics) -> None:
        # The line of a round whose version was evaluated comes a second time, with the held-out reward.
        self.metrics = [line for line in self.metrics if line.round != metrics.round]
        super()._write_metrics(metrics)

    # --- judgement --------------------------------------------------------------------------------------------

    async def _judge(self, instruction: JudgeRollouts, sampled: Tensors, weights: Tensors) -> None:
        try:
            self._post(await self._judged(instruction, sampled, weights))
        except PlanetaryError as error:
            self._post(RolloutsJudged(instruction.task, broken=str(error)))
        except Exception as error:
            log.exception("the rollouts of task %d cannot be judged", instruction.task)
            self._post(RolloutsJudged(instruction.task, broken=f"{type(error).__name__}: {error}"))

    async def _judged(self, instruction: JudgeRollouts, sampled: Tensors, weights: Tensors) -> RolloutsJudged:
        _, _, rollouts = self._parts
        assert self._judges is not None
        task, held_out, groups = instruction.task, instruction.held_out, instruction.groups
        try:
            dialogues = rollouts.take(held_out, groups, instruction.version, sampled)
        except RemoteProtocolError as error:
            return RolloutsJudged(task, defect=str(error))
        chosen = self._chosen(dialogues)
        if chosen:
            assert self._recomputation is not None
            find_defect = partial(self._recomputation.defect, chosen, weights, greedy=held_out)
            async with self._rollouts_turn:
                defect = await asyncio.to_thread(find_defect)
            if defect:
                rollouts.untake(dialogues)
                return RolloutsJudged(task, defect=defect)
        tokens = sum(one.turns[-1].count for one in dialogues)
        rollouts.settle(dialogues, await self._judges.judge(rollouts.cases(dialogues)))
        outcomes = tuple(
            msgspec.convert({"number": number, **outcome_of(rollouts.group(held_out, number))}, GroupOutcome)
            for number in groups
        )
        return RolloutsJudged(task, outcomes, tokens=tokens)

    def _chosen(self, dialogues: list[Dialogue]) -> list[Dialogue]:
        """Return the rollouts computed again: `rl.verified` of them, on average one at least.

        The choice is drawn from the machine's entropy after the rollouts have come, so no worker can foresee it.
        """
        if not self.config.of(RlConfig).verified or not dialogues:
            return []
        share = max(self.config.of(RlConfig).verified, 1 / len(dialogues))
        drawn = np.frombuffer(self._system.entropy(4 * len(dialogues)), np.uint32)
        return [one for one, number in zip(dialogues, drawn.tolist(), strict=True) if number < share * 2**32]

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        prepared, _, _ = self._parts
        return await self._compile_policy(prepared, target, self.options.cache)


def _seen(worker: WorkerSession, controller: ReinforcementController) -> WorkerStatus:
    state: WorkerState = "ready" if worker.phase is Phase.READY else "fetching"
    for loan in controller.board.loans(worker.session):
        state = "training" if loan.kind == "learn" else "evaluating"
    seen = connected_worker(worker, state, controller.desk.state.losses.get(worker.worker, 0))
    return msgspec.structs.replace(seen, round=controller.version + 1)
