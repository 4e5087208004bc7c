"""Layers of JAX's libraries as losses, found among the public names of their modules.

`cases()` yields (library, name, case). A case is a function that returns (loss, params, batch), or a sentence that says
why the name is no layer. A name that is in no table here is a layer of one array; a new one fails until it is entered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Build = Callable[[], tuple[Any, Any, Any]]
Case = tuple[str, str, "Build | str"]

ROWS, WIDTH = 4, 8
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
Y = _RNG.normal(size=(ROWS, 1)).astype(np.float32)
IMAGES = {n: _RNG.normal(size=(2, *([6] * n), WIDTH)).astype(np.float32) for n in (1, 2, 3)}


def _measured(output: Any, y: Any) -> Any:
    """A scalar in which every float of an output counts differently."""
    total = 0.0
    for leaf in jax.tree.leaves(output):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            weights = jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
            total += jnp.sum(jnp.sin(leaf) * weights)
    return total + jnp.mean(y)


def of_function(function: Callable[[Any], Any], x: Any = X) -> Build:
    """A case of a function of one array: a parameter that is added to the input, and ties at zero."""

    def build() -> tuple[Any, Any, Any]:
        start = np.zeros_like(x)
        start.flat[::3] = -np.asarray(x).flat[::3]  # exactly at the kink of most activations

        def loss(params: Any, x: Any, y: Any) -> Any:
            return _measured(function(x + params["shift"]), y)

        return loss, {"shift": start}, (x, Y)

    return build


# --- jax.nn ---------------------------------------------------------------------------------------------------

_HEADS = _RNG.normal(size=(2, 5, 2, 4)).astype(np.float32)
_BLOCKS = _RNG.normal(size=(2, 4, 32)).astype(np.float32)
_JAX_NN: dict[str, Build | str] = {
    "dot_product_attention": of_function(lambda x: jax.nn.dot_product_attention(x, x * 2, jnp.cos(x)), _HEADS),
    "get_scaled_dot_general_config": "a configuration",
    "initializers": "a module of initial values",
    "one_hot": of_function(lambda x: jax.nn.one_hot(jnp.argmax(x, -1), WIDTH) * x),
    "log1mexp": of_function(lambda x: jax.nn.log1mexp(jnp.abs(x) + 0.1)),
    "scaled_dot_general": "for NVIDIA's block-scaled types on a GPU",
    "scaled_matmul": "for NVIDIA's block-scaled types on a GPU",
}


def _jax_nn() -> Iterator[Case]:
    for name in _public(jax.nn):
        yield "jax.nn", name, _JAX_NN.get(name) or of_function(getattr(jax.nn, name))


# --- Flax NNX -------------------------------------------------------------------------------------------------


def _of_nnx(make: Callable[[Any], Any], x: Any = X, call: Callable[[Any, Any], Any] | None = None) -> Build:
    def build() -> tuple[Any, Any, Any]:
        from flax import nnx

        graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

        def loss(params: Any, x: Any, y: Any) -> Any:
            layer = nnx.merge(graph, params["layer"], rest, copy=True)
            return _measured(layer(x + params["shift"]) if call is None else call(layer, x + params["shift"]), y)

        # Away from zero: a bias of zero hides the gradients before it.
        moved = jax.tree.map(lambda v: v + 0.1 * jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape), params)
        return loss, {"layer": moved, "shift": np.zeros_like(x)}, (x, Y)

    return build


def _flax() -> Iterator[Case]:
    from flax import nnx

    sequence = IMAGES[1]
    cells = ("GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell")
    table: dict[str, Build | str] = {
        "BatchNorm": _of_nnx(lambda r: nnx.BatchNorm(WIDTH, rngs=r)),
        "Bidirectional": _of_nnx(
            lambda r: nnx.Bidirectional(nnx.RNN(nnx.GRUCell(8, 8, rngs=r)), nnx.RNN(nnx.GRUCell(8, 8, rngs=r))),
            sequence,
        ),
        "Conv": _of_nnx(lambda r: nnx.Conv(WIDTH, 3, (3, 3), rngs=r), IMAGES[2]),
        "ConvTranspose": _of_nnx(lambda r: nnx.ConvTranspose(WIDTH, 3, (3, 3), strides=(2, 2), rngs=r), IMAGES[2]),
        "Dict": "a container",
        "Dropout": _of_nnx(lambda r: nnx.Dropout(0.5, rngs=r)),
        "Einsum": _of_nnx(lambda r: nnx.Einsum("ab,bc->ac", (WIDTH, 3), (3,), rngs=r)),
        "Embed": _of_nnx(
            lambda r: nnx.Embed(5, WIDTH, rngs=r),
            call=lambda layer, x: layer(jnp.argmax(x, -1) % 5) * x + layer.attend(x).sum(),
        ),
        "GroupNorm": _of_nnx(lambda r: nnx.GroupNorm(WIDTH, 2, rngs=r)),
        "InstanceNorm": _of_nnx(lambda r: nnx.InstanceNorm(WIDTH, rngs=r), IMAGES[2]),
        "List": "a container",
        "LoRA": _of_nnx(lambda r: nnx.LoRA(WIDTH, 2, 3, rngs=r)),
        "LoRALinear": _of_nnx(lambda r: nnx.LoRALinear(WIDTH, 3, lora_rank=2, rngs=r)),
        "Module": "the base class",
        "MultiHeadAttention": _of_nnx(
            lambda r: nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=r), sequence, lambda layer, x: layer(x)
        ),
        "PReLU": _of_nnx(lambda r: nnx.PReLU()),
        "RNN": _of_nnx(lambda r: nnx.RNN(nnx.LSTMCell(WIDTH, 6, rngs=r)), sequence),
        "RNNCellBase": "the base class of cells",
        "Sequential": _of_nnx(
            lambda r: nnx.Sequential(nnx.Linear(WIDTH, 5, rngs=r), nnx.gelu, nnx.Linear(5, 2, rngs=r))
        ),
        "SpectralNorm": _of_nnx(
            lambda r: nnx.SpectralNorm(nnx.Linear(WIDTH, 5, rngs=r), rngs=r),
            call=lambda layer, x: layer(x, update_stats=True),
        ),
        "WeightNorm": _of_nnx(lambda r: nnx.WeightNorm(nnx.Linear(WIDTH, 5, rngs=r), rngs=r)),
    }
    for name in cells:
        cell = getattr(nnx, name)
        table[name] = _of_nnx(
            lambda r, cell=cell: cell(WIDTH, 6, rngs=r),
            call=_step,
        )
    for name in ("Linear", "LayerNorm", "RMSNorm"):
        layer = getattr(nnx, name)
        extra = (5,) if name == "Linear" else ()
        table[name] = _of_nnx(lambda r, layer=layer, extra=extra: layer(WIDTH, *extra, rngs=r))
    table["LinearGeneral"] = _of_nnx(lambda r: nnx.LinearGeneral(WIDTH, (2, 3), rngs=r))
    for name in _public(nnx):
        found = getattr(nnx, name)
        if inspect.isclass(found) and issubclass(found, nnx.Module):
            yield "flax.nnx", name, table.get(name) or _of_nnx(lambda r, found=found: found(WIDTH, rngs=r))
    from flax.nnx.nn import activations

    for name in sorted(set(activations.__all__) if hasattr(activations, "__all__") else ()):
        yield "flax.nnx", name, _JAX_NN.get(name) or of_function(getattr(nnx, name))
    for name in ("avg_pool", "max_pool", "min_pool"):
        pool = getattr(nnx, name)
        yield "flax.nnx", name, of_function(lambda x, pool=pool: pool(x, (3, 3), (2, 2), "SAME"), IMAGES[2])


def _step(cell: Any, x: Any) -> Any:
    carry = jnp.zeros((ROWS, 6)) + jnp.sin(x[:, :6])
    return cell((carry, carry * 2) if "LSTM" in type(cell).__name__ else carry, x)


# --- Equinox --------------------------------------------------------------------------------------------------


def _of_equinox(make: Callable[[Any], Any], x: Any = X, call: Callable[[Any, Any], Any] | None = None) -> Build:
    def build() -> tuple[Any, Any, Any]:
        import equinox

        params, static = equinox.partition(make(jax.random.key(0)), equinox.is_inexact_array)

        def loss(params: Any, x: Any, y: Any) -> Any:
            layer = equinox.combine(params["layer"], static)
            given = x + params["shift"]
            return _measured(jax.vmap(layer)(given) if call is None else call(layer, given), y)

        return loss, {"layer": params, "shift": np.zeros_like(x)}, (x, Y)

    return build


def _channels_first(n: int) -> np.ndarray:
    return np.moveaxis(IMAGES[n], -1, 1)


def _equinox() -> Iterator[Case]:
    from equinox import nn

    key = jax.random.key(1)
    table: dict[str, Build | str] = {
        "AdaptivePool": _of_equinox(lambda k: nn.AdaptivePool(3, 2, jnp.max), _channels_first(2)),
        "BatchNorm": _of_equinox(_stateful(lambda: nn.BatchNorm(WIDTH, "rows", mode="batch")), call=_with_state),
        "Conv": _of_equinox(lambda k: nn.Conv(2, WIDTH, 3, 3, key=k), _channels_first(2)),
        "ConvTranspose": _of_equinox(lambda k: nn.ConvTranspose(2, WIDTH, 3, 3, stride=2, key=k), _channels_first(2)),
        "Dropout": _of_equinox(lambda k: nn.Dropout(0.5), call=lambda layer, x: layer(x, key=key)),
        "Embedding": _of_equinox(
            lambda k: nn.Embedding(5, WIDTH, key=k), call=lambda layer, x: jax.vmap(layer)(jnp.argmax(x, -1) % 5) * x
        ),
        "GRUCell": _of_equinox(lambda k: nn.GRUCell(WIDTH, WIDTH, key=k), call=lambda c, x: jax.vmap(c)(x, jnp.sin(x))),
        "GroupNorm": _of_equinox(lambda k: nn.GroupNorm(2, WIDTH)),
        "Identity": _of_equinox(lambda k: nn.Identity()),
        "LSTMCell": _of_equinox(
            lambda k: nn.LSTMCell(WIDTH, WIDTH, key=k), call=lambda c, x: jax.vmap(c)(x, (jnp.sin(x), jnp.cos(x)))
        ),
        "Lambda": _of_equinox(lambda k: nn.Lambda(jax.nn.gelu)),
        "LayerNorm": _of_equinox(lambda k: nn.LayerNorm(WIDTH)),
        "Linear": _of_equinox(lambda k: nn.Linear(WIDTH, 5, key=k)),
        "MLP": _of_equinox(lambda k: nn.MLP(WIDTH, 3, 6, 2, key=k)),
        "MultiheadAttention": _of_equinox(
            lambda k: nn.MultiheadAttention(2, WIDTH, key=k), IMAGES[1], lambda a, x: jax.vmap(lambda s: a(s, s, s))(x)
        ),
        "PReLU": _of_equinox(lambda k: nn.PReLU()),
        "Pool": _of_equinox(lambda k: nn.Pool(0.0, jax.lax.add, 2, 3), _channels_first(2)),
        "RMSNorm": _of_equinox(lambda k: nn.RMSNorm(WIDTH)),
        "RotaryPositionalEmbedding": _of_equinox(lambda k: nn.RotaryPositionalEmbedding(WIDTH), IMAGES[1]),
        "Sequential": _of_equinox(lambda k: nn.Sequential([nn.Linear(WIDTH, 5, key=k), nn.Lambda(jnp.tanh)])),
        "Shared": "a container of shared parameters",
        "SpectralNorm": _of_equinox(
            _stateful(lambda: nn.SpectralNorm(nn.Linear(WIDTH, 5, key=key), "weight", key=key)), call=_with_state
        ),
        "State": "the state of other layers",
        "StateIndex": "an index into a state",
        "StatefulLayer": "a base class",
        "WeightNorm": _of_equinox(lambda k: nn.WeightNorm(nn.Linear(WIDTH, 5, key=k))),
    }
    for n in (1, 2, 3):
        x = _channels_first(n)
        for name in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            made = getattr(nn, f"{name}{n}d")
            table[f"{name}{n}d"] = _of_equinox(lambda k, made=made: made(3), x)
        for name in ("AvgPool", "MaxPool"):
            made = getattr(nn, f"{name}{n}d")
            table[f"{name}{n}d"] = _of_equinox(lambda k, made=made: made(3, 2, 1), x)
        for name in ("Conv", "ConvTranspose"):
            made = getattr(nn, f"{name}{n}d")
            table[f"{name}{n}d"] = _of_equinox(lambda k, made=made: made(WIDTH, 3, 3, 2, padding=1, key=k), x)
    for name in _public(nn):
        made = getattr(nn, name)
        if inspect.isclass(made):
            yield "equinox.nn", name, table.get(name) or _of_equinox(lambda k, made=made: made(WIDTH, key=k))


def _stateful(make: Callable[[], Any]) -> Callable[[Any], Any]:
    def made(key: Any) -> Any:
        from equinox import nn

        layer, state = nn.make_with_state(make)()
        return {"layer": layer, "state": state}

    return made


def _with_state(held: Any, x: Any) -> Any:
    return jax.vmap(held["layer"], in_axes=(0, None), out_axes=(0, None), axis_name="rows")(x, held["state"])[0]


# --- optax losses ---------------------------------------------------------------------------------------------


def _optax() -> Iterator[Case]:
    import optax

    labels = np.abs(X[:, :1]).astype(np.int32) % WIDTH
    other: dict[str, Build | str] = {
        "make_fenchel_young_loss": "makes a loss",
        "ctc_loss": of_function(
            lambda x: optax.ctc_loss(x, jnp.zeros(x.shape[:2]), jnp.asarray([[1, 2], [3, 1]]), jnp.zeros((2, 2))),
            IMAGES[1],
        ),
        "ctc_loss_with_forward_probs": of_function(
            lambda x: optax.ctc_loss_with_forward_probs(
                x, jnp.zeros(x.shape[:2]), jnp.asarray([[1, 2], [3, 1]]), jnp.zeros((2, 2))
            ),
            IMAGES[1],
        ),
        "ntxent": of_function(lambda x: optax.losses.ntxent(x, jnp.asarray([0, 0, 1, 1]))),
        "triplet_margin_loss": of_function(lambda x: optax.losses.triplet_margin_loss(x, jnp.sin(x), jnp.cos(x))),
        "convex_kl_divergence": of_function(lambda x: optax.convex_kl_divergence(x, jax.nn.softmax(jnp.sin(x)))),
        "perceptron_loss": of_function(lambda x: optax.losses.perceptron_loss(x, jnp.sign(jnp.cos(x)))),
    }
    for name in _public(optax.losses):
        function = getattr(optax.losses, name)
        if not inspect.isfunction(function) and not callable(function):
            continue
        if name in other:
            yield "optax.losses", name, other[name]
        elif "integer_labels" in name or name.startswith(
            ("multiclass_hinge", "multiclass_logistic", "multiclass_perc", "multiclass_sparse")
        ):
            yield "optax.losses", name, of_function(lambda x, f=function: f(x, jnp.asarray(labels[:, 0])))
        else:
            yield (
                "optax.losses",
                name,
                of_function(lambda x, f=function: f(x, jax.nn.softmax(jnp.cos(jnp.arange(x.size)).reshape(x.shape)))),
            )


def _public(module: Any) -> list[str]:
    return [name for name in sorted(dir(module)) if not name.startswith("_")]


def cases() -> Iterator[Case]:
    """Yield every public layer of the libraries."""
    yield from _jax_nn()
    yield from _flax()
    yield from _equinox()
    yield from _optax()
