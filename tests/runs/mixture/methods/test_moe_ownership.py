"""Ownership maps: every expert has one owner, shards are even, and slots say the same as the map."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import UserError
from planetary.runs.mixture.methods import ownership


@pytest.mark.parametrize(("experts", "composers"), [(16, 4), (16, 1), (10, 4), (7, 7), (256, 8)])
def test_every_map_gives_each_expert_one_owner_and_even_shards(experts: int, composers: int) -> None:
    loads = np.random.default_rng(0).integers(1, 100, (3, experts)).astype(float)
    maps = [
        ownership.round_robin(3, experts, composers),
        ownership.hashed(3, experts, composers),
        ownership.load_aware(loads, composers),
    ]
    for owners in maps:
        assert owners.shape == (3, experts)
        sizes = [np.bincount(row, minlength=composers) for row in owners]
        assert all(size.min() >= 1 and size.max() <= -(-experts // composers) for size in sizes)
        held = [ownership.owned_slots(owners, c) for c in range(composers)]
        for layer in range(3):
            everyone = np.concatenate([slots[layer] for slots in held])
            assert sorted(everyone[everyone != ownership.EMPTY]) == list(range(experts))


def test_round_robin_is_the_reports_map() -> None:
    assert ownership.round_robin(1, 10, 4).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]


def test_hashed_depends_on_layer_and_seed_alone() -> None:
    first = ownership.hashed(2, 32, 4, seed=1)
    assert (first == ownership.hashed(2, 32, 4, seed=1)).all()
    assert (first != ownership.hashed(2, 32, 4, seed=2)).any()
    assert (first[0] != first[1]).any()


def test_load_aware_ownership_evens_out_loads() -> None:
    loads = np.array([[8.0, 1, 1, 1, 8, 1, 1, 1]])

    def spread(owners: np.ndarray) -> float:
        shares = np.bincount(owners[0], loads[0])
        return float(shares.max() - shares.min())

    assert spread(ownership.round_robin(1, 8, 4)) == 14
    assert spread(ownership.load_aware(loads, 4)) == 7  # two experts of 8 apart, nothing evener exists


def test_an_unequal_shard_has_an_empty_slot_that_selects_nothing() -> None:
    slots = ownership.owned_slots(ownership.round_robin(1, 10, 4), 3)
    assert slots.tolist() == [[3, 7, ownership.EMPTY]]
    matrix = ownership.slot_matrix(slots, 10)
    gates = np.arange(10, dtype=np.float32)
    assert (gates @ matrix[0]).tolist() == [3, 7, 0]


def test_taking_and_putting_slots_are_inverse() -> None:
    everything = np.random.default_rng(0).standard_normal((2, 10, 3)).astype(np.float32)
    owners = ownership.hashed(2, 10, 4)
    rebuilt = np.zeros_like(everything)
    for c in range(4):
        slots = ownership.owned_slots(owners, c)
        taken = ownership.take_slots(everything, slots)
        assert (taken[slots == ownership.EMPTY] == 0).all()
        rebuilt = ownership.put_slots(rebuilt, slots, taken)
    assert (rebuilt == everything).all()


def test_wrong_maps_are_refused() -> None:
    with pytest.raises(UserError, match="5 composers cannot share 4"):
        ownership.round_robin(1, 4, 5)
    with pytest.raises(UserError, match="none below 0"):
        ownership.load_aware(np.array([[1.0, -1.0]]), 2)
    with pytest.raises(UserError, match="there are 1 slots"):
        ownership.owned_slots(ownership.round_robin(1, 4, 2), 0, slots=1)
