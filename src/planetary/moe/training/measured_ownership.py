"""Ownership by load: how often the model that a run starts from chooses each expert (PARALLAX, 4.1)."""

from __future__ import annotations

import functools

import jax
import numpy as np

from planetary.core.tensors import Tensors
from planetary.data.reader import batches, read_slice
from planetary.data.slices import SliceOrder
from planetary.models.initial import filled
from planetary.models.latent_moe import expert_loads, parameters
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.methods.ownership import load_aware

TOKENS = 16_384
"""Of the run's first training tokens that are routed, at least: with 256 experts, top 16, a thousand of each."""


def owners_by_load(model: Tensors, config: LatentMoeConfig, order: SliceOrder, composers: int) -> np.ndarray:
    """Return the load-aware ownership map of a model, i32 [layers, experts].

    Args:
        model: all parameters, by the names of `models.latent_moe`.
        config: its sizes.
        order: of the training tokens.
        composers: C.

    Raises:
        UserError: the parameters are not of this model, or the tokens cannot be read.
    """
    params = filled(parameters(config), model)
    route = jax.jit(functools.partial(expert_loads, config=config))
    loads = np.zeros((config.n_layer, config.n_expert), np.int64)
    for step in range(-(-TOKENS // order.slice_tokens)):
        for tokens, _ in batches(read_slice(order.locate(step)), config.batch_size, config.sequence_length):
            loads += np.asarray(route(params, tokens))
    return load_aware(loads, composers)
