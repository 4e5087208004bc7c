"""The parts of a run of reinforcement learning: policy, prompts, program and constants."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from planetary.compiler.frontend.manifest import Manifest
from planetary.core.adapters import Adapter, merged_values, trained_by
from planetary.core.configuration.derived import WARMUP_SHARE
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.extension_points import MERGE_RULES, SCHEDULES
from planetary.core.tensors import Tensors, TensorSpec
from planetary.models.context import CacheSizes
from planetary.runs.rl.config import RlConfig, check_keys
from planetary.runs.rl.environments.judges import JudgeLimits, check_environment
from planetary.runs.rl.environments.problems import Problems, check_tools, problems_of
from planetary.runs.rl.events import PolicyOfRun
from planetary.runs.rl.objectives.objective import OBJECTIVES, Objective
from planetary.runs.rl.program.program import compared_policy, policy_program
from planetary.runs.rl.program.shape import PolicyShape
from planetary.runs.rl.rollouts.chats import PolicyChats
from planetary.runs.rl.rollouts.dialogues import RolloutLimits, Rollouts
from planetary.runs.rounds.preparation.adapted_model import with_adapters
from planetary.runs.rounds.preparation.prepared_steps import check_untrained
from planetary.runs.rounds.preparation.training_options import schedule_of, step_options
from planetary.runs.serve.program.shape import PAGE, ServingShape, context_sizes_of
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runtime.device_program import Program
from planetary.wire.limits import MIB

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Rollouts that one decoding call continues."""

LoadPolicy = Callable[[Config], TracedModel]
LoadFolder = Callable[[Path], TracedModel]


@dataclass(frozen=True)
class PreparedPolicy:
    """The parts of a run of reinforcement learning. There is no data.

    Attributes:
        model: the policy, with initial parameters.
        reference: parameters it is compared with from the start; None: those at the end of the imitation.
        objective: of the rounds after the imitation.
        state: of the optimizer.
        manifest: arguments of the policy's loss, with the result of the comparison with JAX's own.
        adapters: that are trained in place of the model's parameters, if any.
        adapter_values: initial values of the adapters.
        chats: renders prompts that are messages; None: prompts are texts.
    """

    config: Config
    model: TracedModel
    reference: Tensors | None
    problems: Problems
    objective: Objective
    shape: PolicyShape
    limits: RolloutLimits
    program: Program
    state: tuple[TensorSpec, ...]
    manifest: Manifest
    adapters: tuple[Adapter, ...] = ()
    adapter_values: Tensors = field(default_factory=dict)
    chats: PolicyChats | None = None

    data = None

    @property
    def trained(self) -> tuple[TensorSpec, ...]:
        """The tensors that are trained and travel: the adapters, or all parameters."""
        return trained_by(self.adapters) or self.model.specs

    @property
    def initial(self) -> Tensors:
        """The initial values of `trained`."""
        return self.adapter_values if self.adapters else self.model.arrays()

    @property
    def param_count(self) -> int:
        """Number of trained scalars."""
        return sum(spec.size for spec in self.trained)

    def whole(self, weights: Tensors) -> Tensors:
        """Return all parameters of the model for values of `trained`."""
        return merged_values(self.adapters, {**self.model.arrays(), **weights}) if self.adapters else weights


def prepare_policy(
    config: Config, stage: Callable[[str], None], load: LoadPolicy, load_folder: LoadFolder
) -> PreparedPolicy:
    """Prepare a run.

    Args:
        config: of the run.
        stage: is called with the name of each stage.
        load: makes the policy that `[model]` describes.
        load_folder: loads the policy of a folder.

    Raises:
        UserError: keys do not fit together, or the model, the prompts or the environment cannot be used.
        CompileError: the model cannot be lowered, or the loss or gradients are not those of JAX.
    """
    check_keys(config)
    rl = config.of(RlConfig)
    tools, listed = check_environment(rl.task, judge_limits(config))
    if tools:
        check_tools(tools, f"task {rl.task}")
    problems = problems_of(rl.task, rl.prompts, config.run.seed, rl.held_out, tools=tools, listed=listed)
    stage("loading the policy")
    model = load_folder(Path(config.of(RlConfig).start)) if config.of(RlConfig).start else load(config)
    shape = shape_of(model, config)
    limits = limits_of(config, model, shape)
    chats = chats_of(problems, model, limits)
    stage("building the policy's functions and its training step")
    options = step_options(config)
    adapt = partial(with_adapters, config=config)
    program, state, loss = policy_program(model.decode, model.params, model.specs, shape, options, adapt)
    if loss.adapters:
        check_untrained("the policy", model.specs)
    stage("comparing loss and gradients with the policy's own framework")
    manifest = compared_policy(loss, shape).manifest
    assert manifest.meaning is not None
    log.info("meaning of the policy: %s", manifest.meaning.summary)
    return PreparedPolicy(
        config=config,
        model=model,
        reference=_reference(config, model, load_folder, loss.start if loss.adapters else model.arrays()),
        problems=problems,
        objective=objective_of(config),
        shape=shape,
        limits=limits,
        chats=chats,
        program=program,
        state=state,
        manifest=manifest,
        adapters=loss.adapters,
        adapter_values=loss.start if loss.adapters else {},
    )


