"""A composer's step, as transitions on the state: from host to host (`ComposerSteps`), and with the state on the device
(`ResidentComposer`). A lock-step training and the fabric take the same.

A composer has own experts and the surrogates of the others. Nothing here waits or depends on other composers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.step import GRADIENT, RATE
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.averaging import PublishedParameters
from planetary.runs.mixture.methods.delta import Delta, compress, expand, low_rank, rank_is_smaller
from planetary.runs.mixture.methods.recent_rows import calibration_rows, remember
from planetary.runs.mixture.methods.sketch import EncodedSketch, encode, sketch_from_gates, subsample
from planetary.runs.mixture.methods.surrogate import (
    Fitted,
    are_copies,
    expert_outputs,
    fit_surrogates,
    initial_surrogates,
)
from planetary.runs.mixture.program.signature import in_layer
from planetary.runs.mixture.training.expert_work import (
    HeldExperts,
    Improved,
    improve,
    refitted,
    returned,
)
from planetary.runs.mixture.training.participant_states import ComposerState, Surrogates, computed_weights
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runtime.device_program import DeviceProgram, ResidentTensors, signature

replace = msgspec.structs.replace


class LayerFit(msgspec.Struct, frozen=True):
    """New surrogates of one owner's experts in one layer.

    Attributes:
        layer: which.
        experts: their numbers, [E].
        a: float32 [E, L, R].
        b: float32 [E, R, L].
        errors: relative error on the calibration rows, [E]; empty for exact copies.
        nbytes: of the numbers that travel to the other composers, one message for all of them.
        changes: in place of an expert's A and B, where they are smaller: low-rank changes of those before.
    """

    layer: int
    experts: np.ndarray
    a: np.ndarray
    b: np.ndarray
    errors: np.ndarray
    nbytes: int
    changes: tuple[tuple[Delta, Delta], ...] = ()


class ComposerSteps:
    """The transitions.

    Args:
        config: the model.
        training: how it is trained.
        batch: sequences of one composer's step.
        composer: the composer's program.
        expert: the expert worker's program, whose optimizer direct ownership uses too.
        masters: whether states hold the experts' masters; False: the weights they compute with, as a composer gets them
            whose experts are improved elsewhere. They differ where these are ternary.
    """

    def __init__(
        self,
        config: LatentMoeConfig,
        training: MoeTraining,
        batch: int,
        composer: DeviceProgram,
        expert: DeviceProgram,
        *,
        masters: bool = True,
    ) -> None:
        self.config, self.training, self.batch = config, training, batch
        self._masters = masters
        self.composer, self.expert = composer, expert
        self.workers_fit = training.workers_fit(config)

    def gradients(
        self, composer: ComposerState, surrogates: Surrogates | None, tokens: np.ndarray, targets: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return loss, gradients and the experts' inputs, for this composer's sequences i32 [batch, T]."""
        batch = {"tokens": tokens, "targets": targets}
        return self.composer("gradients", {**self.arguments(composer, surrogates), **batch})

    def arguments(self, composer: ComposerState, surrogates: Surrogates | None) -> dict[str, np.ndarray]:
        """Return the arguments of the composer's program besides tokens and targets."""
        held = owned_by(composer.slots, self.config)
        if surrogates is not None:
            for layer, (a, b) in enumerate(zip(surrogates.a, surrogates.b, strict=True)):
                held[in_layer(layer, "surrogates", "a")] = a
                held[in_layer(layer, "surrogates", "b")] = b
        # A program that trains experts makes the computed weights of their masters itself.
        in_step = self.training.expert_optimizer.in_step
        experts = composer.experts if in_step else [self._computed(layer) for layer in composer.experts]
        return {**composer.dense, **named_experts(experts), **held}

    def sketch(self, step: int, composer: int, layer: int, found: Tensors) -> EncodedSketch:
        """Return the sketch of one layer of one step."""
        u, g_y, gates = (found[in_layer(layer, "seen", what)] for what in ("u", "g_y", "gates"))
        sketch = sketch_from_gates((layer, step, composer), u, g_y, gates, self.config.n_active)
        sketch = subsample(sketch, self.training.sketch_fraction, self.config.seed)
        return encode(sketch, self.training.precision, self.config.n_expert)

    def improved(
        self, before: HeldExperts, sketches: Sequence[EncodedSketch], *, step: int, slots: np.ndarray, fits: bool
    ) -> Improved:
        """Return an expert worker's update of one layer's experts i32 [slots] at a step of the run.

        `fits`: also their surrogates.

        Raises:
            TrustError: a sketch is damaged.
        """
        training = self.training
        improved = improve(
            self.expert,
            before.weights,
            before.moments,
            sketches,
            rate=training.expert_schedule.rate(step),
            slots=slots,
            experts=self.config.n_expert,
            inner_steps=training.inner_steps,
            trust=training.trust,
            proxies=training.acceptance is not None,
        )
        improved = returned(before, improved, training.update_form, training.update_keep)
        if not fits:
            return improved
        options = training.fit
        return refitted(before, improved, sketches, progress=step, slots=slots, config=self.config, options=options)

    @property
    def remembers(self) -> bool:
        """Whether composers fit surrogates, on rows of their own steps."""
        return self.training.composers > 1 and bool(self.training.rank) and not self.workers_fit

    def remember(self, composer: ComposerState, found: Tensors) -> ComposerState:
        """Return the composer with the rows of a step among those that surrogates are fitted on."""
        if not self.remembers:
            return composer
        rows = [
            remember(old, found[in_layer(i, "seen", "u")], found[in_layer(i, "seen", "gates")])
            for i, old in enumerate(composer.rows)
        ]
        return replace(composer, rows=tuple(rows))

    def fit(self, composer: ComposerState, surrogates: Surrogates, *, whole: bool = False) -> list[LayerFit]:
        """Return `fit_layer` of every layer."""
        return [self.fit_layer(composer, surrogates, layer, whole=whole) for layer in range(self.config.n_layer)]

    def fit_layer(
        self, composer: ComposerState, surrogates: Surrogates, layer: int, *, whole: bool = False
    ) -> LayerFit:
        """Return new surrogates of the experts that this composer owns in a layer, as all composers will hold them.

        Surrogates as wide as their experts are copies of these and are not fitted. With `delta_rank` what is new
        about one travels as a matrix of that rank (4.2, 4.8), with a `refresh_form` in fewer bits. The next exchange
        makes up for dropped parts, because it starts from the common copies. `whole`: not all hold these, so do
        without.
        """
        mine = np.flatnonzero(composer.slots[layer] != ownership.EMPTY)
        ids = composer.slots[layer][mine]
        weights = {n: v[mine] for n, v in self._computed(composer.experts[layer]).items()}
        old_a, old_b = surrogates.a[layer][ids], surrogates.b[layer][ids]
        if are_copies(self.training.rank, self.config):
            fitted = Fitted(*initial_surrogates(weights, self.training.rank), np.zeros(0))
        elif self.workers_fit:
            there = composer.fitted[layer]
            fitted = Fitted(there["a"][mine], there["b"][mine], there["error"][mine])
        else:
            u, rows = calibration_rows(composer.rows[layer], ids, self.training.fit.rows)
            wanted = expert_outputs(weights, u)
            fitted = fit_surrogates(u, rows, wanted, a=old_a, b=old_b, options=self.training.fit)
        rank, small = self.training.delta_rank, fitted.b.shape[1:]  # the smaller of A and B
        if whole or (self.training.refresh_form == "exact" and not (rank and rank_is_smaller(rank, *small))):
            a, b = fitted.a, fitted.b
            return LayerFit(layer, ids, a, b, fitted.error, a.nbytes + b.nbytes)
        a, sent_a = self._as_sent(old_a, fitted.a)
        b, sent_b = self._as_sent(old_b, fitted.b)
        size = sum(delta.nbytes for delta in (*sent_a, *sent_b))
        return LayerFit(layer, ids, a, b, fitted.error, size, tuple(zip(sent_a, sent_b, strict=True)))

    def published(self, number: int, tensors: Tensors, steps: int) -> PublishedParameters:
        """Return a composer's publication of a fragment, `steps` steps after the last merge."""
        tokens = steps * self.batch * self.config.sequence_length
        return PublishedParameters(number, tensors, tokens, steps)

    def _computed(self, experts: Tensors) -> Tensors:
        return computed_weights(experts, self.config) if self._masters else experts

    def _as_sent(self, held: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, list[Delta]]:
        """Return matrices [E, m, n] as those who hold `held` get them, and the messages."""
        rank, form = self.training.delta_rank, self.training.refresh_form
        pairs = list(zip(held, new, strict=True))
        if form != "exact":
            deltas = [compress(after - before, None, form)[0] for before, after in pairs]
        else:
            deltas = [low_rank(after - before, None, rank)[0] for before, after in pairs]
        return held + np.stack([expand(delta) for delta in deltas]), deltas


