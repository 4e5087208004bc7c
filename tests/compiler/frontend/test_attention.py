"""Attention by tiles equals the attention that holds every score, in JAX, after export, and in PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vjp_oracle import check

import planetary
from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.frontend.lowering import lower_with_rules

FORMS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"causal": False, "cap": 1.5},
    {"window": 1},
    {"window": 17, "scale": 0.5},
    {"window": 16},
    {"cap": 2.0},
    {"segments": True},
    {"causal": False, "segments": True},
    {"segments": True, "window": 20, "cap": 1.5, "scale": 1.0},
]
LENGTH, BLOCK, HEADS, GROUPS, WIDTH = 45, 16, 4, 2, 8


def _arrays(length: int = LENGTH, batch: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(length)
    shapes = [(batch, length, HEADS, WIDTH), (batch, length, GROUPS, WIDTH), (batch, length, GROUPS, WIDTH + 4)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def _segments(length: int = LENGTH, batch: int = 2) -> np.ndarray:
    return np.sort(np.random.default_rng(1).integers(0, 4, (batch, length))).astype(np.int32)


def _whole(query: Any, key: Any, value: Any, **form: Any) -> Any:
    """Attention by its definition: every score in one tensor, and JAX's softmax."""
    length, width = query.shape[1], query.shape[3]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * form.get("scale", width**-0.5)
    if "cap" in form:
        scores = form["cap"] * jnp.tanh(scores / form["cap"])
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = np.full((1, 1, length, length), True)
    if form.get("causal", True):
        visible = visible & (distance >= 0) & (distance < form.get("window", length))
    if "segments" in form:
        visible = visible & (form["segments"][:, None, :, None] == form["segments"][:, None, None, :])
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def _form(form: dict[str, Any]) -> dict[str, Any]:
    return form | {"segments": _segments()} if "segments" in form else form


def _both(function: Any, *arrays: Any, **form: Any) -> Any:
    """Return the attention, and the gradients for a random cotangent."""

    def run(*arrays: Any) -> Any:
        mixed, pull_back = jax.vjp(lambda *x: function(*x, **form), *arrays)
        cotangent = np.random.default_rng(2).standard_normal(mixed.shape, np.float32)
        return mixed, pull_back(jnp.asarray(cotangent, mixed.dtype))

    return jax.jit(run)(*arrays)


def _near(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6 * max(1.0, float(np.max(np.abs(y)))), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tiles_equal_the_definition_of_attention(form: dict[str, Any]) -> None:
    form, arrays = _form(form), _arrays()
    _near(_both(planetary.attention, *arrays, block=BLOCK, **form), _both(_whole, *arrays, **form))


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=str)
def test_an_exported_attention_has_its_own_gradient(form: dict[str, Any]) -> None:
    form = _form(form)
    check(lambda *x: planetary.attention(*x, block=BLOCK, **form), *map(jnp.asarray, _arrays()))


def test_no_tensor_of_a_step_grows_with_the_square_of_the_length() -> None:
    """Neither in the forward pass nor in the gradient is there a tensor with two dimensions of the length."""

    def loss(*arrays: Any) -> Any:
        return jnp.sum(planetary.attention(*arrays) ** 2)

    length = 1000
    text = lower_with_rules(loss, *_arrays(length, batch=1)).as_text()
    assert "planetary.attention" in text
    assert "planetary.custom_vjp" not in text
    step = differentiate(text, wrt=(0, 1, 2))
    assert "composite" not in step
    sizes = {x for line in step.splitlines() for x in _sizes(line)}
    assert max(sizes) <= 2 * length * HEADS * (WIDTH + 4)


def _sizes(line: str) -> list[int]:
    types = [part.split(">")[0].split("x")[:-1] for part in line.split("tensor<")[1:]]
    return [int(np.prod([int(n) for n in dims], initial=1)) for dims in types if all(n.isdigit() for n in dims)]


@pytest.mark.slow
def test_halves_are_attended_with_sums_in_float32() -> None:
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in _arrays()]
    found = _both(planetary.attention, *arrays, block=BLOCK)
    wanted = _both(_whole, *(x.astype(jnp.float32) for x in arrays))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(np.float32), y, atol=2e-2 * float(np.max(np.abs(y))))


@pytest.mark.slow
def test_attention_under_vmap_is_that_of_each_element() -> None:
    query, key, value = _arrays()
    stacked = np.stack([query, -query, 2 * query])

    def tiled(*x: Any) -> Any:
        return planetary.attention(*x, block=BLOCK)

    found = _both(jax.vmap(tiled, (0, None, None)), stacked, key, value)
    wanted = _both(jax.vmap(_whole, (0, None, None)), stacked, key, value)
    _near(found, wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": 0}, "at least 1 key"),
        ({"window": 3, "causal": False}, "causal"),
        ({"cap": -1.0}, "above 0"),
        ({"segments": np.zeros((2, 3), np.int32)}, "segments"),
    ],
)
def test_a_form_that_has_no_meaning_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        planetary.attention(*_arrays(), **change)


def test_shapes_that_do_not_fit_are_refused_with_their_sizes() -> None:
    query, key, value = _arrays()
    with pytest.raises(ValueError, match=r"\(2, 45, 3, 8\)"):
        planetary.attention(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match="G divides H"):
        planetary.attention(query, key[:, :44], value)


@pytest.mark.doors("torch")
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradient_equal_those_of_pytorch(causal: bool) -> None:
    import torch

    query, key, value = _arrays()
    given = [torch.tensor(x.transpose(0, 2, 1, 3), requires_grad=True) for x in (query, key, value)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    tiled = lambda *x: planetary.attention(*x, causal=causal, block=BLOCK)  # noqa: E731
    found, pull_back = jax.vjp(jax.jit(tiled), query, key, value)
    _near(found, wanted.detach().numpy().transpose(0, 2, 1, 3))
    wanted.sum().backward()
    gradients = [x.grad.numpy().transpose(0, 2, 1, 3) for x in given if x.grad is not None]
    _near(pull_back(np.ones_like(found)), gradients)
