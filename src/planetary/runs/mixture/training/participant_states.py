"""States of the participants of a training, as values: named float32 arrays and numbers, nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec
import numpy as np

from planetary.core.errors import NumericsError
from planetary.core.quantisers import ternary_codes, ternary_scales
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.recent_rows import RecentRows
from planetary.runs.mixture.program.signature import in_layer
from planetary.sync.radial import weighted_mean


class ComposerState(msgspec.Struct, frozen=True):
    """One composer.

    Attributes:
        number: which one.
        slots: experts it owns, i32 [layers, slots].
        dense: everything but the routed experts, by name.
        dense_moments: of the optimizer.
        experts: per layer, weights [slots, ...] by name; under offload a composer on the fabric has those they compute
            with, and the trainer the masters.
        expert_moments: per layer; under offload they live with the experts in the payload store, and
            a composer on the fabric has none; the trainer carries them along here.
        rows: per layer, recent inputs of the owned experts.
        residuals: per layer, dropped by expert workers' lossy updates so far, by weight; empty without.
        fitted: per layer, the experts' surrogates of the last fit by expert workers, as in `HeldExperts`; empty where
            composers fit them.
    """

    number: int
    slots: np.ndarray
    dense: Tensors
    dense_moments: Tensors
    experts: tuple[Tensors, ...]
    expert_moments: tuple[Tensors, ...]
    rows: tuple[RecentRows, ...]
    residuals: tuple[Tensors, ...] = ()
    fitted: tuple[Tensors, ...] = ()

    def owning_nothing(self) -> ComposerState:
        """Return the state of one that has surrogates in place of all experts."""
        return msgspec.structs.replace(self, slots=np.full_like(self.slots, ownership.EMPTY))

    def named(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return tensors of a fragment: parameters by their names, this composer's copies by `expert_name`.

        Raises:
            KeyError: it does not hold one of them.
        """
        held = {name: self.experts[layer][weight][slot] for name, layer, weight, slot in self._copies()}
        return {name: self.dense[name] if name in self.dense else held[name] for name in names}

    def with_named(self, tensors: Tensors) -> ComposerState:
        """Return the composer with these values in place of the composer's; other names are passed over."""
        experts = [dict(layer) for layer in self.experts]
        changed: set[tuple[int, str]] = set()
        for name, layer, weight, slot in self._copies():
            if name not in tensors:
                continue
            if (layer, weight) not in changed:
                changed.add((layer, weight))
                experts[layer][weight] = experts[layer][weight].copy()
            experts[layer][weight][slot] = tensors[name]
        dense = {name: tensors.get(name, value) for name, value in self.dense.items()}
        return msgspec.structs.replace(self, dense=dense, experts=tuple(experts))

    def _copies(self) -> Iterator[tuple[str, int, str, int]]:
        """Name, layer, weight and slot of every tensor of the experts."""
        for layer, weights in enumerate(self.experts):
            for slot, expert in enumerate(self.slots[layer]):
                if expert != ownership.EMPTY:
                    yield from ((expert_name(layer, weight, int(expert)), layer, weight, slot) for weight in weights)


def expert_name(layer: int, weight: str, expert: int) -> str:
    """Return the name of one expert's weight in a fragment, such as `layers.2.experts.up.7`."""
    return f"{in_layer(layer, 'experts', weight)}.{expert}"


class Surrogates(msgspec.Struct, frozen=True):
    """All experts' surrogates as the composers hold them: per layer a [E, L, R] and b [E, R, L], and versions."""

    a: tuple[np.ndarray, ...]
    b: tuple[np.ndarray, ...]
    versions: np.ndarray  # i64 [layers, experts]: steps done when each was fitted

    def of(self, layer: int, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one expert's, A [L, R] and B [R, L]."""
        return self.a[layer][expert], self.b[layer][expert]


class SyncerState(msgspec.Struct, frozen=True):
    """The syncer: what each tier's tensors, and experts with several owners, were at their last merge; and the outer
    velocities.
    """

    start: Tensors
    velocity: Tensors


class TrainingState(msgspec.Struct, frozen=True):
    """All participants between two steps."""

    steps: int
    composers: tuple[ComposerState, ...]
    surrogates: Surrogates | None
    syncer: SyncerState


def computed_weights(weights: Mapping[str, np.ndarray], config: LatentMoeConfig) -> dict[str, np.ndarray]:
    """Return the weights that experts compute with: ternary where the model is."""
    return {name: ternary(value) if config.ternary else value for name, value in weights.items()}


def assembled(
    state: TrainingState, config: LatentMoeConfig
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Return the whole model: the mean of the composers' dense parameters, and per layer all real experts.

    Of an expert with several owners it is the mean of their copies; they are equal after every merge of them.
    """
    equal = [1.0] * len(state.composers)
    dense = {
        name: weighted_mean([c.dense[name] for c in state.composers], equal).astype(np.float32)
        for name in state.composers[0].dense
    }
    layers = []
    for layer in range(config.n_layer):
        found: dict[str, np.ndarray] = {}
        copies = np.bincount(
            np.concatenate([c.slots[layer] for c in state.composers]) + 1, minlength=config.n_expert + 1
        )
        for name, value in state.composers[0].experts[layer].items():
            whole = np.full((1, config.n_expert, *value.shape[1:]), -0.0)  # -0.0: a single copy keeps all bits
            for composer in state.composers:
                slots = composer.slots[layer : layer + 1]
                added = ownership.take_slots(whole, slots) + composer.experts[layer][name][None]
                whole = ownership.put_slots(whole, slots, added)
            found[name] = (whole[0] / copies[1:].reshape(-1, 1, 1)).astype(np.float32)
        layers.append(found)
    return dense, layers


def merged_model(state: TrainingState, config: LatentMoeConfig) -> dict[str, np.ndarray]:
    """Return the ordinary model with all real experts, named as `models.latent_moe.build` names parameters.

    Written with `artifacts.safetensors_file`, `model.weights` of a configuration takes it.
    """
    dense, layers = assembled(state, config)
    experts = {in_layer(i, "experts", name): v for i, layer in enumerate(layers) for name, v in layer.items()}
    return {**dense, **experts}


_FLOOR = np.float32(1e-8)  # least γ: an all-zero matrix stays zero


def ternary(weights: np.ndarray) -> np.ndarray:
    """Return γ · clip(round(W / γ), −1, 1), γ = mean |W|, f32, for float matrices W [..., m, n]; ties round to even.

    Ternary expert weights (BitNet b1.58: Ma et al. 2024, arXiv:2402.17764). Training keeps the float masters and passes
    the gradient straight through (`models/latent_experts.py`), as do saved states and checkpoints. Experts a composer
    gets from expert workers, and an exported model, have two bits a weight (`payloads/expert_payloads.py`,
    `results/merged_export.py`, `artifacts/ternary_matrices.py`).

    A compiled program adds up γ in another order and may differ from this in the last bit.

    Raises:
        NumericsError: a weight is NaN or infinite.
    """
    wide = np.asarray(weights, np.float32)
    if not np.isfinite(wide).all():
        raise NumericsError("cannot make expert weights ternary: they contain NaN or infinite numbers")
    scale = ternary_scales(wide, _FLOOR)
    return ternary_codes(wide, scale) * scale[..., None, None]
