"""Fragments of the parameters: balanced by bytes, and mixed into a worker's own values."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import UserError
from planetary.core.quantisers import to_bfloat16
from planetary.core.tensors import TensorSpec
from planetary.sync.fragments import Fragments, FragmentSteps, mixed

SPECS = tuple(
    TensorSpec(name, "f32", (size,)) for name, size in (("d", 3), ("a", 5), ("c", 8), ("b", 5), ("e", 1), ("f", 2))
)


def test_fragments_are_balanced_and_keep_the_models_order() -> None:
    parts = [[spec.name for spec in part] for part in Fragments(SPECS, 3).parts]
    assert parts == [["c"], ["d", "a"], ["b", "e", "f"]]
    assert sorted(name for part in parts for name in part) == sorted(spec.name for spec in SPECS)


def test_ties_go_by_name_whatever_the_order_of_the_tensors() -> None:
    equal = [TensorSpec(name, "f32", (4,)) for name in "badc"]
    for order in (equal, equal[::-1]):
        assert [{spec.name for spec in part} for part in Fragments(order, 2).parts] == [{"a", "c"}, {"b", "d"}]


def test_a_round_ends_with_each_fragment_in_turn() -> None:
    fragments = Fragments(SPECS, 3)
    assert [fragments.number_of(round_) for round_ in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert Fragments(SPECS).of_round(5) == SPECS


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"sync\.fragments: expected at most 6, the number of the model's tensors, found 7"
    ):
        Fragments(SPECS, 7)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_mixing_is_rounded_once_and_exact_at_its_ends(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (64,))
    own, shared = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    if dtype == "bf16":
        own, shared = to_bfloat16(own), to_bfloat16(shared)
    assert mixed(spec, own, shared, 0.0).tobytes() == shared.tobytes()
    assert mixed(spec, own, own, 0.5).tobytes() == own.tobytes()
    if dtype == "f32":
        expected = (0.25 * own.astype(np.float64) + 0.75 * shared.astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(mixed(spec, own, shared, 0.25), expected)


def test_steps_behind_a_delta_count_from_its_last_mixing() -> None:
    """Three fragments, leases of 10 steps, versions mixed in after 4 of them."""
    steps = FragmentSteps(3, delay=4)
    steps.begin((), goes_on=False)
    shares = []
    for round_ in range(1, 8):
        steps.trained(10, mixes=round_ - 1 if round_ > 1 else -1)
        shares.append(steps.share(round_, 10))
        steps.begin((), goes_on=True)
    assert steps.of_round(7) == 26  # since 4 steps after round 4
    assert shares == [1.0] * 7


def test_returning_worker_has_few_steps_behind_its_deltas() -> None:
    steps = FragmentSteps(3, delay=4)
    shares = []
    for round_ in range(7, 11):
        steps.begin((), goes_on=round_ > 7)
        steps.trained(10, mixes=round_ - 1 if round_ > 7 else -1)
        shares.append(steps.share(round_, 10))
    assert shares == [10 / 26, 20 / 26, 30 / 26, 1.0]


def test_versions_that_were_missed_are_mixed_in_before_the_lease() -> None:
    steps = FragmentSteps(2, delay=10)
    steps.trained(10, mixes=-1)
    steps.begin((3,), goes_on=True)
    steps.trained(10, mixes=4)
    assert (steps.of_round(5), steps.of_round(6)) == (10, 0)
    assert steps.share(6, 10) == 0.0
