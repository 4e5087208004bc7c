"""The wide table of JAX functions against `jax.vjp`: all of float32, a fifth of other dtypes; the rest in soak."""

from __future__ import annotations

import edge_cases
import jax
import pytest
from sweep_cases import Case, cases
from vjp_oracle import check_together, jax_can


def chosen(group: str, dtype: str, every: int = 1) -> list[Case]:
    return list(cases(group, dtype))[::every]


QUICK = {"unary": 8, "binary": 6, "shape": 4, "real": 10, "dot": 1}
"""Every how many-th case of float32 is in the quick tests; the others of float32 follow in those that compile."""


@pytest.mark.parametrize("group", QUICK)
def test_gradients_of_the_table_equal_jax(group: str) -> None:
    members = [c for c in chosen(group, "float32", QUICK[group]) if not jax_can(c)]
    assert len(members) > 3
    ratios = check_together(members)
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= 1} == {}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
@pytest.mark.slow
def test_gradients_at_ties_poles_and_infinities_equal_jax(dtype: str) -> None:
    members = [c for c in edge_cases.cases(dtype) if not jax_can(c)]
    ratios = check_together(members)
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= 1} == {}


DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64", "complex128"]


def check_table(group: str, dtype: str, every: int, *, but_every: int = 0) -> None:
    with jax.enable_x64(True):
        table = [c for i, c in enumerate(chosen(group, dtype, every)) if not but_every or i % but_every]
        members = [c for c in table if not jax_can(c)]
        ratios = {}
        for first in range(0, len(members), 25):
            ratios.update(check_together(members[first : first + 25]))
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= 1} == {}


@pytest.mark.compiles
@pytest.mark.parametrize("group", ["unary", "binary", "shape", "real", "matrix"])
def test_float32_gradients_of_the_rest_of_the_table_equal_jax(group: str) -> None:
    check_table(group, "float32", 1, but_every=QUICK.get(group, 0))


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("group", ["unary", "binary", "shape", "real", "matrix", "dot"])
def test_gradients_of_a_part_of_the_table_equal_jax(group: str, dtype: str) -> None:
    check_table(group, dtype, 5)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("group", ["unary", "binary", "shape", "real", "matrix", "dot"])
def test_gradients_of_the_whole_table_equal_jax(group: str, dtype: str) -> None:
    check_table(group, dtype, 1)
