"""A shard's surrogates as payloads, whole or as changes of others, and back.

Both forms have of every expert layer, owner, version and the checksum of the whole surrogate: who puts a change and
what it changes together has the owner's bits or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed, pack_arrays, unpack_arrays
from planetary.core.errors import RemoteProtocolError
from planetary.runs.mixture.methods.delta import Delta, expand
from planetary.runs.mixture.methods.surrogate import SurrogateMessage, newer_surrogate, surrogate_message
from planetary.runs.mixture.payloads.payloads import payload_fields
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.composer import LayerFit
from planetary.runs.mixture.training.participant_states import Surrogates
from planetary.runs.mixture.training.settings import MoeTraining


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer: int
    expert: int
    owner: int
    version: int
    checksum: str


_MANY = tuple[_Fields, ...]

Held = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""Surrogates that are there: A and B by layer and expert, or `KeyError` or `IndexError` where there is none."""


def messages_of(fits: Sequence[LayerFit], shard: int, step: int) -> list[SurrogateMessage]:
    """Return a shard's surrogates, fitted after `step` steps, one message an expert."""
    return [
        surrogate_message(fit.layer, int(expert), owner=shard, version=step, a=fit.a[i], b=fit.b[i])
        for fit in fits
        for i, expert in enumerate(fit.experts)
    ]


def surrogates_bytes(messages: Sequence[SurrogateMessage]) -> memoryview:
    """Return surrogates, usually all of one owner, as a payload of kind `surrogate`."""
    arrays = {f"{i}.{name}": array for i, m in enumerate(messages) for name, array in (("a", m.a), ("b", m.b))}
    return pack_arrays("surrogates", _fields_of(messages), arrays)


def surrogates_from(data: Packed) -> list[SurrogateMessage]:
    """Return the surrogates in a payload, or raise `RemoteProtocolError`."""
    raw, arrays = unpack_arrays(data, "surrogates")
    fields = payload_fields(raw, _MANY, "surrogates")
    try:
        return [
            SurrogateMessage(f.layer, f.expert, f.owner, f.version, arrays[f"{i}.a"], arrays[f"{i}.b"], f.checksum)
            for i, f in enumerate(fields)
        ]
    except KeyError as error:
        raise RemoteProtocolError(f"surrogates lack their array {error}") from None


def change_bytes(messages: Sequence[SurrogateMessage], fits: Sequence[LayerFit]) -> memoryview:
    """Return the changes that `fits` make to the surrogates before, as a payload of kind `refresh`; `messages`: the
    result.
    """
    changes = [pair for fit in fits for pair in fit.changes]
    arrays = {
        f"{i}.{name}.{number}": part
        for i, pair in enumerate(changes)
        for name, delta in zip("ab", pair, strict=True)
        for number, part in enumerate(delta.parts)
    }
    return pack_arrays("refresh", _fields_of(messages), arrays)


def changed_surrogates(data: Packed, held: Held, training: MoeTraining) -> list[SurrogateMessage]:
    """Return the surrogates a payload of kind `refresh` makes of those that are held.

    Their checksums are checked where they are used; they fail where what is held is not what was changed.

    Raises:
        ProtocolError: it is no such payload, or of another model or form.
    """
    form = "rank" if training.delta_rank else training.refresh_form
    parts = 1 if form == "bf16" else 2
    raw, arrays = unpack_arrays(data, "refresh")
    fields = payload_fields(raw, _MANY, "changes of surrogates")

    def after(name: str, before: np.ndarray) -> np.ndarray:
        found = tuple(arrays[f"{name}.{number}"] for number in range(parts))
        return before + expand(Delta(form, before.shape, found))

    def changed(i: int, f: _Fields) -> SurrogateMessage:
        a, b = held(f.layer, f.expert)
        a, b = after(f"{i}.a", a), after(f"{i}.b", b)
        return SurrogateMessage(f.layer, f.expert, f.owner, f.version, a, b, f.checksum)

    try:
        return [changed(i, f) for i, f in enumerate(fields)]
    except (KeyError, IndexError) as error:
        raise RemoteProtocolError(f"changes of surrogates lack {error}, or are of another model") from None


def empty_bank(plan: MixturePlan) -> Surrogates:
    """Return a bank without any surrogate yet."""
    model, rank = plan.model, plan.training.rank
    shape = (model.n_expert, model.n_latent, model.read * rank)
    back = (model.n_expert, rank, model.n_latent)
    return Surrogates(
        tuple(np.zeros(shape, np.float32) for _ in range(model.n_layer)),
        tuple(np.zeros(back, np.float32) for _ in range(model.n_layer)),
        np.full((model.n_layer, model.n_expert), -1, np.int64),
    )


def install(bank: Surrogates, messages: Sequence[SurrogateMessage], plan: MixturePlan) -> Surrogates:
    """Return the bank with the newer ones of these surrogates in it.

    Nothing in the given bank changes, which steps may be computing with; layers without news are the same arrays in
    both.

    Raises:
        TrustError: one is damaged, or from a composer that does not own the expert.
    """
    a, b = list(bank.a), list(bank.b)
    copied: set[int] = set()
    versions, owners = bank.versions.copy(), plan.owner_map
    for message in messages:
        layer, expert = place = message.layer, message.expert
        if newer_surrogate(int(versions[place]), message, int(owners[place])):
            if layer not in copied:
                copied.add(layer)
                a[layer], b[layer] = a[layer].copy(), b[layer].copy()
            a[layer][expert], b[layer][expert] = message.a, message.b
            versions[place] = message.version
    return Surrogates(tuple(a), tuple(b), versions)


def _fields_of(messages: Sequence[SurrogateMessage]) -> list[_Fields]:
    return [_Fields(m.layer, m.expert, m.owner, m.version, m.checksum) for m in messages]