def judge_limits(config: Config) -> JudgeLimits:
    """Return the limits of the environment's processes."""
    return JudgeLimits(
        config.of(RlConfig).judges, config.of(RlConfig).judge_seconds, int(config.of(RlConfig).judge_mb * MIB)
    )


def objective_of(config: Config) -> Objective:
    """Return the objective with the configuration's coefficients."""
    rl = config.of(RlConfig)
    return OBJECTIVES[rl.objective].with_terms(clip_low=rl.clip_low, clip_high=rl.clip_high, reference=rl.kl)


def shape_of(model: TracedModel, config: Config) -> PolicyShape:
    """Return the sizes a policy is compiled for.

    Raises:
        UserError: the batch or the rollout's length is missing or too long for the model, or the cache too small.
    """
    rl, train, sizes = config.of(RlConfig), config.train, model.sizes
    if train.batch_size < 1 or train.sequence_length < 1:
        raise UserError("rl: train.batch_size (rollouts) and train.sequence_length (tokens of a rollout) must be given")
    if not isinstance(sizes, CacheSizes):
        raise UserError(
            f"the policy {model.name} keeps no keys and values of a rollout, without which rl does not sample: use a "
            "model with `decode` and `cache_sizes` (docs/serving.md)"
        )
    whole = -(-train.sequence_length // PAGE)
    window = whole * PAGE
    if sizes.positions is not None and window > sizes.positions:
        raise UserError(
            f"train.sequence_length = {train.sequence_length}: rollouts are sampled in pages of {PAGE} tokens, so the "
            f"model needs {window} positions and has {sizes.positions} (for gpt2: model.options.n_position)"
        )
    at_once = min(MOST_AT_ONCE, max(rl.groups * rl.completions, 1))
    page_shape = (2 * sizes.layers, sizes.heads, PAGE, sizes.width)
    pages = min(at_once * whole + 1, int(rl.cache_mb * MIB) // (4 * int(np.prod(page_shape))))
    if pages <= whole:
        raise UserError(
            f"rl.cache_mb = {rl.cache_mb:g} does not hold one rollout of {window} tokens: expected "
            f"{(whole + 1) * 4 * int(np.prod(page_shape)) / MIB:.1f} at least"
        )
    chunks = tuple(chunk for chunk in (PAGE, 4 * PAGE, 16 * PAGE) if chunk < window) or (window,)
    together = tuple(sorted({max(1, at_once // 4), at_once}))
    serving = ServingShape(
        vocabulary=model.vocabulary,
        window=window,
        pages=pages,
        page_shape=page_shape,
        batches=together,
        chunks=chunks,
        prefills=together,
        context_sizes=context_sizes_of(window),
        most_candidates=1,  # draws are from the whole distribution
        scores_prompts=False,
    )
    return PolicyShape(serving, train.batch_size, train.sequence_length, train.micro_batches)


def limits_of(config: Config, model: TracedModel, shape: PolicyShape) -> RolloutLimits:
    """Return the limits of rollouts. Raises `UserError` for a tokenizer without a token that ends a rollout."""
    if model.tokenizer.vocab_size > model.vocabulary:
        raise UserError(
            f"the tokenizer has {model.tokenizer.vocab_size} tokens, and the model knows {model.vocabulary}: set "
            "model.options.vocab_size, or another data.tokenizer"
        )
    ends = tuple(sorted(model.ends))
    if not ends:
        newline = model.tokenizer.encode(b"\n").tolist()
        if len(newline) != 1:
            raise UserError("the tokenizer has no token that ends a rollout: no end of document, and no line end")
        ends = (newline[0],)
    return RolloutLimits(
        window=min(config.train.sequence_length + 1, shape.serving.window),  # the last token is never read
        most=config.of(RlConfig).max_tokens,
        vocabulary=min(model.vocabulary, model.tokenizer.vocab_size),
        ends=ends,
        begins=model.begins,
    )


def chats_of(problems: Problems, model: TracedModel, limits: RolloutLimits) -> PolicyChats | None:
    """Return the renderer of prompts that are messages; None: prompts are texts.

    Raises:
        UserError: the tokenizer has no chat template, or the first prompts cannot be rendered or are too long.
    """
    first = problems.train(1)
    if isinstance(first.prompt, str):
        if first.tools:
            raise UserError("the task offers tools, and its prompts are texts: tools need prompts that are messages")
        return None
    if not model.chat_template:
        raise UserError(
            "the prompts are messages, and the policy's tokenizer has no chat template to render them with: put it "
            "beside the tokenizer.json, as chat_template.jinja or under chat_template in tokenizer_config.json"
        )
    texts = [model.tokenizer.decode([end]).decode("utf-8", "replace") for end in limits.ends]
    chats = PolicyChats(model.chat_template, dict(model.special_tokens), texts)
    rollouts = Rollouts(problems, model.tokenizer, limits, seed=0, completions=1, chats=chats)
    rollouts.group(False, 1)
    return chats


def _reference(config: Config, model: TracedModel, load_folder: LoadFolder, initial: Tensors) -> Tensors | None:
    if not config.of(RlConfig).teacher:
        return initial if not config.of(RlConfig).imitated_rounds else None
    teacher = load_folder(Path(config.of(RlConfig).teacher))
    if teacher.specs != model.specs or teacher.tokenizer.digest != model.tokenizer.digest:
        raise UserError(
            f"rl.teacher = {config.of(RlConfig).teacher}: the teacher has other parameters or tokens than the policy"
        )
    return teacher.arrays()


def policy_of_run(config: Config, prepared: PreparedPolicy, *, local: bool, base: str = "") -> PolicyOfRun:
    """Derive the controller's constants from the configuration; `base`: digest of the parameters behind adapters."""
    from planetary.compiler.backends.pipeline import compiler_version

    timings, rl, optimizer = config.timings, config.of(RlConfig), config.optimizer
    imitated = max(1, rl.imitated_rounds)
    warmup = min(optimizer.warmup_steps, imitated // WARMUP_SHARE)
    fitted = replace(config, optimizer=replace(optimizer, warmup_steps=warmup))
    schedule = schedule_of(fitted, imitated)
    objective = prepared.objective
    return PolicyOfRun(
        run=config.run.name,
        local=local,
        startup_grace_s=timings.startup_grace_s,
        abandon_after_s=config.fabric.abandon_after_s,
        heartbeat_s=timings.heartbeat_s,
        silent_after_s=timings.silent_after_s,
        iree_version=compiler_version(),
        params=prepared.shape.serving.params_of(prepared.program.functions),
        state=prepared.state,
        adapters=prepared.adapters,
        base=base,
        shape=prepared.shape,
        config_hash=config_hash(config),
        rounds=config.train.rounds,
        merge=MERGE_RULES.pin(config.outer.merge),
        groups=rl.groups * config.train.inner_steps,
        completions=rl.completions,
        lag=rl.lag,
        ahead=rl.ahead,
        equal=objective.equal if rl.equal == "objective" else rl.equal,
        imitated=rl.imitated_rounds,
        imitation_goal=rl.imitation_goal,
        imitation_every=rl.imitation_every or config.eval.every,
        held_out=prepared.problems.held_out_count,
        goal=rl.goal,
        ends=prepared.limits.ends,
        vocabulary=prepared.limits.vocabulary,
        teaches=objective.teacher,
        staleness=objective.staleness,
        refers=objective.terms.reference > 0,
        reference=prepared.reference is not None,
        rate=rl.learning_rate,
        decay=SCHEDULES.pin(rl.decay),
        schedule=schedule,
        eval_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        persists=config.train.inner_state == "persist",
    )
