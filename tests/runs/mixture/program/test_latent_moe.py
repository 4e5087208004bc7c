"""The LatentMoE model: a composer's outputs, and gradients equal to JAX's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from lockstep_trainer import open_on_iree
from moe_support import TINY, Built, build, worker
from vjp_oracle import run_stablehlo

from planetary.compiler.autodiff.differentiate import value_and_gradients
from planetary.compiler.backends.targets import Target
from planetary.core.errors import LocalProtocolError, UserError
from planetary.models import latent_experts, latent_moe
from planetary.models.expert_blocks import Blocks, blocks_of, capacity_of
from planetary.models.initial import count
from planetary.models.latent_moe import LatentMoeConfig, composer_forward, loss_fn
from planetary.runs.mixture.cost.cost import REPORT_20B, REPORT_176B, one_expert_params
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.program.signature import ComposerShape, state_specs, zeros_for
from planetary.runtime.host import host_features


@pytest.fixture(scope="module")
def half() -> Built:
    """One of two composers, with surrogates."""
    return build(TINY, slots=2, rank=3)


def test_the_reports_shapes_have_the_reports_experts() -> None:
    for preset, shape in (("20b", REPORT_20B), ("176b", REPORT_176B)):
        config = LatentMoeConfig(**latent_moe.PRESETS[preset])
        experts = count(latent_moe.expert_parameters(config, config.n_expert))
        assert (config.n_layer, config.n_expert, config.n_active) == (shape.layers, shape.experts, shape.active)
        assert experts == config.n_expert * one_expert_params(shape)
    twenty = LatentMoeConfig(**latent_moe.PRESETS["20b"])
    dense = count(latent_moe.dense_parameters(twenty))
    assert dense == 751_896_576
    assert f"{(dense + 16 * 16 * one_expert_params(REPORT_20B)) / 1e9:.2f}" == "1.96"  # the report: 1.95


@pytest.mark.parametrize("preset", ["20b", "176b"])
def test_the_reports_shapes_fit_together_from_tokens_to_loss(preset: str) -> None:
    config = msgspec.structs.replace(LatentMoeConfig(**latent_moe.PRESETS[preset]), n_layer=1, batch_size=1)
    shapes = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), latent_moe.parameters(config))
    batch = jax.ShapeDtypeStruct((1, config.sequence_length), jnp.int32)
    found = jax.eval_shape(lambda p, x, y: loss_fn(p, x, y, config=config), shapes, batch, batch)
    assert found.shape == ()


@pytest.mark.slow
def test_gates_are_a_renormalised_softmax_over_the_best() -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((8, 5)).astype(np.float32), rng.standard_normal((30, 5)).astype(np.float32)
    gates, _ = latent_experts.router_gates(weight, x, 3, "topk")
    scores = np.exp(x @ weight.T)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    for row, found in zip(probabilities, np.asarray(gates), strict=True):
        best = np.argsort(-row)[:3]
        assert set(np.flatnonzero(found)) == set(best)
        np.testing.assert_allclose(found[best], row[best] / row[best].sum(), rtol=1e-5)
    by_rank, _ = latent_experts.router_gates(weight, x, 3, "rank")
    np.testing.assert_array_equal(gates, by_rank)


@pytest.mark.slow
def test_sole_composer_equals_the_ordinary_model_bit_for_bit() -> None:
    """A composer that owns everything computes the ordinary model bit for bit."""
    alone = build(TINY, slots=TINY.n_expert, rank=3)
    plain = build(TINY, slots=TINY.n_expert, rank=0)
    for one in (alone, plain):
        one.give_ownership(np.tile(np.arange(TINY.n_expert), (TINY.n_layer, 1)))
    found, expected = alone.gradients(), plain.gradients()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] == value).all(), name
    loss = jax.jit(lambda p: loss_fn(p, alone.tensors["tokens"], alone.tensors["targets"], config=TINY))
    assert float(found["loss"]) == pytest.approx(float(loss(alone.whole_model())), rel=1e-6)


@pytest.mark.slow
def test_gradients_after_export_are_jaxs_and_the_detach_survives(half: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = half.gradients()
    # An independent detach: JAX's own, which leaves no trace in an export.
    monkeypatch.setattr(latent_moe, "stop_gradient", jax.lax.stop_gradient)
    params, experts, held, probes = half.trees()

    def loss(p: Any, e: Any, q: Any, detach: bool) -> jax.Array:
        t = half.tensors
        return composer_forward(p, e, held, q, (t["tokens"], t["targets"]), config=TINY, detach=detach)[0]

    def both(*given: Any) -> Any:
        return jax.grad(loss, argnums=(0, 1, 2))(*given, True), jax.grad(loss)(*given, False)

    (by_params, by_experts, by_probes), attached = jax.jit(both)(params, experts, probes)
    expected = {f"gradient.{name}": value for name, value in half.named(by_params).items()}
    for i in range(TINY.n_layer):
        expected |= {f"gradient.layers.{i}.experts.{k}": v for k, v in by_experts[i].items()}
        expected[f"layers.{i}.seen.g_y"] = by_probes[i]
    for name, value in expected.items():
        scale = np.abs(value).max()
        assert scale > 0, name
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=2e-5 * scale, err_msg=name)
    # Without the detach the projection below the experts would have another gradient.
    without = half.named(attached)["layers.0.latent.down"]
    assert np.abs(ours["gradient.layers.0.latent.down"] - without).max() > 1e-3 * np.abs(without).max()


def test_workers_sketch_gradient_is_the_composers_bit_for_bit(half: Built) -> None:
    """The gradient that a worker computes from a sketch is the composer's, bit for bit."""
    direct = half.gradients()
    for i in range(TINY.n_layer):
        found = worker()("gradients", half.worker_inputs(i, direct))
        for name in ("up", "down"):
            expected = direct[f"gradient.layers.{i}.experts.{name}"]
            assert np.abs(expected).max() > 0
            assert (found[f"gradient.{name}"] == expected).all()


