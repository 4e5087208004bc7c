"""Parameters in fewer bits stand for the wide ones that they are closest to, in every model's code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.core.tensors import TensorSpec, host_dtype
from planetary.data.tokenizer import ByteTokenizer
from planetary.models import gpt2, latent_moe, llama, mamba2, moe, nanochat
from planetary.models.context import WholeText
from planetary.models.initial import flat_names
from planetary.runs.serve.program.cache_kinds import PAGE
from planetary.runs.serve.program.call_context import PagedContext
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.program.weight_precision import Narrow, Precision, narrowed

SIZES: dict[ModuleType, dict[str, Any]] = {
    nanochat: {"n_layer": 1, "n_head": 2, "n_embd": 64},
    gpt2: {"n_layer": 1, "n_head": 2, "n_embd": 64, "sequence_length": 16},
    llama: {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 64, "n_hidden": 96, "tie_embeddings": True},
    moe: {**moe.PRESETS["tiny"], "n_embd": 64},
    # With 24 experts the router is in fewer bits, too, and tokens copy the weights of their experts.
    latent_moe: {**latent_moe.PRESETS["tiny"], "n_embd": 64, "n_latent": 32, "n_hidden": 64, "n_expert": 24},
    mamba2: {"n_layer": 1, "n_embd": 64, "n_state": 8, "head_size": 16},
}


def model_of(module: ModuleType) -> TracedModel:
    options = {**SIZES[module], "vocab_size": 64}
    _, params, _ = module.build(**options)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + rng.normal(0, 0.1, np.shape(leaf)).astype(np.float32), params)
    return TracedModel(
        name="m",
        decode=partial(module.decode, **options),
        params=params,
        specs=tuple(TensorSpec(name, "f32", leaf.shape) for name, leaf in flat_names(params).items()),
        sizes=None,
        vocabulary=64,
        window=16,
        tokenizer=ByteTokenizer(),
    )


def widened(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.__jax_array__() if isinstance(leaf, Narrow) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Narrow),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", [one if one in (llama, nanochat) else pytest.param(one, marks=pytest.mark.slow) for one in SIZES]
)
def test_every_models_code_takes_them_for_the_wide_ones(module: ModuleType) -> None:
    model = model_of(module)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 9)), jnp.int32)
    for precision in get_args(Precision)[1:]:
        narrow = narrowed(model, precision)
        assert any(spec.dtype != "f32" for spec in narrow.specs)
        found = narrow.decode(narrow.params, tokens, WholeText(tokens))
        expected = narrow.decode(widened(narrow.params), tokens, WholeText(tokens))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("precision", "most"), [("bf16", 2**-8), ("int8", 0.5 / 127), ("int4", 0.5 / 7)])
def test_no_number_is_further_off_than_half_a_level(precision: Precision, most: float) -> None:
    model = model_of(llama)
    narrow = narrowed(model, precision)
    for wide, near in zip(jax.tree.leaves(model.params), jax.tree.leaves(widened(narrow.params)), strict=True):
        if wide.shape[-1] % 32 == 0 and wide.ndim == 2:
            blocks = np.max(np.abs(wide.reshape(len(wide), -1, 32)), axis=-1, keepdims=True)
            assert np.all(np.abs(wide - near).reshape(len(wide), -1, 32) <= 1.001 * most * blocks)
        else:
            np.testing.assert_allclose(wide, near, rtol=2**-8)


def test_they_take_fewer_bytes_and_travel_as_they_are() -> None:
    model = model_of(llama)
    sizes = {}
    for precision in get_args(Precision):
        narrow = narrowed(model, precision)
        arrays = narrow.arrays()
        assert len(arrays) == len(narrow.specs) == len(jax.tree.leaves(narrow.params))
        for spec in narrow.specs:
            assert (arrays[spec.name].dtype, arrays[spec.name].shape) == (host_dtype(spec.dtype), spec.shape)
        sizes[precision] = sum(array.nbytes for array in arrays.values())
    assert sizes["f32"] > 1.9 * sizes["bf16"] > 1.9 * 1.7 * sizes["int8"] > 1.9 * 1.7 * 1.7 * sizes["int4"]


def test_later_versions_are_narrowed_too() -> None:
    model = model_of(llama)
    model = replace(model, refresh=lambda version: None if version else replace(model, version=1))
    narrow = narrowed(model, "int8")
    assert narrow.refresh is not None
    assert narrow.refresh(1) is None
    newer = narrow.refresh(0)
    assert newer is not None
    assert (newer.version, newer.specs) == (1, narrow.specs)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_a_narrow_table_of_positions_is_looked_up(precision: Precision) -> None:
    table = narrowed(model_of(gpt2), precision).params["wpe"]["weight"]
    one, cache = jnp.ones((1,), jnp.int32), jnp.zeros((9, 2, 1, PAGE, 8))
    context = PagedContext(one[None], 7 * one, one, jnp.ones((1, 8), jnp.int32), cache)
    np.testing.assert_array_equal(context.rows(table)[0, 0], jnp.asarray(table)[7])
