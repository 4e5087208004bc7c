"""A shard's state and an assembled model as payloads, and back.

Under offload a shard's experts are not in the state: expert workers improve them, and they are separate payloads.
Calibration rows are not saved: a composer resumed from a saved state gathers new ones, and keeps a surrogate as it is
until there are rows for the expert.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed, pack_arrays, unpack_arrays
from planetary.core.tensors import Tensors
from planetary.runs.mixture.methods.recent_rows import no_rows
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.payloads.payloads import payload_fields
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.participant_states import ComposerState

Key = tuple[Tier, int]


class HeldFragment(msgspec.Struct):
    """A composer's part in one fragment.

    Attributes:
        base: the version the parameters are trained from.
        since: the step after which they were exactly that version, or what they carried over on top of it.
        published: the step after which they were last published from this base; None: not yet.
        again: whether that publication may have been lost with the connection.
    """

    base: int = 0
    since: int = 0
    published: int | None = None
    again: bool = False


class _Fragment(msgspec.Struct, frozen=True):
    tier: Tier
    fragment: int
    base: int
    since: int


class _ShardFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shard: int
    step: int
    fragments: tuple[_Fragment, ...]


def shard_bytes(state: ComposerState, step: int, held: dict[Key, HeldFragment], plan: MixturePlan) -> memoryview:
    """Return a shard's state after `step` steps as a payload of kind `shard`."""
    fragments = tuple(_Fragment(*key, one.base, one.since) for key, one in held.items())
    arrays: dict[str, np.ndarray] = {"slots": state.slots}
    groups: dict[str, tuple[Tensors, ...]] = {"dense": (state.dense,), "moments": (state.dense_moments,)}
    experts = {"experts": state.experts, "expert_moments": state.expert_moments, "residuals": state.residuals}
    groups.update(plan.training.expert_optimizer.in_shard(experts))
    for group, layers in groups.items():
        for layer, tensors in enumerate(layers):
            arrays |= {f"{group}/{layer}/{name}": value for name, value in tensors.items()}
    return pack_arrays("shard", _ShardFields(state.number, step, fragments), arrays)


def shard_from(data: Packed, plan: MixturePlan) -> tuple[ComposerState, int, dict[Key, HeldFragment]]:
    """Return the state in a payload, the taken steps, and the fragments' versions.

    Under offload without the experts.

    Raises:
        RemoteProtocolError: it is no such payload, or of another model.
    """
    raw, arrays = unpack_arrays(data, "shard")
    fields = payload_fields(raw, _ShardFields, "a shard")
    layers = plan.model.n_layer
    groups: dict[str, list[dict[str, np.ndarray]]] = {
        name: [{} for _ in range(layers)] for name in ("dense", "moments", "experts", "expert_moments", "residuals")
    }
    for path, value in arrays.items():
        if path == "slots":
            continue
        group, layer, name = path.split("/", 2)
        groups[group][int(layer)][name] = value.copy()  # views of the payload would keep all of it in memory
    fit = plan.training.fit
    state = ComposerState(
        fields.shard,
        arrays["slots"].copy(),
        groups["dense"][0],
        groups["moments"][0],
        tuple(groups["experts"]),
        tuple(groups["expert_moments"]),
        tuple(no_rows(fit.capacity, plan.model.n_latent, plan.model.n_expert) for _ in range(layers)),
        tuple(groups["residuals"]),
    )
    held = {(f.tier, f.fragment): HeldFragment(f.base, f.since) for f in fields.fragments}
    return state, fields.step, held


def model_bytes(round_: int, tensors: Tensors) -> memoryview:
    """Return an assembled model as a payload of kind `model`."""
    return pack_arrays("model", round_, tensors)


def model_from(data: Packed) -> dict[str, np.ndarray]:
    """Return the tensors in a payload, or raise `RemoteProtocolError`."""
    return unpack_arrays(data, "model")[1]