def test_proxy_is_the_product_of_gradients_and_outputs(half: Built) -> None:
    direct = half.gradients()
    inputs = half.worker_inputs(0, direct)
    found = worker()("proxy", inputs)["proxy"]
    for slot in range(2):
        hidden = np.maximum(inputs["u"] @ inputs["up"][slot], 0) ** 2
        output = (hidden @ inputs["down"][slot]) * inputs["gates"][:, slot, None]
        assert found[slot] == pytest.approx(float(np.sum(output * inputs["g_y"])), rel=1e-4, abs=1e-9)


def test_one_program_serves_every_composer(half: Built) -> None:
    first = half.gradients()
    other = build(TINY, slots=2, rank=3, composer=1)
    assert other.program.digest == half.program.digest
    assert float(other.gradients()["loss"]) != float(first["loss"])


@pytest.mark.slow
def test_ternary_swiglu_experts_have_gradients() -> None:
    config = msgspec.structs.replace(TINY, ternary=True, activation="swiglu", select="rank")
    found = build(config, slots=2, rank=3).gradients()
    assert all(np.isfinite(value).all() for value in found.values())
    assert all(np.abs(v).max() > 0 for k, v in found.items() if "experts" in k)


@pytest.mark.parametrize("rank", [3, TINY.n_hidden], ids=["surrogates", "copies"])
@pytest.mark.slow
def test_capacity_for_all_tokens_equals_no_capacity(rank: int) -> None:
    dense, roomy = (
        build(msgspec.structs.replace(TINY, capacity=c), slots=2, rank=rank, detach=False) for c in (0.0, 100.0)
    )
    expected, found = dense.gradients(), roomy.gradients()
    for name, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def drawn_mixture(
    tokens: int, experts: int, active: int, *, swiglu: bool = False, width: int = 4, hidden: int = 6, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return weights, inputs and gates; no token chooses expert 0, every second one the last expert."""
    rng = np.random.default_rng(seed)
    up, gate = (rng.standard_normal((experts, width, hidden)).astype(np.float32) for _ in range(2))
    down = rng.standard_normal((experts, hidden, width)).astype(np.float32)
    gates = np.zeros((tokens, experts), np.float32)
    for token in range(tokens):
        wanted = rng.choice(np.arange(1, experts), active, replace=False)
        wanted[0] = experts - 1 if token % 2 == 0 and experts - 1 not in wanted else wanted[0]
        gates[token, wanted] = rng.random(active) + 0.1
    weights = {"up": up, "down": down} | ({"gate": gate} if swiglu else {})
    return weights, rng.standard_normal((tokens, width)).astype(np.float32), gates


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "active", "size"), [(13, 5, 2, 4), (40, 9, 1, 1), (9, 4, 3, 16)])
def test_blocks_have_values_and_gradients_of_every_expert(
    tokens: int, experts: int, active: int, size: int, swiglu: bool
) -> None:
    """Whatever tokens choose, none is dropped: of JAX's own gradient of the dense sum, by our differentiation."""
    given = drawn_mixture(tokens, experts, active, swiglu=swiglu)
    blocks = Blocks((tokens * active + experts * (size - 1)) // size, size)

    def loss(weights: Any, u: Any, gates: Any, *, sparse: bool) -> Any:
        if sparse:
            y = latent_experts.mixture_in_blocks(weights, u, gates, blocks, active=active, capacity=tokens)
        else:
            y = latent_experts.mixture(weights, u, gates)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    chosen = given[2] > 0
    text = jax.jit(functools.partial(loss, sparse=True), keep_unused=True).lower(*given).as_text()
    leaves, tree = jax.tree.flatten(given)
    value, *gradients = run_stablehlo(value_and_gradients(text, range(len(leaves))), leaves)
    expected = jax.value_and_grad(functools.partial(loss, sparse=False), argnums=(0, 1, 2))(*given)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    found = jax.tree.unflatten(tree, gradients)
    for ours, theirs in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[1][:2]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[2][chosen], np.asarray(expected[1][2])[chosen], rtol=1e-4, atol=1e-5)
    assert (found[2][~chosen] == 0).all()  # an expert that was not chosen is not computed


def test_of_more_gates_the_largest_count() -> None:
    """A trial draws any gates. Every expert keeps its rows, and a NaN reaches the token's result."""
    weights, u, _ = drawn_mixture(9, 6, 2)
    gates = np.random.default_rng(3).standard_normal((9, 6)).astype(np.float32)
    kept = np.where(np.sort(gates, axis=1)[:, -2:-1] <= gates, np.maximum(gates, 0), 0)
    given = {name: jnp.asarray(value) for name, value in weights.items()}
    blocks = blocks_of(9, 2, 6, 9)
    found = latent_experts.mixture_in_blocks(given, u, gates, blocks, active=2, capacity=9)
    np.testing.assert_allclose(found, latent_experts.mixture(given, u, kept), rtol=1e-4, atol=1e-5)
    gates[4, 2] = np.nan
    found = np.asarray(latent_experts.mixture_in_blocks(given, u, gates, blocks, active=2, capacity=9))
    assert np.isnan(found[4]).all()
    assert np.isfinite(np.delete(found, 4, axis=0)).all()


def test_an_expert_that_is_full_loses_the_later_tokens() -> None:
    rng = np.random.default_rng(0)
    up, down, u = (rng.standard_normal(s).astype(np.float32) for s in ((1, 4, 6), (1, 6, 4), (5, 4)))
    experts, gates = {"up": up, "down": down}, np.ones((5, 1), np.float32)
    experts = {name: jnp.asarray(value) for name, value in experts.items()}
    full = latent_experts.mixture(experts, u, gates)
    found = latent_experts.sparse_mixture(experts, u, gates, active=1, capacity=3)
    np.testing.assert_allclose(found[:3], full[:3], rtol=1e-5)
    assert (np.asarray(found[3:]) == 0).all()
    assert capacity_of(512, 4, 16, 1.5) == 192
    assert capacity_of(512, 4, 4, 1.5) == 512
    assert capacity_of(512, 4, 16, 0.0) == 512


@pytest.mark.parametrize("tokens", [1, 100, 16_384])
@pytest.mark.parametrize("experts", [1, 8, 128])
@pytest.mark.parametrize("capacity", [1, 7, 16_384])
def test_blocks_hold_the_worst_choice(tokens: int, experts: int, capacity: int) -> None:
    capacity, choices = min(tokens, capacity), tokens * min(2, experts)
    blocks = blocks_of(tokens, 2, experts, capacity)
    rng, worst = np.random.default_rng(0), 0
    for _ in range(100):
        loads = rng.integers(0, capacity + 1, experts)
        loads = (
            np.minimum(loads, capacity)
            if rng.random() < 0.5
            else np.minimum(loads // blocks.size * blocks.size + 1, capacity)
        )
        while (over := int(loads.sum()) - choices) > 0:
            at = int(np.argmax(loads))
            loads[at] -= min(over, int(loads[at]))
        worst = max(worst, int(np.sum(-(-loads // blocks.size))))
    assert worst <= blocks.count


@pytest.mark.compiles
@pytest.mark.soak  # ten seconds of compiling; the expert worker's program below stays in every run
def test_iree_gives_the_same_gradients(half: Built) -> None:
    iree = open_on_iree(half.program, Target("cpu", "host", host_features()), functions=["gradients"])
    expected, found = half.gradients(), iree("gradients", half.tensors)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4 * np.abs(value).max(), err_msg=name)


@pytest.mark.compiles
def test_iree_gives_the_same_expert_gradients_and_update(half: Built) -> None:
    reference = worker()
    program = reference.program
    iree = open_on_iree(program, Target("cpu", "host", host_features()))
    moments = zeros_for(state_specs(program))
    tensors = half.worker_inputs(0, half.gradients()) | moments | {"rate": np.array(0.01, np.float32)}
    for function in ("proxy", "gradients", "update"):
        expected, found = reference(function, tensors), iree(function, tensors)
        tensors |= expected
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4 * np.abs(value).max(), err_msg=name)


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(UserError, match="n_active=5"):
        LatentMoeConfig(n_expert=4, n_active=5)
    with pytest.raises(UserError, match="slots ≥ 1"):
        ComposerShape(0, 1, 1)
    with pytest.raises(LocalProtocolError, match="no function 'train'"):
        build(TINY, slots=2, rank=3).run("train", {})


def test_ownership_reaches_the_step_as_an_argument(half: Built) -> None:
    owners = ownership.round_robin(TINY.n_layer, TINY.n_expert, 2)
    assert (half.slots == ownership.owned_slots(owners, 0)).all()
    names = [spec.name for spec in half.program.functions["gradients"].arguments]
    assert "layers.0.surrogates.ownership" in names
