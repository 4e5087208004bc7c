"""Weights of a merge never exceed their caps, and equal the tokens where none is reached."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planetary.sync.contributions import capped, rebase


def test_weights_are_the_tokens_where_no_cap_is_reached() -> None:
    assert capped({"a": 300, "b": 200}, {"a": 0.6, "b": 0.9}) == {"a": 300, "b": 200}
    assert capped({"a": 7}, {}) == {"a": 7}


def test_a_site_above_its_share_gets_exactly_that() -> None:
    weights = capped({"a": 10_000, "b": 1_000, "c": 3_000}, {"a": 0.5})
    assert weights == {"a": 4_000, "b": 1_000, "c": 3_000}


def test_a_site_alone_has_the_whole_weight() -> None:
    weights = capped({"a": 10_000}, {"a": 0.25})
    assert list(weights) == ["a"]
    assert weights["a"] > 0


def test_caps_that_cannot_all_hold_are_shares_of_each_other() -> None:
    weights = capped({"a": 9_000, "b": 1_000}, {"a": 0.25, "b": 0.25})
    assert weights["a"] == weights["b"]


@pytest.mark.parametrize("seed", range(20))
def test_no_share_exceeds_its_cap_and_others_stay_in_proportion(seed: int) -> None:
    source = random.Random(seed)
    tokens = {name: source.randint(1_000, 10**7) for name in "abcdef"}
    caps = {name: source.uniform(0.2, 1.0) for name in tokens}
    weights = capped(tokens, caps)
    total = sum(weights.values())
    for name, weight in weights.items():
        assert weight / total <= caps[name] + 1e-3
    free = [name for name in tokens if weights[name] == tokens[name]]
    assert free, "somebody is below the cap"


def test_a_displacement_is_put_on_top_of_another_version() -> None:
    draw = np.random.default_rng(0)
    version, base, newest = ({"w": draw.normal(size=(5, 3)).astype(np.float32)} for _ in range(3))
    moved = rebase(version, base, newest)["w"]
    expected = version["w"].astype(np.float64) + (newest["w"].astype(np.float64) - base["w"])
    np.testing.assert_array_equal(moved, expected.astype(np.float32))
    np.testing.assert_array_equal(rebase(version, base, base)["w"], version["w"])
