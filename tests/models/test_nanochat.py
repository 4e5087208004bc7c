from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.core.errors import UserError
from planetary.models import nanochat

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}


def _count(params: nanochat.Params) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(params))


def _noisy(params: nanochat.Params) -> nanochat.Params:
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: p + 0.1 * rng.standard_normal(p.shape, np.float32), params)


def test_the_default_has_about_three_million_parameters() -> None:
    _, params, (tokens, targets) = nanochat.build()
    assert _count(params) == nanochat.NanoChatConfig().param_count == 3_276_800
    assert tokens.shape == targets.shape == (8, 128)
    assert tokens.dtype == np.int32


@pytest.mark.slow
def test_the_papers_workload_has_exactly_its_parameter_count() -> None:
    options = {"n_layer": 8, "n_head": 8, "n_embd": 512, "vocab_size": 65_536, "sequence_length": 2048}
    config = nanochat.configure(options)
    shapes = jax.eval_shape(lambda: nanochat.init_params(config))
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == 92_274_688
    assert config.param_count == 92_274_688


@pytest.mark.slow
def test_the_first_loss_is_that_of_guessing() -> None:
    loss_fn, params, (tokens, targets) = nanochat.build(**TINY)
    assert float(loss_fn(params, tokens, targets)) == pytest.approx(np.log(32), abs=1e-3)


@pytest.mark.slow
def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    loss_fn, params, _ = nanochat.build(**TINY)
    params = _noisy(params)
    rng = np.random.default_rng(2)
    tokens, targets = (rng.integers(0, 32, (2, 8)).astype(np.int32) for _ in range(2))
    log_probs = jax.nn.log_softmax(nanochat.apply(params, tokens, n_head=2), axis=-1)
    expected = -np.mean(np.take_along_axis(np.asarray(log_probs), targets[..., None], -1))
    assert float(loss_fn(params, tokens, targets)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_no_position_sees_the_future() -> None:
    _, params, _ = nanochat.build(**TINY)
    params = _noisy(params)
    tokens = np.arange(8, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 5] = 30
    before, after = (np.asarray(nanochat.logits(params, t, **TINY)) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


def test_positions_matter_and_only_their_distance() -> None:
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((1, 6, 1, 8)), jnp.float32)
    y = jnp.broadcast_to(x[:, :1], x.shape)  # the same vector everywhere
    turned = np.asarray(nanochat.rotate(y, jnp.arange(6.0)))[0, :, 0]
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(y[0, 0, 0]), rtol=1e-5)
    products = turned @ turned.T
    np.testing.assert_allclose(products[0, 2], products[3, 5], rtol=1e-4)
    assert abs(products[0, 1] - products[0, 4]) > 1e-3


def test_logits_stay_within_the_cap() -> None:
    _, params, _ = nanochat.build(**TINY)
    params["head"] = 1e3 * params["head"] / np.abs(params["head"]).max()
    found = np.asarray(nanochat.apply(params, np.arange(8, dtype=np.int32)[None], n_head=2))
    assert np.abs(found).max() <= nanochat.LOGIT_CAP
    assert np.abs(found).max() > 0.9 * nanochat.LOGIT_CAP


def test_parameters_depend_on_the_seed_alone() -> None:
    one, again, other = (nanochat.build(**TINY, seed=s)[1]["embedding"] for s in (4, 4, 5))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_layers": 2}, "n_layers"),
        ({"n_embd": 30, "n_head": 4}, "multiple of 2"),
        ({"n_layer": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        nanochat.build(**options)
