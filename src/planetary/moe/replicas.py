"""Experts with several owners: who holds what, who speaks for an expert, and how its copies become one again.

The report has one owner per expert (4.1). With R owners a shard is also held by the R − 1 composers after its first
owner. Each trains its copy on its own tokens; before surrogates are refreshed the copies are merged as tiers are. One
of them, the first that lives, publishes surrogates, so that versions still come from one place; when it dies the next
one goes on from its own copy, and nothing has to be fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import Tensors
from planetary.moe import ownership
from planetary.moe.averaging import MergeRule, Published, merge
from planetary.moe.signature import in_layer
from planetary.moe.states import ComposerState


def replicated_slots(owners: np.ndarray, composers: int, replicas: int) -> list[np.ndarray]:
    """Return for each composer which expert is in each of its slots, i32 [layers, slots].

    Args:
        owners: first owners, i32 [layers, experts].
        composers: C.
        replicas: R, 1 to C.
    """
    if not 1 <= replicas <= composers:
        raise UserError(f"an expert has between 1 and {composers} owners among {composers} composers, found {replicas}")
    shards = [
        np.concatenate([ownership.owned_slots(owners, (number - back) % composers) for back in range(replicas)], axis=1)
        for number in range(composers)
    ]
    width = max(int((shard != ownership.EMPTY).sum(axis=1).max()) for shard in shards)
    # Empty slots last, and experts in order: with one owner these are `owned_slots`.
    last = np.iinfo(np.int32).max
    ordered = [np.sort(np.where(shard == ownership.EMPTY, last, shard), axis=1)[:, :width] for shard in shards]
    return [np.where(shard == last, ownership.EMPTY, shard).astype(np.int32) for shard in ordered]


def authorities(owners: np.ndarray, composers: int, replicas: int, living: Collection[int]) -> np.ndarray:
    """Return who publishes each expert's surrogates, i32 [layers, experts]: its first owner that lives.

    `ownership.EMPTY` where none does: that expert waits for a replacement, and its surrogates grow old meanwhile.
    """
    result = np.full(owners.shape, ownership.EMPTY, np.int32)
    for further in reversed(range(replicas)):
        holder = (owners + further) % composers
        result = np.where(np.isin(holder, list(living)), holder, result).astype(np.int32)
    return result


def consolidate(
    composers: Sequence[ComposerState], start: Tensors, rule: MergeRule, tokens: int
) -> tuple[list[ComposerState], dict[str, np.ndarray]]:
    """Return the composers with equal copies of every expert that several hold, and these copies by name.

    Optimizer moments stay apart, as those of tiers do. A merge here has no outer momentum.

    Args:
        composers: all that take part.
        start: by full name, what the last merge made of each layer's weights [experts, ...]; other names are kept.
        rule: mean or radial-directional, per expert.
        tokens: of each composer since the last merge.
    """
    plain = msgspec.structs.replace(rule, rate=1.0, momentum=0.0)
    after = [[dict(layer) for layer in c.experts] for c in composers]
    merged_all = dict(start)
    for layer in range(len(after[0])):
        places = _places([c.slots[layer] for c in composers])
        for name in after[0][layer]:
            full = in_layer(layer, "experts", name)
            merged_all[full] = start[full].copy()
            changed = [c.experts[layer][name].copy() for c in composers]
            for expert, held in places.items():
                if len(held) < 2:
                    continue
                published = [Published(c, {name: changed[c][slot]}, tokens, 1) for c, slot in held]
                before = {name: start[full][expert]}
                merged = merge(before, {name: np.zeros_like(before[name])}, published, plain)[0][name]
                merged_all[full][expert] = merged
                for c, slot in held:
                    changed[c][slot] = merged
            for number, value in enumerate(changed):
                after[number][layer][name] = value
    new = [msgspec.structs.replace(c, experts=tuple(e)) for c, e in zip(composers, after, strict=True)]
    return new, merged_all


def _places(slots: Sequence[np.ndarray]) -> dict[int, list[tuple[int, int]]]:
    """Return for each expert who holds it, and in which slot."""
    found: dict[int, list[tuple[int, int]]] = {}
    for composer, row in enumerate(slots):
        for slot, expert in enumerate(row):
            if expert != ownership.EMPTY:
                found.setdefault(int(expert), []).append((composer, slot))
    return found
