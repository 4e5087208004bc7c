"""Composers, syncer, surrogate refresh and expert workers in lock step in one process, without a network.

Every participant is a pure transition on values of `states.py`; this is the schedule in which each step waits for
everything. A networked run at the same schedule must equal it, and `bench/parallax.py` measures it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import LocalProtocolError, NumericsError, UserError
from planetary.core.step import GRADIENT, RATE
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.acceptance import Verdict
from planetary.runs.mixture.methods.averaging import FragmentMergeRule, PublishedParameters, merge
from planetary.runs.mixture.methods.sketch import EncodedSketch
from planetary.runs.mixture.methods.tiers import Tier, tier_fragments
from planetary.runs.mixture.program.programs import composer_program, dense_specs, expert_program
from planetary.runs.mixture.program.signature import ComposerShape, in_layer, parameter_specs
from planetary.runs.mixture.training.audit import accept_slots
from planetary.runs.mixture.training.composer import (
    ComposerSteps,
    install,
    mean_error,
    mean_loss,
    named_experts,
    owned_by,
)
from planetary.runs.mixture.training.expert_work import HeldExperts
from planetary.runs.mixture.training.initial import initial_training
from planetary.runs.mixture.training.participant_states import (
    ComposerState,
    Surrogates,
    SyncerState,
    TrainingState,
    assembled,
)
from planetary.runs.mixture.training.replicas import expert_fragments, holders, only_shards, replicated_slots, rule_of
from planetary.runs.mixture.training.routing import RoutingAgreement, all_layers, routing_agreement
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runtime.device_program import DeviceProgram, Program, open_on_xla
from planetary.sync.radial import weighted_mean

if TYPE_CHECKING:
    from planetary.compiler.backends.targets import Target


@functools.lru_cache(maxsize=16)
def composer_runner(
    config: LatentMoeConfig, shape: ComposerShape, options: StepOptions, optimise: bool = True
) -> DeviceProgram:
    """Return a composer's program ready to run; trainings of one model in one process share the functions."""
    return open_on_xla(composer_program(config, shape, options), optimise=optimise)


def expert_runner(
    config: LatentMoeConfig, slots: int, tokens: int, options: StepOptions, optimise: bool = True
) -> DeviceProgram:
    """Return an expert worker's program ready to run, shared in the same way."""
    return _expert_runner(msgspec.structs.replace(config, balance=0.0), slots, tokens, options, optimise)


@functools.lru_cache(maxsize=16)
def _expert_runner(
    config: LatentMoeConfig, slots: int, tokens: int, options: StepOptions, optimise: bool
) -> DeviceProgram:
    return open_on_xla(expert_program(config, slots, tokens, options), optimise=optimise)


def open_on_iree(program: Program, target: Target, functions: Sequence[str] = ()) -> DeviceProgram:
    """Compile functions of a program, all by default, with IREE and load them on the target's device of this machine.

    Raises:
        CompileError: IREE refuses the program.
        ResourceError: the device cannot be opened, or the module not be loaded.
    """
    from planetary.compiler import ir
    from planetary.compiler.backends.iree import prepare_functions, run_compiler
    from planetary.compiler.backends.targets import compiler_flags
    from planetary.runtime.iree_program import IreeProgram

    wanted = {name: program.functions[name] for name in functions or program.functions}
    with ir.new_context():
        module = ir.parse_module(program.portable)
        for name, function in ir.functions(module).items():
            if name not in wanted:
                ir.erase_function(function)
        prepare_functions(module, wanted)
        text = ir.to_text(module)
    return IreeProgram(
        run_compiler(text, compiler_flags(target)), Program(program.portable, wanted), backend=target.backend
    )


replace = msgspec.structs.replace


class StepReport(msgspec.Struct, frozen=True):
    """The report of one step of all composers.

    Attributes:
        cross_entropy: mean over the composers, before the update.
        sketch_bytes: of all sketches that were made.
        update_bytes: of the updates that expert workers returned.
        surrogate_bytes: of the numbers a refresh in this step sent, once for all receivers.
        surrogate_error: mean relative error on the calibration rows, of a refresh in this step; NaN without one.
        verdicts: on expert workers' updates.
        merged: tiers and fragments merged after the step.
    """

    cross_entropy: float
    sketch_bytes: int
    update_bytes: int
    surrogate_bytes: int
    surrogate_error: float
    verdicts: tuple[Verdict, ...]
    merged: tuple[tuple[Tier, int], ...]


