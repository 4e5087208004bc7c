"""Legal values of a batch's integers, found by their use in the graph; what JAX itself computes is the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.frontend.cross_entropy import linear_cross_entropy
from planetary.compiler.frontend.export import Model, export_loss
from planetary.compiler.frontend.index_limits import index_limits, table_rows
from planetary.core.index_limits import IndexLimit, Interval
from planetary.models.layers import cross_entropy

ROWS, CLASSES, EXAMPLES, LENGTH = 10, 4, 3, 6
LOWEST, HIGHEST = -(2**31), 2**31 - 1
HIDDEN = np.ones((EXAMPLES, CLASSES), np.float32)
TABLE = np.random.default_rng(0).standard_normal((ROWS, CLASSES)).astype(np.float32)


def picked(scores: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1)[:, 0]


def model_of(loss: Callable[..., Any], *batch: np.ndarray) -> Model:
    weights = {"w": np.zeros((ROWS, CLASSES), np.float32)}
    return export_loss(loss, weights, batch, name="t", source="t:t", options={})


def limits_of(loss: Callable[..., Any], *batch: np.ndarray) -> dict[str, tuple[IndexLimit, ...]]:
    return index_limits(model_of(loss, *batch))


@pytest.mark.parametrize(
    ("loss", "legal"),
    [
        (lambda p, x: p["w"][x].sum(), [(0, ROWS - 1)]),
        (lambda p, x: jnp.take(p["w"], x, axis=0).sum(), [(0, ROWS - 1)]),
        (lambda p, x: p["w"].at[x].get(mode="clip").sum(), [(0, ROWS - 1)]),
        (lambda p, x: jax.vmap(lambda one: p["w"][one])(x).sum(), [(0, ROWS - 1)]),
        (lambda p, x: jax.lax.scan(lambda c, one: (c + p["w"][one].sum(), 0), 0.0, x)[0], [(0, ROWS - 1)]),
        (lambda p, x: p["w"][x + 5].sum(), [(-5, ROWS - 6)]),
        (lambda p, x: p["w"][jnp.concatenate([jnp.ones(1, jnp.int32), x])].sum(), [(0, ROWS - 1)]),
        (lambda p, x: p["w"][jnp.arange(EXAMPLES), x - 1].sum(), [(1, CLASSES)]),
        (lambda p, x: picked(p["w"][:EXAMPLES], x).mean(), [(0, CLASSES - 1)]),
        (lambda p, x: cross_entropy(p["w"][:EXAMPLES], x), [(LOWEST, CLASSES - 1)]),
        (lambda p, x: (jax.nn.one_hot(x, ROWS) @ p["w"]).sum(), [(LOWEST, ROWS - 1)]),
        (lambda p, x: linear_cross_entropy(HIDDEN, p["w"], x).sum(), [(LOWEST, ROWS - 1)]),
        (lambda p, x: jnp.where(x >= 0, picked(p["w"][:EXAMPLES], x), 0).sum(), [(LOWEST, CLASSES - 1)]),
        (lambda p, x: jnp.where(x >= 0, p["w"][jnp.where(x >= 0, x, 0), 0], 0).sum(), [(LOWEST, ROWS - 1)]),
        (lambda p, x: ((x != 255) * picked(p["w"][:EXAMPLES], x)).sum(), [(0, CLASSES - 1), (255, 255)]),
        (lambda p, x: ((x != 0) * p["w"][x, 0]).sum(), [(0, ROWS - 1)]),  # padding has a row, and hides no other value
    ],
)
def test_limit_is_the_table_less_what_a_mask_leaves_out(loss: Callable[..., Any], legal: list[Interval]) -> None:
    """Each illegal neighbour of a legal value has the loss of another value, or none at all, in JAX."""
    model = model_of(loss, np.zeros(EXAMPLES, np.int32))
    (found,) = index_limits(model)["x"]
    assert [*found.legal] == legal
    assert table_rows(model) == {"x": legal[0][1] + 1}  # a trial draws every row, and none that is not there

    def value(number: int) -> float:
        return float(loss({"w": jnp.asarray(TABLE)}, jnp.full(EXAMPLES, number, jnp.int32)))

    inside = [value(number) for number in range(-5, ROWS) if not found.illegal(np.array([number]))[0]]
    beyond = value(legal[0][1] + 1)
    assert not np.isfinite(beyond) or beyond in inside or beyond == value(legal[0][1] + 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: p["w"][jnp.clip(x, 0, ROWS - 1)].sum(),
        lambda p, x: p["w"][x % ROWS].sum(),
        lambda p, x: (p["w"].sum() * x.astype(jnp.float32)).sum(),
        lambda p, x: (p["w"][:EXAMPLES] * (jnp.arange(CLASSES)[None] < x[:, None])).sum(),
        lambda p, x: p["w"][x[::-1] * 2 + x].sum(),
    ],
)
def test_integer_that_reaches_no_table_is_free(loss: Callable[..., Any]) -> None:
    """Also an index that the author clips, and one made of two elements, whose limit is not of one of them."""
    assert limits_of(loss, np.zeros(EXAMPLES, np.int32)) == {}


def test_parts_of_an_argument_have_limits_of_their_own() -> None:
    found = limits_of(lambda p, x: p["w"][x[:, 0], x[:, 1]].sum(), np.zeros((EXAMPLES, 2), np.int32))["x"]
    assert [(one.legal, one.part) for one in found] == [
        (((0, ROWS - 1),), ((0, 1, 1),)),
        (((0, CLASSES - 1),), ((1, 2, 1),)),
    ]
    rows = np.array([[0, 1], [7, 3], [3, 4], [9, 9]])
    assert [one.first_illegal(rows) for one in found] == [None, (2, 4)]


def test_mask_of_targets_does_not_excuse_inputs() -> None:
    """A text in one column: −100 is no target, and no input either."""

    def loss(p: Any, ids: Any) -> Any:
        return cross_entropy(p["w"][ids[:, :-1]], ids[:, 1:])

    inputs, targets = limits_of(loss, np.zeros((EXAMPLES, LENGTH), np.int32))["ids"]
    assert (inputs.legal, targets.legal) == (((0, ROWS - 1),), ((LOWEST, CLASSES - 1),))
    assert (inputs.part, targets.part) == (((0, LENGTH - 1, 1),), ((1, LENGTH, 1),))


def test_narrow_type_bounds_the_values() -> None:
    (found,) = limits_of(lambda p, x: p["w"][x].sum(), np.zeros(EXAMPLES, np.uint8))["x"]
    assert found.legal == ((0, ROWS - 1),)
    assert __file__ in found.place
    wide = limits_of(lambda p, x: jnp.zeros(256)[x].sum() + p["w"].sum(), np.zeros(EXAMPLES, np.uint8))
    assert wide == {}
