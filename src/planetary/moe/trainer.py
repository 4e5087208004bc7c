"""Composers, syncer, surrogate refresh and expert workers in lock step in one process, without a network.

Every participant is a pure transition on values of `states.py`; this is the schedule in which each step waits for
everything. It is what a networked run at the same schedule must equal, and what `bench/parallax.py` measures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.errors import NumericsError, UserError
from planetary.core.tensors import Tensors
from planetary.models.latent_moe import LatentMoeConfig
from planetary.moe import ownership
from planetary.moe.acceptance import Verdict
from planetary.moe.averaging import Published, mean_gradients, merge
from planetary.moe.execution import Runner, composer_runner, expert_runner
from planetary.moe.expert_work import accept_slots, improve, optimizer_step, returned
from planetary.moe.programs import GRADIENT, ComposerShape, dense_specs, in_layer
from planetary.moe.recent_rows import calibration_rows, remember
from planetary.moe.settings import MoeTraining
from planetary.moe.sketch import EncodedSketch, encode, sketch_from_gates, subsample
from planetary.moe.states import (
    ComposerState,
    Surrogates,
    SyncerState,
    TrainingState,
    assembled,
    computed_weights,
    initial_training,
)
from planetary.moe.surrogate import fit_surrogates, initial_surrogates, relu2
from planetary.moe.tiers import Tier, fragments_by_bytes, names_of, tier_of

replace = msgspec.structs.replace


class StepReport(msgspec.Struct, frozen=True):
    """What one step of all composers reports.

    Attributes:
        cross_entropy: mean over the composers, before the update.
        sketch_bytes: of all sketches that were made.
        update_bytes: of the updates that expert workers returned.
        surrogate_error: mean relative error on the calibration rows, of a refresh in this step; NaN without one.
        verdicts: on expert workers' updates.
        merged: tiers and fragments that were merged after the step.
    """

    cross_entropy: float
    sketch_bytes: int
    update_bytes: int
    surrogate_error: float
    verdicts: tuple[Verdict, ...]
    merged: tuple[tuple[Tier, int], ...]


class MoeTrainer:
    """Compiles the programs of one training and moves its state from step to step.

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
        slots = ownership.shard_size(self.owners)
        rank = training.rank if training.composers > 1 else 0
        kind = ComposerShape(slots, rank, self.batch, training.detach, train_experts=training.sketches == "none")
        self.composer: Runner = composer_runner(config, kind, training.dense, optimise)
        tokens = self.batch * config.sequence_length
        self.expert: Runner = expert_runner(config, slots, tokens, training.experts, optimise)
        self._optimise = optimise
        specs = dense_specs(config)
        self._names = {
            (Tier.ROUTER, 0): names_of(specs, Tier.ROUTER),
            (Tier.LATENT, 0): names_of(specs, Tier.LATENT),
        }
        backbone = [spec for spec in specs if tier_of(spec.name) is Tier.BACKBONE]
        for i, names in enumerate(fragments_by_bytes(backbone, training.cadence.backbone_fragments)):
            self._names[Tier.BACKBONE, i] = names

    def initial(self) -> TrainingState:
        """Return the state before the first step."""
        return initial_training(self.config, self.training, self.owners, self.composer.program, self.expert.program)

    def step(self, state: TrainingState, tokens: np.ndarray, targets: np.ndarray) -> tuple[TrainingState, StepReport]:
        """Return the state after one step of every composer, and what it reports.

        Args:
            state: left as it was.
            tokens: i32 [batch_size, T]; composer c gets the c-th part of the rows.
            targets: like `tokens`.

        Raises:
            NumericsError: a loss is not finite.
        """
        parts = [slice(c.number * self.batch, (c.number + 1) * self.batch) for c in state.composers]
        found = [
            self.composer("gradients", self._arguments(c, state.surrogates, tokens[part], targets[part]))
            for c, part in zip(state.composers, parts, strict=True)
        ]
        losses = [float(f["cross_entropy"]) for f in found]
        if not np.isfinite(losses).all():
            raise NumericsError(f"step {state.steps}: the losses of the composers are {losses}")
        composers = self._update_dense(state, found)
        composers, sizes, verdicts = self._update_experts(state.steps, composers, found)
        composers = [self._remember(c, f) for c, f in zip(composers, found, strict=True)]
        done = state.steps + 1
        surrogates, error = state.surrogates, float("nan")
        if surrogates is not None and self.training.cadence.refresh_due(done):
            surrogates, error = self.refresh(composers, surrogates, done)
        composers, syncer, merged = self._synchronise(composers, state.syncer, done)
        after = TrainingState(done, tuple(composers), surrogates, syncer)
        return after, StepReport(float(np.mean(losses)), *sizes, error, tuple(verdicts), merged)

    def evaluate(self, state: TrainingState, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """Return the mean cross-entropy of the assembled model: mean dense parameters, all real experts."""
        dense, layers = assembled(state, self.config)
        every = np.tile(np.arange(self.config.n_expert, dtype=np.int32), (self.config.n_layer, 1))
        tensors = {**dense, **_named_experts(layers), **self._ownership(every)}
        return _mean_loss(self._whole, tensors, batches)

    def evaluate_composer(
        self, state: TrainingState, number: int, batches: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> float:
        """Return the mean cross-entropy as one composer sees the model: its own experts, surrogates for the others."""
        composer = state.composers[number]
        empty = np.zeros((0, 0), np.int32)
        return _mean_loss(self.composer, self._arguments(composer, state.surrogates, empty, empty), batches)

    def evaluate_surrogates(self, state: TrainingState, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """Return the mean cross-entropy with surrogates in place of all experts, on the first composer's other state.

        Raises:
            UserError: this training has no surrogates.
        """
        if state.surrogates is None:
            raise UserError("there are no surrogates to evaluate: the training has one composer, or rank 0")
        first = state.composers[0]
        nothing = replace(first, slots=np.full_like(first.slots, ownership.EMPTY))
        empty = np.zeros((0, 0), np.int32)
        return _mean_loss(self.composer, self._arguments(nothing, state.surrogates, empty, empty), batches)

    def refresh(
        self, composers: Sequence[ComposerState], surrogates: Surrogates, done: int
    ) -> tuple[Surrogates, float]:
        """Return the bank after every owner has fitted its experts' surrogates, and their mean relative error.

        Surrogates as wide as their relu² experts are exact copies and are not fitted.
        """
        a, b = [x.copy() for x in surrogates.a], [x.copy() for x in surrogates.b]
        versions = surrogates.versions.copy()
        errors: list[float] = []
        exact = self.training.rank >= self.config.n_hidden and self.config.activation == "relu2"
        for composer in composers:
            for layer, slots in enumerate(composer.slots):
                mine = np.flatnonzero(slots != ownership.EMPTY)
                ids = slots[mine]
                weights = {n: v[mine] for n, v in computed_weights(composer.experts[layer], self.config).items()}
                if exact:
                    a[layer][ids], b[layer][ids] = initial_surrogates(
                        weights["up"], weights["down"], self.training.rank
                    )
                else:
                    u, rows = calibration_rows(composer.rows[layer], ids, self.training.fit.rows)
                    fitted = fit_surrogates(
                        u,
                        rows,
                        _outputs(weights, u),
                        a=a[layer][ids],
                        b=b[layer][ids],
                        options=self.training.fit,
                    )
                    a[layer][ids], b[layer][ids] = fitted.a, fitted.b
                    errors += [float(e) for e in fitted.error]
                versions[layer][ids] = done
        return Surrogates(tuple(a), tuple(b), versions), float(np.mean(errors)) if errors else 0.0

    # --- details --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _whole(self) -> Runner:
        """The ordinary model, with all experts in slots: built when it is first evaluated."""
        if self.training.composers == 1:
            return self.composer
        whole = ComposerShape(self.config.n_expert, 0, self.batch)
        return composer_runner(self.config, whole, self.training.dense, self._optimise)

    def _arguments(
        self, composer: ComposerState, surrogates: Surrogates | None, tokens: np.ndarray, targets: np.ndarray
    ) -> dict[str, np.ndarray]:
        held = self._ownership(composer.slots)
        if surrogates is not None:
            for layer, (a, b) in enumerate(zip(surrogates.a, surrogates.b, strict=True)):
                held[in_layer(layer, "surrogates", "a")] = a
                held[in_layer(layer, "surrogates", "b")] = b
        return {
            **composer.dense,
            **_named_experts(composer.experts),
            **held,
            "tokens": tokens,
            "targets": targets,
        }

    def _ownership(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        matrix = ownership.slot_matrix(slots, self.config.n_expert)
        return {in_layer(i, "surrogates", "ownership"): matrix[i] for i in range(self.config.n_layer)}

    def _update_dense(self, state: TrainingState, found: Sequence[Tensors]) -> list[ComposerState]:
        """Everyone takes an optimizer step; tiers with a horizon of 1 take it on the mean gradient."""
        cadence = self.training.cadence
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
            dense, moments = optimizer_step(
                self.composer, composer.dense, composer.dense_moments, state.steps, {**gradients, **mean}
            )
            composers.append(replace(composer, dense=dense, dense_moments=moments))
        return composers

    def _update_experts(
        self, step: int, composers: Sequence[ComposerState], found: Sequence[Tensors]
    ) -> tuple[list[ComposerState], tuple[int, int], list[Verdict]]:
        source = self.training.sketches
        sketches = [] if source == "none" else [self._sketches(step, c, f) for c, f in enumerate(found)]
        sketched, sent = sum(sketch.nbytes for layers in sketches for sketch in layers), 0
        verdicts: list[Verdict] = []
        after = []
        for composer in composers:
            experts, moments, residuals = [], [], []
            for layer in range(self.config.n_layer):
                before = composer.experts[layer], composer.expert_moments[layer]
                if source == "none":
                    gradients = {
                        GRADIENT + n: found[composer.number][GRADIENT + in_layer(layer, "experts", n)]
                        for n in before[0]
                    }
                    new = (*optimizer_step(self.expert, *before, step, gradients), {}, 0)
                else:
                    used = sketches if source == "all" else [sketches[composer.number]]
                    new = self._offloaded(step, composer, layer, [s[layer] for s in used], verdicts)
                experts.append(new[0])
                moments.append(new[1])
                residuals.append(new[2])
                sent += new[3]
            after.append(
                replace(composer, experts=tuple(experts), expert_moments=tuple(moments), residuals=tuple(residuals))
            )
        return after, (sketched, sent), verdicts

    def _offloaded(
        self,
        step: int,
        composer: ComposerState,
        layer: int,
        sketches: Sequence[EncodedSketch],
        verdicts: list[Verdict],
    ) -> tuple[Tensors, Tensors, Tensors, int]:
        training, slots = self.training, composer.slots[layer]
        before = composer.experts[layer], composer.expert_moments[layer]
        improved = improve(
            self.expert,
            *before,
            sketches,
            step=step,
            slots=slots,
            experts=self.config.n_expert,
            inner_steps=training.inner_steps,
            trust=training.trust,
            proxies=training.acceptance is not None,
        )
        improved, residuals, size = returned(
            before[0], improved, composer.residuals[layer], training.update_form, training.update_keep
        )
        if training.acceptance is None:
            return improved.weights, improved.moments, residuals, size
        weights, moments, found = accept_slots(
            before, improved, training.acceptance, layer=layer, owner=composer.number, slots=slots
        )
        verdicts += found
        return weights, moments, residuals, size

    def _sketches(self, step: int, composer: int, found: Tensors) -> list[EncodedSketch]:
        made = []
        for layer in range(self.config.n_layer):
            u, g_y, gates = (found[in_layer(layer, "seen", what)] for what in ("u", "g_y", "gates"))
            sketch = sketch_from_gates((layer, step, composer), u, g_y, gates, self.config.n_active)
            sketch = subsample(sketch, self.training.sketch_fraction, self.config.seed)
            made.append(encode(sketch, self.training.precision, self.config.n_expert))
        return made

    def _remember(self, composer: ComposerState, found: Tensors) -> ComposerState:
        if self.training.composers == 1 or not self.training.rank:
            return composer
        rows = [
            remember(old, found[in_layer(i, "seen", "u")], found[in_layer(i, "seen", "gates")])
            for i, old in enumerate(composer.rows)
        ]
        return replace(composer, rows=tuple(rows))

    def _synchronise(
        self, composers: list[ComposerState], syncer: SyncerState, done: int
    ) -> tuple[list[ComposerState], SyncerState, tuple[tuple[Tier, int], ...]]:
        cadence = self.training.cadence
        due = tuple(key for key in cadence.due(done) if cadence.horizon(key[0]) > 1 and key in self._names)
        if len(composers) == 1:
            return composers, syncer, ()
        for key in due:
            names, horizon = self._names[key], cadence.horizon(key[0])
            tokens = horizon * self.batch * self.config.sequence_length
            published = [Published(c.number, {n: c.dense[n] for n in names}, tokens, horizon) for c in composers]
            previous = {n: syncer.start[n] for n in names}
            velocity = {n: syncer.velocity.get(n, np.zeros_like(v)) for n, v in previous.items()}
            merged, speed = merge(previous, velocity, published, self.training.merge)
            composers = [replace(c, dense={**c.dense, **merged}) for c in composers]
            syncer = SyncerState({**syncer.start, **merged}, {**syncer.velocity, **speed})
        return composers, syncer, due


def _named_experts(layers: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {in_layer(i, "experts", name): value for i, layer in enumerate(layers) for name, value in layer.items()}


def _outputs(weights: Mapping[str, np.ndarray], u: np.ndarray) -> np.ndarray:
    """Outputs [E, n, L] of real experts for u [E, n, L]."""
    up = u @ weights["up"]
    if "gate" not in weights:
        return relu2(up) @ weights["down"]
    gate = u @ weights["gate"]
    return (gate / (1 + np.exp(-gate)) * up) @ weights["down"]


def _mean_loss(run: Runner, tensors: Tensors, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    losses = [run("evaluate", {**tensors, "tokens": x, "targets": y})["cross_entropy"] for x, y in batches]
    return float(np.mean([float(loss) for loss in losses]))
