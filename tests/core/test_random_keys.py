"""Keys of random numbers: JAX's own, computed without it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from planetary.core.random_keys import fold_in, key_of_seed, key_words, seed_of_site, step_key


def words(key: jax.Array) -> tuple[int, ...]:
    return tuple(int(word) for word in jax.random.key_data(key))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_the_key_of_a_step_is_that_of_jax(seed: int) -> None:
    key = jax.random.key(seed, impl="threefry2x32")
    assert key_of_seed(seed) == words(key)
    for lease, step in ((0, 0), (3, 17), (2**31 - 1, 99)):
        expected = jax.random.fold_in(jax.random.fold_in(key, lease), step)
        assert step_key(seed, lease, step) == words(expected)


def test_sites_with_one_seed_draw_other_numbers() -> None:
    seeds = {seed_of_site(seed, site) for seed in (0, 1) for site in ("paris", "tokyo")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_keys_differ_by_seed_lease_step_and_part() -> None:
    keys = [step_key(seed, lease, step) for seed in range(3) for lease in range(20) for step in range(20)]
    assert len(set(keys)) == len(keys)
    parts = key_words(keys[0], 3).reshape(3, 2)
    assert [tuple(part) for part in parts.tolist()] == [fold_in(keys[0], part) for part in range(3)]
    np.testing.assert_array_equal(key_words(keys[0], 1), np.array(keys[0], np.uint32))
