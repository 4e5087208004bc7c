"""The largest numbers of a row are those of a sort, with the first of equals first."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from planetary.runs.serve.program.likeliest import top_k


@pytest.mark.parametrize(("width", "count"), [(7, 7), (256, 64), (1024, 20), (1500, 64), (20_000, 64)])
@pytest.mark.parametrize("levels", [0, 3, 100])
def test_largest_numbers_come_in_stable_order(width: int, count: int, levels: int) -> None:
    rows = np.random.default_rng(width).standard_normal((2, 3, width), np.float32)
    if levels:  # so that many are equal
        rows = np.round(rows * levels) / levels
    values, places = (np.asarray(one) for one in jax.jit(top_k, static_argnums=1)(rows, count))
    expected = np.argsort(-rows, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, expected, axis=-1))


def test_masked_numbers_come_last() -> None:
    rows = np.full((1, 2000), -np.inf, np.float32)
    rows[0, [1999, 5]] = 1.0, 2.0
    values, places = (np.asarray(one) for one in jax.jit(top_k, static_argnums=1)(rows, 4))
    assert places.tolist() == [[5, 1999, 0, 1]]
    assert values.tolist() == [[2.0, 1.0, -np.inf, -np.inf]]
