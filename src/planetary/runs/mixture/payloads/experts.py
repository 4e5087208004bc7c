"""Payloads of experts under offload, as bytes and back: work, results, and the composers' experts.

Expert workers get weights, moments and residuals. Composers get the weights that experts compute with, ternary ones in
two bits, or what has changed of them in the form the run's updates have. Moments and residuals always travel exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed, pack_arrays, unpack_arrays
from planetary.artifacts.ternary_matrices import expanded, pack_ternary, ternary_tensors
from planetary.core import decoding
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.methods.delta import Delta, expand
from planetary.runs.mixture.methods.sketch import EncodedSketch
from planetary.runs.mixture.payloads.payloads import sketch_from
from planetary.runs.mixture.training.expert_work import HeldExperts, Improved
from planetary.runs.mixture.training.participant_states import computed_weights

HELD = ("weights", "moments", "residuals", "surrogates")


def experts_bytes(held: HeldExperts) -> memoryview:
    """Return one shard's experts of one layer as a payload of kind `experts`."""
    return pack_arrays("experts", None, _named(**{group: getattr(held, group) for group in HELD}))


def experts_from(data: Packed) -> HeldExperts:
    """Return the experts, or raise `RemoteProtocolError`."""
    found = _parted(unpack_arrays(data, "experts")[1], HELD)
    return HeldExperts(*(found[group] for group in HELD))


def weights_bytes(held: HeldExperts, config: LatentMoeConfig) -> memoryview:
    """Return experts as a composer gets them: the weights they compute with, ternary ones in two bits, and where
    workers fit them, their surrogates.
    """
    weights: Tensors = held.weights
    if config.ternary:
        computed = computed_weights(weights, config)
        weights = {
            n: part for name, v in computed.items() for n, part in ternary_tensors(name, pack_ternary(v)).items()
        }
    return pack_arrays("weights", None, _named(weights=weights, surrogates=held.surrogates))


def weights_from(data: Packed) -> tuple[Tensors, Tensors]:
    """Return weights and surrogates.

    Raises:
        RemoteProtocolError: it is no such payload.
        TrustError: ternary weights in it are damaged.
    """
    found = _parted(unpack_arrays(data, "weights")[1], ("weights", "surrogates"))
    return expanded(found["weights"])[0], found["surrogates"]


def work_bytes(experts: Packed, sketches: Sequence[Packed]) -> memoryview:
    """Return an expert worker's input for one piece of work: the experts, and sketches in the composers' order."""
    arrays = {"experts": np.frombuffer(experts, np.uint8)}
    arrays |= {f"sketch/{i}": np.frombuffer(sketch, np.uint8) for i, sketch in enumerate(sketches)}
    return pack_arrays("work", len(sketches), arrays)


def work_from(data: Packed) -> tuple[HeldExperts, list[EncodedSketch]]:
    """Return experts and sketches, or raise `RemoteProtocolError`."""
    raw, arrays = unpack_arrays(data, "work")
    try:
        count = decoding.from_json(raw, int)
        sketches = [sketch_from(arrays[f"sketch/{i}"].data) for i in range(count)]
        return experts_from(arrays["experts"].data), sketches
    except (msgspec.DecodeError, KeyError) as error:
        raise RemoteProtocolError(f"a payload of kind work lacks a part: {error}") from None


def improved_bytes(improved: Improved) -> memoryview:
    """Return the result of a piece of work: weights where they are exact, else their changes."""
    fields, arrays = _delta_parts(improved.deltas)
    arrays |= _named(
        weights={} if improved.deltas else improved.weights,
        moments=improved.moments,
        residuals=improved.residuals,
        surrogates=improved.surrogates,
    )
    arrays |= {"proxy_before": improved.proxy_before, "proxy_after": improved.proxy_after}
    return pack_arrays("improved", fields, arrays)


