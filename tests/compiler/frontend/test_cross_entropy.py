"""Cross-entropy by blocks equals that of whole logits, in JAX, after export, and in PyTorch."""

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

TOKENS, WIDTH, WORDS, BLOCK = (3, 7), 8, 37, 4


def _arrays(words: int = WORDS) -> tuple[Any, Any, Any]:
    """Return hidden states, a table, and labels, some of which do not count."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, words, TOKENS).astype(np.int32)
    labels[0, :3] = -100
    hidden = 2 * rng.standard_normal((*TOKENS, WIDTH), np.float32)
    return jnp.asarray(hidden), jnp.asarray(rng.standard_normal((words, WIDTH), np.float32)), jnp.asarray(labels)


def _whole(hidden: Any, table: Any, labels: Any, cap: float | None = None) -> Any:
    """JAX's loss of whole logits."""
    logits = hidden @ table.T
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels >= 0, -picked, 0.0)


def _both(function: Any, hidden: Any, table: Any, labels: Any) -> Any:
    """Return the losses, and the gradients for a cotangent that differs from token to token."""
    losses, pull_back = jax.vjp(lambda *x: function(*x, labels), hidden, table)
    cotangent = np.random.default_rng(2).standard_normal(losses.shape, np.float32)
    return losses, pull_back(jnp.asarray(cotangent, losses.dtype))


def _near(found: Any, wanted: Any, digits: float = 3e-6) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=digits * max(1.0, float(np.max(np.abs(y)))), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("block", [BLOCK, 21, None])
def test_blocks_equal_the_loss_of_whole_logits(block: int | None, cap: float | None) -> None:
    def blocks(*x: Any) -> Any:
        return planetary.linear_cross_entropy(*x, cap=cap, block=block)

    _near(_both(blocks, *_arrays()), _both(lambda h, t, labels: _whole(h, t, labels, cap), *_arrays()))


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 3.0])
def test_an_exported_loss_has_its_own_gradient(cap: float | None) -> None:
    hidden, table, labels = _arrays()
    check(lambda h, t: planetary.linear_cross_entropy(h, t, labels, cap=cap, block=BLOCK), hidden, table)


def test_no_tensor_of_a_step_has_a_row_of_words_for_each_token() -> None:
    """Neither the forward pass nor the gradient holds more logits than those of a block."""
    hidden, table, labels = _arrays(1000)
    text = lower_with_rules(
        lambda h, t: jnp.sum(planetary.linear_cross_entropy(h, t, labels, block=BLOCK)), hidden, table
    ).as_text()
    assert "planetary.linear_cross_entropy" in text
    assert "planetary.custom_vjp" not in text
    step = differentiate(text, wrt=(0, 1))
    assert "composite" not in step
    assert "tensor<4x32xf32>" in step
    assert "x1000xf32" not in step


@pytest.mark.slow
def test_halves_are_multiplied_with_sums_in_float32() -> None:
    hidden, table, labels = _arrays()
    hidden, table = hidden.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    found = _both(planetary.linear_cross_entropy, hidden, table, labels)
    wanted = _both(_whole, hidden.astype(jnp.float32), table.astype(jnp.float32), labels)
    assert [x.dtype for x in jax.tree.leaves(found)] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    _near(found[0], wanted[0])
    _near(found, wanted, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, None, 0), (0, 0, None)], ids=str)
def test_loss_under_vmap_is_that_of_each_element(axes: tuple[Any, ...]) -> None:
    stacked = [x if axis is None else jnp.stack([x, x[::-1], x]) for x, axis in zip(_arrays(), axes, strict=True)]

    def blocks(*x: Any) -> Any:
        return planetary.linear_cross_entropy(*x, block=BLOCK)

    def each(function: Any) -> Any:
        return lambda h, t, labels: jax.vmap(function, axes)(h, t, labels)

    hidden, table, labels = stacked
    _near(_both(each(blocks), hidden, table, labels), _both(each(_whole), hidden, table, labels))


def test_arguments_that_do_not_fit_are_refused_with_their_sizes() -> None:
    hidden, table, labels = _arrays()
    with pytest.raises(ValueError, match=r"\(8, 37\)"):
        planetary.linear_cross_entropy(hidden, table.T, labels)
    with pytest.raises(ValueError, match="cap"):
        planetary.linear_cross_entropy(hidden, table, labels, cap=0.0)


@pytest.mark.doors("torch")
def test_loss_and_its_gradient_equal_those_of_pytorch() -> None:
    import torch

    hidden, table, labels = _arrays()
    states, words = (torch.tensor(np.asarray(x), requires_grad=True) for x in (hidden, table))
    wanted = torch.nn.functional.cross_entropy(
        (states @ words.T).flatten(0, 1), torch.tensor(np.asarray(labels)).flatten().long(), ignore_index=-100
    )
    wanted.backward()

    def loss(hidden: Any, table: Any) -> Any:
        losses = planetary.linear_cross_entropy(hidden, table, labels, block=BLOCK)
        return losses.sum() / (labels >= 0).sum()

    found = jax.value_and_grad(loss, (0, 1))(hidden, table)
    assert states.grad is not None
    assert words.grad is not None
    _near(found, (wanted.detach().numpy(), (states.grad.numpy(), words.grad.numpy())))
