"""What the participants of a training hold, as values: named float32 arrays and numbers, nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from planetary.core.tensors import Tensors
from planetary.models.initial import Params, draw
from planetary.models.latent_moe import LatentMoeConfig, dense_parameters, expert_parameters
from planetary.moe import ownership
from planetary.moe.averaging import weighted_mean
from planetary.moe.execution import state_specs, zeros_for
from planetary.moe.programs import Program, flat_names, in_layer
from planetary.moe.recent_rows import RecentRows, no_rows
from planetary.moe.settings import MoeTraining
from planetary.moe.surrogate import initial_surrogates
from planetary.moe.ternary import ternary


class ComposerState(msgspec.Struct, frozen=True):
    """One composer.

    Attributes:
        number: which one.
        slots: experts that it owns, i32 [layers, slots].
        dense: everything but the routed experts, by name.
        dense_moments: of its optimizer.
        experts: per layer, weights [slots, ...] by name.
        expert_moments: per layer; under offload they live with the expert worker and are carried along here.
        rows: per layer, what the owned experts saw lately.
        residuals: per layer, what expert workers' lossy updates have dropped so far, by weight; empty without.
    """

    number: int
    slots: np.ndarray
    dense: Tensors
    dense_moments: Tensors
    experts: tuple[Tensors, ...]
    expert_moments: tuple[Tensors, ...]
    rows: tuple[RecentRows, ...]
    residuals: tuple[Tensors, ...] = ()


class Surrogates(msgspec.Struct, frozen=True):
    """All experts' surrogates as the composers hold them: per layer a [E, L, R] and b [E, R, L], and versions."""

    a: tuple[np.ndarray, ...]
    b: tuple[np.ndarray, ...]
    versions: np.ndarray  # i64 [layers, experts]: steps done when each was fitted


class SyncerState(msgspec.Struct, frozen=True):
    """The syncer: what each tier's tensors were at their last merge, and the outer velocities."""

    start: Tensors
    velocity: Tensors


class TrainingState(msgspec.Struct, frozen=True):
    """All participants between two steps."""

    steps: int
    composers: tuple[ComposerState, ...]
    surrogates: Surrogates | None
    syncer: SyncerState


def computed_weights(weights: Mapping[str, np.ndarray], config: LatentMoeConfig) -> dict[str, np.ndarray]:
    """Return the weights that experts compute with: ternary where the model says so."""
    return {name: ternary(value) if config.ternary else value for name, value in weights.items()}


def initial_training(
    config: LatentMoeConfig, training: MoeTraining, owners: np.ndarray, composer: Program, expert: Program
) -> TrainingState:
    """Return the state before the first step: the model drawn from its seed, the same for any number of composers."""
    dense = flat_names(draw(dense_parameters(config), config.seed))
    whole = [_layer_experts(config, layer) for layer in range(config.n_layer)]
    width = ownership.shard_size(owners)
    composers = []
    for number in range(training.composers):
        slots = ownership.owned_slots(owners, number, width)
        experts = tuple(
            {name: ownership.take_slots(value[None], slots[i : i + 1])[0] for name, value in whole[i].items()}
            for i in range(config.n_layer)
        )
        composers.append(
            ComposerState(
                number,
                slots,
                dense,
                zeros_for(state_specs(composer)),
                experts,
                tuple(zeros_for(state_specs(expert)) for _ in whole),
                tuple(no_rows(training.fit.capacity, config.n_latent, config.n_expert) for _ in whole),
                tuple({} for _ in whole),
            )
        )
    surrogates = None
    if training.rank and training.composers > 1:
        computed = [computed_weights(w, config) for w in whole]
        pairs = [initial_surrogates(w["up"], w["down"], training.rank) for w in computed]
        surrogates = Surrogates(
            tuple(a for a, _ in pairs), tuple(b for _, b in pairs), np.zeros(owners.shape, np.int64)
        )
    return TrainingState(0, tuple(composers), surrogates, SyncerState(dense, {}))


def assembled(
    state: TrainingState, config: LatentMoeConfig
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Return the whole model: the mean of the composers' dense parameters, and per layer all real experts."""
    equal = [1.0] * len(state.composers)
    dense = {
        name: weighted_mean([c.dense[name] for c in state.composers], equal).astype(np.float32)
        for name in state.composers[0].dense
    }
    layers = []
    for layer in range(config.n_layer):
        found: dict[str, np.ndarray] = {}
        for name, value in state.composers[0].experts[layer].items():
            whole = np.zeros((1, config.n_expert, *value.shape[1:]), np.float32)
            for composer in state.composers:
                slots = composer.slots[layer : layer + 1]
                whole = ownership.put_slots(whole, slots, composer.experts[layer][name][None])
            found[name] = whole[0]
        layers.append(found)
    return dense, layers


def merged_model(state: TrainingState, config: LatentMoeConfig) -> dict[str, np.ndarray]:
    """Return the ordinary model with all real experts, named as `models.latent_moe.build` names its parameters.

    Written with `artifacts.safetensors_file`, it is what `model.weights` of a configuration takes.
    """
    dense, layers = assembled(state, config)
    experts = {in_layer(i, "experts", name): v for i, layer in enumerate(layers) for name, v in layer.items()}
    return {**dense, **experts}


def _layer_experts(config: LatentMoeConfig, layer: int) -> Params:
    # Each layer draws from its own name, as `models.latent_moe.build` does.
    tree = draw({"layers": {str(layer): {"experts": expert_parameters(config, config.n_expert)}}}, config.seed)
    return tree["layers"][str(layer)]["experts"]