def improved_from(data: Packed, before: HeldExperts) -> Improved:
    """Return the result of work on `before`, or raise `RemoteProtocolError`."""
    raw, arrays = unpack_arrays(data, "improved")
    try:
        proxies = arrays.pop("proxy_before"), arrays.pop("proxy_after")
    except KeyError as error:
        raise RemoteProtocolError(f"a result of expert work lacks its {error}") from None
    found = _parted(arrays, (*HELD, "delta"))
    deltas = _deltas(raw, found["delta"])
    weights = found["weights"] or added(before.weights, deltas)
    return Improved(weights, found["moments"], *proxies, found["residuals"], deltas, found["surrogates"])


def change_bytes(deltas: Mapping[str, Delta], accepted: np.ndarray, surrogates: Tensors) -> memoryview:
    """Return the changes of experts, of those in bool [slots], as a payload of kind `change`.

    `surrogates`: where new ones were fitted, all of them.
    """
    fields, arrays = _delta_parts(deltas)
    arrays |= _named(surrogates=surrogates)
    return pack_arrays("change", fields, {**arrays, "accepted": accepted.astype(np.uint8)})


def changed_from(data: Packed, before: Tensors) -> tuple[Tensors, Tensors]:
    """Return the weights a change makes of `before`, and surrogates, or raise `RemoteProtocolError`."""
    raw, arrays = unpack_arrays(data, "change")
    accepted = arrays.pop("accepted", np.zeros(0, np.uint8)).astype(bool)
    found = _parted(arrays, ("delta", "surrogates"))
    after = added(before, _deltas(raw, found["delta"]))
    for name, value in before.items():
        if accepted.shape != value.shape[:1] or after.get(name, np.zeros(0)).shape != value.shape:
            raise RemoteProtocolError(f"a change of experts does not fit their {name} {list(value.shape)}")
        after[name][~accepted] = value[~accepted]
    return after, found["surrogates"]


def added(weights: Tensors, deltas: Mapping[str, Delta]) -> dict[str, np.ndarray]:
    """Return weights with their deltas: the same bits wherever it is done. Raises `ProtocolError`."""
    for name, delta in deltas.items():  # before an array is made of a shape, which may be anything
        if name not in weights or delta.shape != weights[name].shape:
            raise RemoteProtocolError(f"an update of experts has other tensors than they: {name} {list(delta.shape)}")
    return {name: weights[name] + expand(delta) for name, delta in deltas.items()}


class _DeltaFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    form: str
    shape: tuple[int, ...]
    parts: int


def _delta_parts(deltas: Mapping[str, Delta]) -> tuple[dict[str, _DeltaFields], dict[str, np.ndarray]]:
    fields = {name: _DeltaFields(d.form, d.shape, len(d.parts)) for name, d in deltas.items()}
    return fields, {f"delta/{name}/{i}": part for name, d in deltas.items() for i, part in enumerate(d.parts)}


def _deltas(raw: msgspec.Raw, parts: Tensors) -> dict[str, Delta]:
    try:
        fields = decoding.from_json(raw, dict[str, _DeltaFields])
        return {
            name: Delta(f.form, f.shape, tuple(parts[f"{name}/{i}"] for i in range(f.parts)))
            for name, f in fields.items()
        }
    except (msgspec.DecodeError, KeyError) as error:
        raise RemoteProtocolError(f"an update of experts lacks a part: {error}") from None


def _named(**groups: Tensors) -> dict[str, np.ndarray]:
    return {f"{group}/{name}": value for group, tensors in groups.items() for name, value in tensors.items()}


def _parted(arrays: Mapping[str, np.ndarray], groups: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {group: {} for group in groups}
    for path, value in arrays.items():
        group, _, name = path.partition("/")
        if group not in found or not name:
            raise RemoteProtocolError(f"expected {', '.join(groups)} of experts, found {path!r}")
        found[group][name] = value.copy()  # aligned, and without the rest of the payload in memory
    return found
