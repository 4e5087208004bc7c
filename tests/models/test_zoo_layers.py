"""The mathematics of the zoo's models, against slower and plainer versions of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stablehlo_interpreter import interpret

from planetary.compiler.frontend.export import find_builder
from planetary.models import convnet, latent_experts, layers, mamba2, rope, vit
from planetary.models.zoo import ZOO

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "moe", "latent_moe", "mamba2"])
def test_no_position_sees_the_future(name: str) -> None:
    builder, tiny = find_builder(ZOO[name].source), ZOO[name].options("tiny")
    logits = find_builder(ZOO[name].source.replace(":build", ":logits"))
    params = jax.tree.map(lambda p: p + 0.1 * normal(*p.shape), builder(**tiny)[1])

    def run(tokens: np.ndarray) -> np.ndarray:
        text = jax.jit(lambda p, t: logits(p, t, **tiny), keep_unused=True).lower(params, tokens).as_text()
        return interpret(text, [*jax.tree.leaves(params), tokens])[0]

    tokens = np.arange(8, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 5] = 30
    before, after = run(tokens), run(changed)
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3
    np.testing.assert_allclose(run(tokens[:, :7]), before[:, :7], rtol=1e-4, atol=1e-5)


def test_queries_of_a_group_share_their_key() -> None:
    query, key, value = normal(1, 5, 4, 3), normal(1, 5, 2, 3), normal(1, 5, 2, 3)
    found = np.asarray(jax.jit(layers.causal_attention)(query, key, value)).reshape(5, 4, 3)
    for head in range(4):
        for t in range(5):
            scores = key[0, : t + 1, head // 2] @ query[0, t, head] / np.sqrt(3)
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(found[t, head], weights @ value[0, : t + 1, head // 2], rtol=1e-4, atol=1e-6)


def test_the_cross_entropy_survives_large_logits() -> None:
    logits, targets = np.array([[1e4, 0.0, -1e4]], np.float32), np.array([1], np.int32)
    loss, gradient = jax.jit(jax.value_and_grad(layers.cross_entropy))(logits, targets)
    assert float(loss) == pytest.approx(1e4)
    np.testing.assert_allclose(gradient, [[1, -1, 0]], atol=1e-6)


def test_rotation_turns_pairs_by_position_and_keeps_lengths() -> None:
    x = np.tile(normal(1, 1, 1, 6), (1, 4, 1, 1))
    turned = np.asarray(jax.jit(rope.rotate, static_argnums=2)(x, jnp.arange(4.0), 100.0))[0, :, 0]
    as_complex = (x[0, 0, 0, :3] + 1j * x[0, 0, 0, 3:]) * np.exp(
        1j * np.arange(4)[:, None] * 100.0 ** (-np.arange(3) / 3)
    )
    np.testing.assert_allclose(turned, np.concatenate([as_complex.real, as_complex.imag], -1), rtol=1e-4, atol=1e-6)


# --- mixture of experts -------------------------------------------------------------------------------------


def test_the_best_experts_are_chosen_and_ties_go_to_the_first() -> None:
    scores, choose = normal(50, 6), jax.jit(latent_experts.chosen_experts)
    for k in (1, 2, 6):
        chosen = np.asarray(choose(scores, k))
        assert (chosen.sum(axis=1) == k).all()
        expected = np.zeros_like(chosen)
        np.put_along_axis(expected, np.argsort(-scores, axis=1)[:, :k], True, axis=1)
        np.testing.assert_array_equal(chosen, expected)
    tied = np.array([[1, 1, 1, 2, 0, 0]] * 50, np.float32)
    np.testing.assert_array_equal(choose(tied, 2)[0], [True, False, False, True, False, False])


route = jax.jit(latent_experts.router_gates, static_argnums=(2, 3))


def test_a_token_gets_the_gated_sum_of_its_experts() -> None:
    x, params = normal(7, 4), {"gate": normal(3, 4, 5), "up": normal(3, 4, 5), "down": normal(3, 5, 4)}
    gates, balance = route(normal(3, 4), x, 2, "rank")
    gates = np.asarray(gates)
    assert ((gates > 0).sum(axis=1) == 2).all()
    np.testing.assert_allclose(gates.sum(axis=1), 1, rtol=1e-6)
    assert 0 < float(balance) < 3
    expected = np.zeros_like(x)
    for n in range(7):
        for e in np.flatnonzero(gates[n]):
            gate = x[n] @ params["gate"][e]
            hidden = gate / (1 + np.exp(-gate)) * (x[n] @ params["up"][e])
            expected[n] += gates[n, e] * (hidden @ params["down"][e])
    np.testing.assert_allclose(jax.jit(latent_experts.mixture)(params, x, gates), expected, rtol=1e-4, atol=1e-5)


def test_even_routing_has_a_balance_of_one() -> None:
    router = np.eye(4, dtype=np.float32)
    _, even = route(router, np.eye(4, dtype=np.float32) * 50, 1, "rank")
    _, uneven = route(router, np.eye(4, dtype=np.float32)[[0, 0, 0, 0]] * 50, 1, "rank")
    assert float(even) == pytest.approx(1.0, rel=1e-5)
    assert float(uneven) == pytest.approx(4.0, rel=1e-5)


# --- state space --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_compute_the_recurrence(chunk: int) -> None:
    rng = np.random.default_rng(3)
    x, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in [(2, 10, 3, 4), (2, 10, 5), (2, 10, 5)])
    log_decay = -rng.uniform(0.01, 3, (2, 10, 3)).astype(np.float32)
    state, expected = np.zeros((2, 3, 4, 5)), np.zeros_like(x)
    for t in range(10):
        state = np.exp(log_decay[:, t])[..., None, None] * state + np.einsum("bhp,bn->bhpn", x[:, t], b[:, t])
        expected[:, t] = np.einsum("bhpn,bn->bhp", state, c[:, t])
    found, _ = jax.jit(mamba2.state_space, static_argnums=4)(x, log_decay, b, c, chunk)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_strong_decay_neither_overflows_nor_loses_its_gradient() -> None:
    x, b, c = normal(1, 8, 1, 2), normal(1, 8, 2), normal(1, 8, 2)
    decay = np.full((1, 8, 1), -60.0, np.float32)
    total = lambda d: jnp.sum(mamba2.state_space(x, d, b, c, 4)[0])  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(total))(decay)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_the_short_convolution_looks_back_only() -> None:
    x, params = normal(1, 6, 3), {"weight": normal(3, 1, 4), "bias": normal(3)}
    found = np.asarray(jax.jit(mamba2.short_convolution)(params, x))
    for channel in range(3):
        full = np.convolve(x[0, :, channel], params["weight"][channel, 0, ::-1])[:6] + params["bias"][channel]
        np.testing.assert_allclose(found[0, :, channel], full, rtol=1e-4, atol=1e-5)


# --- images -------------------------------------------------------------------------------------------------


def test_patches_are_what_a_strided_convolution_sees() -> None:
    images, kernel = normal(2, 8, 8, 3), normal(5, 3, 4, 4)
    found = vit.patches(jnp.asarray(images), 4) @ kernel.reshape(5, -1).T
    expected = jax.lax.conv_general_dilated(
        images, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "OIHW", "NHWC")
    ).reshape(2, 4, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_group_normalisation_is_per_example_and_group() -> None:
    x = normal(2, 3, 3, 4)
    params = {"weight": np.full(4, 2.0, np.float32), "bias": np.ones(4, np.float32)}
    found = np.asarray(jax.jit(convnet.group_norm, static_argnums=2)(params, x, 2))
    part = x[1, :, :, 2:]
    expected = 2 * (part - part.mean()) / np.sqrt(part.var() + convnet.NORM_EPSILON) + 1
    np.testing.assert_allclose(found[1, :, :, 2:], expected, rtol=1e-4, atol=1e-5)
