"""Experts with several owners: who holds them, who speaks for them, and what merging the copies gives."""

from __future__ import annotations

import numpy as np
import pytest
from moe_support import TINY, train
from msgspec.structs import replace

from planetary.core.errors import UserError
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.averaging import FragmentMergeRule
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.training.participant_states import assembled
from planetary.runs.mixture.training.replicas import held_shards, holders, replicated_slots, speaker


def test_expert_is_held_by_its_first_owner_and_the_next() -> None:
    owners = ownership.round_robin(2, 10, 4)  # shards of 3, 3, 2 and 2 experts
    once = replicated_slots(owners, 4, 1)
    assert all((once[c] == ownership.owned_slots(owners, c)).all() for c in range(4))
    twice = replicated_slots(owners, 4, 2)
    assert twice[1][0].tolist() == [0, 1, 4, 5, 8, 9]
    assert twice[3][0].tolist() == [2, 3, 6, 7, -1, -1]
    held = [[e for slots in twice for e in slots[1] if e >= 0].count(e) for e in range(10)]
    assert held == [2] * 10
    with pytest.raises(UserError, match="between 1 and 4 owners"):
        replicated_slots(owners, 4, 5)


def test_when_an_owner_dies_the_next_one_speaks_for_its_experts() -> None:
    assert [holders(shard, 3, 2) for shard in range(3)] == [(0, 1), (1, 2), (2, 0)]
    assert [held_shards(number, 3, 2) for number in range(3)] == [(0, 2), (1, 0), (2, 1)]
    assert [speaker(shard, 3, 2, [0, 1, 2]) for shard in range(3)] == [0, 1, 2]
    assert [speaker(shard, 3, 2, [0, 2]) for shard in range(3)] == [0, 2, 2]
    assert [speaker(shard, 3, 2, [2]) for shard in range(3)] == [ownership.EMPTY, 2, 2]
    assert [speaker(shard, 3, 1, [0, 2]) for shard in range(3)] == [0, ownership.EMPTY, 2]


@pytest.mark.slow
@pytest.mark.parametrize("radial", [pytest.param(False, marks=pytest.mark.slow), True])
def test_copies_part_between_refreshes_and_are_merged_at_each(radial: bool) -> None:
    rule = FragmentMergeRule(radial=radial)
    _, states, reports = train(4, replicas=2, cadence=Cadence(backbone=2, refresh=2), merge=rule)
    for step, state in enumerate(states):
        one, two = (c.experts[0]["up"] for c in state.composers)
        assert (one == two).all() == (step % 2 == 0)
    assert [report.surrogate_bytes > 0 for report in reports] == [False, True, False, True]
    assert reports[1].surrogate_bytes == TINY.n_expert * 2 * 8 * 3 * 4  # each expert is published once
    if not radial:
        before, after = states[1], states[2]
        moved = states[2].composers[0].experts[0]["up"] - before.composers[0].experts[0]["up"]
        assert np.abs(moved).max() > 0
        assert (after.syncer.start["layers.0.experts.up.2"] == after.composers[0].experts[0]["up"][2]).all()


@pytest.mark.slow
def test_copied_experts_are_averaged_and_single_ones_exact() -> None:
    """Of an expert with several owners the ordinary model has the mean and of one alone its bits."""
    _, states, _ = train(3, replicas=2, cadence=Cadence(backbone=2, refresh=2))
    copies = [c.experts[0]["up"].astype(np.float64) for c in states[3].composers]
    assert (assembled(states[3], TINY)[1][0]["up"] == ((copies[0] + copies[1]) / 2).astype(np.float32)).all()
    _, states, _ = train(1)
    first = states[1].composers[0]
    of_zero = first.experts[0]["up"].copy()
    of_zero[:, 0, 0] = -0.0
    alone = replace(first, experts=({**first.experts[0], "up": of_zero}, *first.experts[1:]))
    found = assembled(replace(states[1], composers=(alone, *states[1].composers[1:])), TINY)[1][0]["up"]
    for slot, expert in enumerate(first.slots[0]):
        assert found[expert].tobytes() == of_zero[slot].tobytes()