def install(surrogates: Surrogates, fits: Sequence[LayerFit], version: int) -> Surrogates:
    """Return the bank with new surrogates in it."""
    a, b = [x.copy() for x in surrogates.a], [x.copy() for x in surrogates.b]
    versions = surrogates.versions.copy()
    for fit in fits:
        a[fit.layer][fit.experts], b[fit.layer][fit.experts] = fit.a, fit.b
        versions[fit.layer][fit.experts] = version
    return Surrogates(tuple(a), tuple(b), versions)


def mean_error(fits: Sequence[LayerFit]) -> float:
    """Return the mean relative error of surrogates; 0 for exact copies."""
    errors = [float(error) for fit in fits for error in fit.errors]
    return float(np.mean(errors)) if errors else 0.0


def owned_by(slots: np.ndarray, config: LatentMoeConfig) -> dict[str, np.ndarray]:
    """Return the ownership matrices a program takes, for slots i32 [layers, slots]."""
    matrix = ownership.slot_matrix(slots, config.n_expert)
    return {in_layer(i, "surrogates", "ownership"): matrix[i] for i in range(config.n_layer)}


def named_experts(layers: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the experts' weights by their full names."""
    return {in_layer(i, "experts", name): value for i, layer in enumerate(layers) for name, value in layer.items()}


def mean_loss(run: DeviceProgram, tensors: Tensors, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the mean cross-entropy over batches of (tokens, targets)."""
    held, losses = ResidentTensors(run), []
    held.put(tensors)
    for tokens, targets in batches:
        found = held.call("evaluate", arrays={"tokens": tokens, "targets": targets})
        losses.append(float(held.get(["cross_entropy"])["cross_entropy"]))
        held.drop(found)
    return float(np.mean(losses))


class ResidentComposer:
    """A composer whose parameters, optimizer state, experts and surrogates stay on the device from step to step.

    The transitions are those of `ComposerSteps`. Used by one thread at a time.

    Everything a step takes besides the batch is sent when it has changed on the host, and read when the host asks for
    it. Experts are taken as they are: the masters, or under offload the computed weights.

    Args:
        steps: the same transitions from host to host.
        run: the mixture's whole program.
        state: where it starts.
    """

    def __init__(self, steps: ComposerSteps, run: DeviceProgram, state: ComposerState) -> None:
        self._steps, self._held = steps, ResidentTensors(run)
        gradients = signature(run.program, "composer_gradients")
        self._found = [s.name for s in gradients.results]
        self._rest = state  # state that is not on the device
        self._names: tuple[dict[str, str], ...] = ()
        self._layers: list[tuple[dict[str, str], dict[str, str]]] = []
        self._slots: np.ndarray | None = None
        self.replace_state(state)

    @property
    def state(self) -> ComposerState:
        """Everything, on the host."""
        dense, moments = (self._group(names) for names in self._names)
        return replace(self.without_dense, dense=dense, dense_moments=moments)

    @property
    def without_dense(self) -> ComposerState:
        """Experts and their moments on the host; of the dense parameters nothing."""
        experts = tuple(self._group(names) for names, _ in self._layers)
        moments = tuple(self._group(names) for _, names in self._layers)
        return replace(self._rest, experts=experts, expert_moments=moments)

    def replace_state(self, state: ComposerState) -> None:
        """Go on from another state. Arrays that are the ones here already are not sent again."""
        before = {path for names in self._every() for path in names.values()}
        self._names = ({n: n for n in state.dense}, {n: f"moments/{n}" for n in state.dense_moments})
        self._layers = [
            ({n: in_layer(i, "experts", n) for n in held}, {n: f"expert_moments/{i}/{n}" for n in moments})
            for i, (held, moments) in enumerate(
                zip(state.experts, state.expert_moments or ({},) * len(state.experts), strict=True)
            )
        ]
        groups = [state.dense, state.dense_moments]
        for i, held in enumerate(state.experts):
            groups += [held, state.expert_moments[i] if state.expert_moments else {}]
        every = self._every()
        self._held.drop(before - {path for names in every for path in names.values()})
        for names, group in zip(every, groups, strict=True):
            self._held.put({names[name]: value for name, value in group.items()})
        if self._slots is None or not np.array_equal(self._slots, state.slots):
            self._slots = state.slots
            self._held.put(owned_by(state.slots, self._steps.config))
        nothing = tuple({} for _ in state.experts)
        self._rest = replace(state, dense={}, dense_moments={}, experts=nothing, expert_moments=nothing)

    def named(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return tensors of a fragment on the host; see `ComposerState.named`."""
        dense = self._held.get(name for name in names if name in self._names[0])
        if len(dense) == len(names):
            return dense
        return replace(self.without_dense, dense=dense).named(names)

    def adopt(self, tensors: Tensors) -> None:
        """Take tensors of a fragment in place of those here; see `ComposerState.with_named`."""
        if all(name in self._names[0] for name in tensors):
            self._held.put(tensors)
        else:
            self.replace_state(self.state.with_named(tensors))

    def replace_experts(self, layer: int, weights: Tensors, fitted: Tensors) -> None:
        """Take one layer's experts and the surrogates that expert workers fitted to them."""
        self._layers[layer] = ({n: in_layer(layer, "experts", n) for n in weights}, self._layers[layer][1])
        self._held.put({in_layer(layer, "experts", n): value for n, value in weights.items()})
        every = list(self._rest.fitted or ({} for _ in self._layers))
        every[layer] = fitted
        self._rest = replace(self._rest, fitted=tuple(every))

    def gradients(self, bank: Surrogates | None, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Compute the gradients on a batch i32 [batch, T]; return the cross-entropy. `update` takes them."""
        self._put_bank(bank)
        self._held.call("composer_gradients", arrays={"tokens": tokens, "targets": targets})
        return float(self._held.get(["cross_entropy"])["cross_entropy"])

    def update(self, step: int, *, experts: bool) -> None:
        """Take an optimizer step of the dense parameters, and with `experts` of the own ones (direct ownership)."""
        training = self._steps.training
        rate = {RATE.name: np.array(training.dense_schedule.rate(step), np.float32)}
        self._held.call("composer_update", self._names[1], arrays=rate)
        self._held.drop(["gradient_norm"])
        if not experts:
            return
        rate = {RATE.name: np.array(training.expert_schedule.rate(step), np.float32)}
        for i, (held, moments) in enumerate(self._layers):
            gradients = {GRADIENT + n: GRADIENT + in_layer(i, "experts", n) for n in held}
            self._held.call("expert_update", {**held, **moments, **gradients}, arrays=rate)
            self._held.drop(["gradient_norm"])
        self._rest = replace(self._rest, residuals=tuple({} for _ in self._layers))

    def seen(self, layers: Iterable[int], parts: Iterable[str] = ("u", "g_y", "gates")) -> dict[str, np.ndarray]:
        """Return the inputs of layers' experts at the last `gradients`, by full name."""
        parts = tuple(parts)
        return self._held.get(in_layer(layer, "seen", part) for layer in layers for part in parts)

    def end_step(self) -> None:
        """Remember the rows that surrogates are fitted on, and free the tensors of the step."""
        if self._steps.remembers:
            rows = self.seen(range(len(self._layers)), ("u", "gates"))
            self._rest = self._steps.remember(self._rest, rows)
        self._held.drop(self._found)

    def evaluate(
        self, bank: Surrogates, tokens: np.ndarray, targets: np.ndarray, *, own: bool = True
    ) -> dict[str, np.ndarray]:
        """Return the results of `composer_evaluate`; not `own`: with surrogates in place of all experts."""
        self._put_bank(bank)
        nothing = {} if own else owned_by(self._rest.owning_nothing().slots, self._steps.config)
        batch = {"tokens": tokens, "targets": targets}
        found = self._held.call("composer_evaluate", arrays={**nothing, **batch})
        results = self._held.get(found)
        self._held.drop(found)
        return results

    def _put_bank(self, bank: Surrogates | None) -> None:
        for layer, (a, b) in enumerate(zip(bank.a, bank.b, strict=True) if bank is not None else ()):
            self._held.put({in_layer(layer, "surrogates", "a"): a, in_layer(layer, "surrogates", "b"): b})

    def _every(self) -> list[dict[str, str]]:
        return [*self._names, *(names for pair in self._layers for names in pair)]

    def _group(self, names: dict[str, str]) -> Tensors:
        found = self._held.get(names.values())
        return {name: found[path] for name, path in names.items()}
