"""Dropout and batch normalisation of Flax, NNX and Equinox, as docs/models.md writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model, export_loss
from planetary.compiler.step.train_step import StepOptions, build_train_step

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.ones(8, np.float32)
Loss = Callable[..., Any]


def linen() -> tuple[Loss, Any]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
            return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))[..., 0]

    net = Net()

    def loss(params: Any, x: Any, y: Any, *, key: Any = None) -> Any:
        if key is None:
            return jnp.mean((net.apply(params, x, False) - y) ** 2)
        out, new = net.apply(params, x, True, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new

    return loss, net.init(jax.random.key(0), X, False)


def nnx_model() -> tuple[Loss, Any]:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.last = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 1, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(self.norm(self.first(x))))[..., 0]

    graph, weights, norms, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)

    def loss(params: Any, x: Any, y: Any, *, key: Any = None) -> Any:
        model = nnx.merge(graph, params["weights"], params["norms"], rest, copy=True)
        if key is None:
            model.eval()
            return jnp.mean((model(x) - y) ** 2)
        model.train()
        nnx.reseed(model, default=key)
        return jnp.mean((model(x) - y) ** 2), {"norms": nnx.state(model, nnx.BatchStat)}

    return loss, {"weights": weights, "norms": norms}


def equinox_model() -> tuple[Loss, Any]:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        first: Any
        norm: Any
        dropout: Any
        last: Any

        def __init__(self, key: Any) -> None:
            one, other = jax.random.split(key)
            self.first, self.last = eqx.nn.Linear(4, 6, key=one), eqx.nn.Linear(6, 1, key=other)
            self.norm, self.dropout = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch"), eqx.nn.Dropout(0.5)

        def __call__(self, x: Any, state: Any, key: Any, inference: bool) -> Any:
            x, state = self.norm(self.first(x), state, inference=inference)
            return self.last(self.dropout(x, key=key, inference=inference))[0], state

    arrays, static = eqx.partition(eqx.nn.make_with_state(Net)(jax.random.key(1)), eqx.is_array)
    model, state = arrays

    def loss(params: Any, x: Any, y: Any, *, key: Any = None) -> Any:
        net, _ = eqx.combine((params["model"], params["state"]), static)
        keys, axes = (None, None) if key is None else (jax.random.split(key, len(x)), 0)
        run = jax.vmap(
            lambda x, key, state: net(x, state, key, keys is None),
            axis_name="batch",
            in_axes=(0, axes, None),
            out_axes=(0, None),
        )
        out, new = run(x, keys, params["state"])
        return jnp.mean((out - y) ** 2), {"state": new}

    return loss, {"model": model, "state": state}


def stepped(model: Model, lease: int) -> dict[str, np.ndarray]:
    plain = StepOptions(optimizer="sgd", momentum=0.0, clip_norm=0.0, weight_decay=0.0)
    step, params = build_train_step(model, plain), model.start
    state = [spec.zeros() for spec in step.spec.opt_state]
    given = [*params.values(), *model.initial("buffer").values(), *state, np.int32(0), np.float32(1), X, Y]
    kinds = [spec.dtype for spec in (*step.spec.params, *step.spec.opt_state)]
    found = run_reference(
        step.portable, "train_step", [*given, *step.spec.keys_of(0, lease, 0)], [*kinds, "f32", "f32"]
    )
    return dict(zip(params, found, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "count"), [(linen, 2), (nnx_model, 2), (equinox_model, 3)])
def test_layers_with_noise_and_statistics_train(make: Callable[[], tuple[Loss, Any]], count: int) -> None:
    loss, params = make()
    model = export_loss(loss, params, (X, Y))
    assert not model.notes
    statistics = [spec.name for spec in model.manifest.of_role("statistic")]
    assert len(statistics) == count
    found, other = stepped(model, 0), stepped(model, 1)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    floats = jax.tree_util.tree_map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), params)
    leaves, tree = jax.tree_util.tree_flatten(params)
    trained = [leaf if float_ else None for leaf, float_ in zip(leaves, jax.tree_util.tree_leaves(floats), strict=True)]

    def of(some: list[Any]) -> Any:
        whole = [leaf if given is None else given for given, leaf in zip(some, leaves, strict=True)]
        return loss(tree.unflatten(whole), X, Y, key=key)

    (_, new), gradients = jax.value_and_grad(of, has_aux=True)(trained)
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    after = {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(new)[0]}
    for (path, leaf), gradient in zip(named, gradients, strict=True):
        name = _name(path)
        if name in statistics:
            np.testing.assert_allclose(found[name], after[name], rtol=1e-6, err_msg=name)
            np.testing.assert_array_equal(found[name], other[name])
        elif gradient is not None:
            np.testing.assert_allclose(found[name], leaf - gradient, atol=1e-5, err_msg=name)
    assert any(not np.array_equal(found[name], other[name]) for name in found), "another lease drew the same numbers"


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