class MoeTrainer:
    """Compiles the programs of one training and moves the state from step to step.

    Args:
        config: the model.
        training: how it is trained.
        owners: ownership map i32 [layers, experts]; default: e mod C.
        optimise: False compiles faster and runs slower.

    Raises:
        UserError: the parts do not fit together.
        CompileError: the model cannot be compiled.
    """

    def __init__(
        self,
        config: LatentMoeConfig,
        training: MoeTraining,
        owners: np.ndarray | None = None,
        *,
        optimise: bool = True,
    ) -> None:
        shape = (config.n_layer, config.n_expert)
        self.owners = ownership.round_robin(*shape, training.composers) if owners is None else owners
        if self.owners.shape != shape or self.owners.max() >= training.composers or self.owners.min() < 0:
            raise UserError(
                f"an ownership map for {training.composers} composers is i32 {list(shape)} with numbers below that, "
                f"found {list(self.owners.shape)}, {self.owners.min()} to {self.owners.max()}"
            )
        self.config, self.training = config, training
        self.batch = training.batch_size // training.composers
        slots = replicated_slots(self.owners, training.composers, training.replicas)[0].shape[1]
        rank = training.rank if training.composers > 1 else 0
        kind = ComposerShape(slots, rank, self.batch, training.detach, train_experts=training.expert_optimizer.in_step)
        self.composer: DeviceProgram = composer_runner(config, kind, training.dense, optimise)
        tokens = self.batch * config.sequence_length
        self.expert: DeviceProgram = expert_runner(config, slots, tokens, training.experts, optimise)
        self._optimise = optimise
        self.steps = ComposerSteps(config, training, self.batch, self.composer, self.expert)
        self._names = tier_fragments(dense_specs(config), training.cadence)
        self._copies = expert_fragments(
            self.owners, training.composers, [spec.name for spec in parameter_specs(self.expert.program)]
        )

    def initial(self) -> TrainingState:
        """Return the state before the first step."""
        return initial_training(self.config, self.training, self.owners, self.composer.program, self.expert.program)

    def step(self, state: TrainingState, tokens: np.ndarray, targets: np.ndarray) -> tuple[TrainingState, StepReport]:
        """Return the state after one step of every composer, and the report.

        Args:
            state: left as it was.
            tokens: i32 [batch_size, T]; composer c gets the c-th part of the rows.
            targets: like `tokens`.

        Raises:
            NumericsError: a loss is not finite.
        """
        parts = [slice(c.number * self.batch, (c.number + 1) * self.batch) for c in state.composers]
        found = [
            self.steps.gradients(c, state.surrogates, tokens[part], targets[part])
            for c, part in zip(state.composers, parts, strict=True)
        ]
        losses = [float(f["cross_entropy"]) for f in found]
        if not np.isfinite(losses).all():
            raise NumericsError(f"step {state.steps}: the losses of the composers are {losses}")
        composers = self._update_dense(state, found)
        composers, sizes, verdicts = self._update_experts(state.steps, composers, found)
        composers = [self.steps.remember(c, f) for c, f in zip(composers, found, strict=True)]
        done = state.steps + 1
        surrogates, refreshed, error = state.surrogates, 0, float("nan")
        syncer, due = state.syncer, self.training.cadence.refresh_due(done)
        if due and self.training.replicas > 1:
            composers, syncer = self._consolidate(composers, syncer, done)
        if surrogates is not None and due:
            surrogates, refreshed, error = self.refresh(composers, surrogates, done)
        composers, syncer, merged = self._synchronise(composers, syncer, done)
        after = TrainingState(done, tuple(composers), surrogates, syncer)
        return after, StepReport(float(np.mean(losses)), *sizes, refreshed, error, tuple(verdicts), merged)

    def evaluate(self, state: TrainingState, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """Return the mean cross-entropy of the assembled model: mean dense parameters, all real experts."""
        return mean_loss(self._whole, whole_arguments(*assembled(state, self.config), self.config), batches)

    def evaluate_composer(
        self, state: TrainingState, number: int, batches: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> float:
        """Return the mean cross-entropy as one composer sees the model: own experts, surrogates for the others."""
        return mean_loss(self.composer, self.steps.arguments(state.composers[number], state.surrogates), batches)

    def evaluate_surrogates(self, state: TrainingState, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """Return the mean cross-entropy with surrogates in place of all experts, on the first composer's other state.

        Raises:
            UserError: this training has no surrogates.
        """
        if state.surrogates is None:
            raise UserError("there are no surrogates to evaluate: the training has one composer, or rank 0")
        nothing = state.composers[0].owning_nothing()
        return mean_loss(self.composer, self.steps.arguments(nothing, state.surrogates), batches)

    def agreement(self, state: TrainingState, tokens: np.ndarray) -> RoutingAgreement:
        """Return how far the composers agree about routing the same tokens i32 [batch, T], over all layers at once."""
        batch = {"tokens": tokens, "targets": tokens}
        found = [
            self.composer("evaluate", {**self.steps.arguments(c, state.surrogates), **batch}) for c in state.composers
        ]
        return routing_agreement([all_layers(one, self.config.n_layer) for one in found], self.config.n_active)

    def refresh(
        self, composers: Sequence[ComposerState], surrogates: Surrogates, done: int
    ) -> tuple[Surrogates, int, float]:
        """Return the bank after every owner fitted the experts' surrogates, bytes sent, and the mean relative error."""
        fits = []
        for composer in composers:
            fits += self.steps.fit(only_shards(composer, self.owners, [composer.number]), surrogates)
        return install(surrogates, fits, done), sum(fit.nbytes for fit in fits), mean_error(fits)

    # --- details --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _whole(self) -> DeviceProgram:
        """The ordinary model, with all experts in slots: built when it is first evaluated."""
        if self.training.composers == 1:
            return self.composer
        whole = ComposerShape(self.config.n_expert, 0, self.batch)
        return composer_runner(self.config, whole, self.training.dense, self._optimise)

    def _update_dense(self, state: TrainingState, found: Sequence[Tensors]) -> list[ComposerState]:
        """Everyone takes an optimizer step; tiers with a horizon of 1 take it on the mean gradient."""
        cadence = self.training.cadence.of_step(state.steps + 1)
        together = [
            GRADIENT + name for (tier, _), names in self._names.items() if cadence.horizon(tier) == 1 for name in names
        ]
        mean = mean_gradients([{n: f[n] for n in together} for f in found], [1] * len(found))
        shared = cadence.backbone == 1  # then all tiers are, and all composers stay equal
        composers: list[ComposerState] = []
        for composer, gradients in zip(state.composers, found, strict=True):
            if shared and composers:
                first = composers[0]
                composers.append(replace(composer, dense=first.dense, dense_moments=first.dense_moments))
                continue
            composers.append(update_dense(self.steps, composer, state.steps, {**gradients, **mean}))
        return composers

    def _update_experts(
        self, step: int, composers: Sequence[ComposerState], found: Sequence[Tensors]
    ) -> tuple[list[ComposerState], tuple[int, int], list[Verdict]]:
        if self.training.expert_optimizer.in_step:
            pairs = zip(composers, found, strict=True)
            return [update_experts(self.steps, c, step, f) for c, f in pairs], (0, 0), []
        sketches = [
            [self.steps.sketch(step, number, layer, f) for layer in range(self.config.n_layer)]
            for number, f in enumerate(found)
        ]
        sketched, sent = sum(sketch.nbytes for layers in sketches for sketch in layers), 0
        verdicts: list[Verdict] = []
        after = []
        for composer in composers:
            used = sketches if self.training.sketches == "all" else [sketches[composer.number]]
            new, size, judged = offloaded(self.steps, step, composer, used)
            after.append(new)
            sent += size
            verdicts += judged
        return after, (sketched, sent), verdicts

    def _consolidate(
        self, composers: list[ComposerState], syncer: SyncerState, done: int
    ) -> tuple[list[ComposerState], SyncerState]:
        training, steps = self.training, self.training.cadence.of_step(done).refresh
        merged, start = consolidate(
            composers,
            syncer.start,
            training.merge,
            self._copies,
            replicas=training.replicas,
            tokens=steps * self.batch * self.config.sequence_length,
            steps=steps,
        )
        return merged, replace(syncer, start=start)

    def _synchronise(
        self, composers: list[ComposerState], syncer: SyncerState, done: int
    ) -> tuple[list[ComposerState], SyncerState, tuple[tuple[Tier, int], ...]]:
        cadence = self.training.cadence
        if len(composers) == 1:
            return composers, syncer, ()
        if done <= cadence.warm_start:  # all are equal: the merges that follow start from here
            return composers, replace(syncer, start={**syncer.start, **composers[0].dense}), ()
        due = tuple(key for key in cadence.due(done) if cadence.horizon(key[0]) > 1 and key in self._names)
        for key in due:
            names, horizon = self._names[key], cadence.horizon(key[0])
            published = [self.steps.published(c.number, c.named(names), horizon) for c in composers]
            previous = {n: syncer.start[n] for n in names}
            velocity = {n: syncer.velocity.get(n, np.zeros_like(v)) for n, v in previous.items()}
            merged, speed = merge(previous, velocity, published, self.training.merge)
            composers = [replace(c, dense={**c.dense, **merged}) for c in composers]
            syncer = SyncerState({**syncer.start, **merged}, {**syncer.velocity, **speed})
        return composers, syncer, due


def consolidate(
    composers: Sequence[ComposerState],
    start: Tensors,
    rule: FragmentMergeRule,
    fragments: Mapping[tuple[Tier, int], Collection[str]],
    *,
    replicas: int,
    tokens: int,
    steps: int,
) -> tuple[list[ComposerState], dict[str, np.ndarray]]:
    """Return the composers with equal copies of every expert, and these copies by name.

    Optimizer moments stay apart, as those of tiers do.

    Args:
        composers: all that take part.
        start: of the last merge, by the names of `fragments`; other names are kept.
        rule: mean or radial-directional, per expert.
        fragments: of `expert_fragments`.
        replicas: R.
        tokens, steps: of each composer since the last merge.
    """
    after, merged_all = list(composers), dict(start)
    for (tier, shard), names in fragments.items():
        owners = holders(shard, len(composers), replicas)
        published = [PublishedParameters(n, composers[n].named(names), tokens, steps) for n in owners]
        merged, _ = merge({name: start[name] for name in names}, {}, published, rule_of(tier, rule))
        merged_all |= merged
        for number in owners:
            after[number] = after[number].with_named(merged)
    return after, merged_all


def mean_gradients(gradients: Sequence[Mapping[str, np.ndarray]], tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the token-weighted mean of the composers' gradients by name, float32: the average of H = 1."""
    if not gradients:
        raise LocalProtocolError("the mean of no gradients does not exist")
    weights = [float(count) for count in tokens]
    return {
        name: weighted_mean([np.asarray(g[name], np.float64) for g in gradients], weights).astype(np.float32)
        for name in gradients[0]
    }


def whole_arguments(dense: Tensors, layers: Sequence[Tensors], config: LatentMoeConfig) -> dict[str, np.ndarray]:
    """Return the arguments of the ordinary model's program besides tokens and targets."""
    every = np.tile(np.arange(config.n_expert, dtype=np.int32), (config.n_layer, 1))
    return {**dense, **named_experts(layers), **owned_by(every, config)}


def update_dense(steps: ComposerSteps, composer: ComposerState, step: int, gradients: Tensors) -> ComposerState:
    """Return the composer after an optimizer step of everything but the experts."""
    rate = steps.training.dense_schedule.rate(step)
    dense, moments = optimizer_step(steps.composer, composer.dense, composer.dense_moments, rate, gradients)
    return replace(composer, dense=dense, dense_moments=moments)


def update_experts(steps: ComposerSteps, composer: ComposerState, step: int, found: Tensors) -> ComposerState:
    """Return the composer after an optimizer step of the experts on own gradients (direct ownership)."""
    experts, moments, rate = [], [], steps.training.expert_schedule.rate(step)
    for layer, held in enumerate(composer.experts):
        gradients = {GRADIENT + n: found[GRADIENT + in_layer(layer, "experts", n)] for n in held}
        new = optimizer_step(steps.expert, held, composer.expert_moments[layer], rate, gradients)
        experts.append(new[0])
        moments.append(new[1])
    nothing: tuple[Tensors, ...] = tuple({} for _ in experts)
    return replace(composer, experts=tuple(experts), expert_moments=tuple(moments), residuals=nothing)


def optimizer_step(
    run: DeviceProgram, weights: Tensors, moments: Tensors, rate: float, gradients: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return weights and moments after one step of the program's optimizer at a learning rate."""
    found = run("update", {**weights, **moments, **gradients, RATE.name: np.array(rate, np.float32)})
    return {name: found[name] for name in weights}, {name: found[name] for name in moments}


def offloaded(
    steps: ComposerSteps, step: int, composer: ComposerState, sketches: Sequence[Sequence[EncodedSketch]]
) -> tuple[ComposerState, int, list[Verdict]]:
    """Return the composer after expert workers' updates, the bytes of these, and the verdicts on them.

    Args:
        steps: the transitions.
        step: whose sketches these are.
        composer: whose experts.
        sketches: of one or more composers, each of every layer.
    """
    training, held = steps.training, list[HeldExperts]()
    verdicts: list[Verdict] = []
    sent = 0
    fits = steps.workers_fit and training.cadence.refresh_due(step + 1)
    for layer in range(steps.config.n_layer):
        slots = composer.slots[layer]
        before = HeldExperts(
            composer.experts[layer],
            composer.expert_moments[layer],
            composer.residuals[layer],
            composer.fitted[layer] if steps.workers_fit else {},
        )
        improved = steps.improved(before, [s[layer] for s in sketches], step=step, slots=slots, fits=fits)
        sent += sum(one.nbytes for one in (improved.deltas or improved.weights).values())
        if training.acceptance is None:
            surrogates = improved.surrogates or before.surrogates
            held.append(HeldExperts(improved.weights, improved.moments, improved.residuals, surrogates))
            continue
        after, found = accept_slots(before, improved, training, layer=layer, owner=composer.number, slots=slots)
        held.append(after)
        verdicts += found
    after_all = replace(
        composer,
        experts=tuple(one.weights for one in held),
        expert_moments=tuple(one.moments for one in held),
        residuals=tuple(one.residuals for one in held),
        fitted=tuple(one.surrogates for one in held) if steps.workers_fit else (),
    )
    return after_all, sent, verdicts
