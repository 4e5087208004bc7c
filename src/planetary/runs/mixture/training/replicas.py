"""Experts with several owners: their holders, an expert's speaker, and how copies become one again.

The report has one owner per expert (4.1). With R owners a shard is also held by the R − 1 composers after its first
owner. Each trains a copy on separate tokens; whenever surrogates are refreshed the copies are merged as tiers are: a
shard's experts are a separate fragment. The first live owner publishes surrogates, so versions still come from one
place; when it is lost the next one goes on from another copy, and nothing has to be fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.averaging import FragmentMergeRule
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.training.participant_states import ComposerState, expert_name


def holders(shard: int, composers: int, replicas: int) -> tuple[int, ...]:
    """Return who owns a shard's experts, the first owner first."""
    return tuple((shard + further) % composers for further in range(replicas))


def held_shards(number: int, composers: int, replicas: int) -> tuple[int, ...]:
    """Return whose experts a composer owns, those it is the first owner of first."""
    return tuple((number - back) % composers for back in range(replicas))


def speaker(shard: int, composers: int, replicas: int, living: Collection[int]) -> int:
    """Return who publishes a shard's surrogates: the first live owner, `ownership.EMPTY` where none does.

    Such a shard waits for a replacement, and the surrogates grow old meanwhile.
    """
    return next((one for one in holders(shard, composers, replicas) if one in living), ownership.EMPTY)


def replicated_slots(owners: np.ndarray, composers: int, replicas: int) -> list[np.ndarray]:
    """Return for each composer which expert is in each slot, i32 [layers, slots].

    Args:
        owners: first owners, i32 [layers, experts].
        composers: C.
        replicas: R, 1 to C.
    """
    if not 1 <= replicas <= composers:
        raise UserError(f"an expert has between 1 and {composers} owners among {composers} composers, found {replicas}")
    shards = [
        np.concatenate(
            [ownership.owned_slots(owners, shard) for shard in held_shards(number, composers, replicas)], axis=1
        )
        for number in range(composers)
    ]
    width = max(int((shard != ownership.EMPTY).sum(axis=1).max()) for shard in shards)
    # Empty slots last, and experts in order: with one owner these are `owned_slots`.
    last = np.iinfo(np.int32).max
    ordered = [np.sort(np.where(shard == ownership.EMPTY, last, shard), axis=1)[:, :width] for shard in shards]
    return [np.where(shard == last, ownership.EMPTY, shard).astype(np.int32) for shard in ordered]


def only_shards(composer: ComposerState, owners: np.ndarray, shards: Collection[int]) -> ComposerState:
    """Return the composer with only the experts whose first owners are `shards`; other slots are empty.

    Args:
        composer: of any number of owners.
        owners: first owners, i32 [layers, experts].
        shards: that are kept.
    """
    first = np.take_along_axis(owners, np.maximum(composer.slots, 0), axis=1)
    kept = np.isin(first, list(shards)) & (composer.slots != ownership.EMPTY)
    return msgspec.structs.replace(composer, slots=np.where(kept, composer.slots, ownership.EMPTY))


def expert_fragments(
    owners: np.ndarray, composers: int, weights: Iterable[str]
) -> dict[tuple[Tier, int], tuple[str, ...]]:
    """Return the names of every shard's fragment: each weight of each expert is merged by itself.

    Args:
        owners: first owners, i32 [layers, experts].
        composers: C.
        weights: of one expert, such as up and down.
    """
    names = tuple(weights)
    return {
        (Tier.EXPERTS, shard): tuple(
            expert_name(layer, weight, int(expert))
            for layer, row in enumerate(owners)
            for weight in names
            for expert in np.flatnonzero(row == shard)
        )
        for shard in range(composers)
    }


def rule_of(tier: Tier, rule: FragmentMergeRule) -> FragmentMergeRule:
    """Return how fragments of a tier are merged: those of experts without an outer momentum."""
    return msgspec.structs.replace(rule, rate=1.0, momentum=0.0) if tier is Tier.EXPERTS else rule
