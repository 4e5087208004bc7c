"""The start of a training: the model drawn from the seed, and the division among composers, by load where wanted."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from planetary.core.tensors import Tensors
from planetary.data.reader import batches, read_slice
from planetary.data.slices import SliceOrder
from planetary.models.initial import draw, filled, flat_names
from planetary.models.latent_moe import dense_parameters, expert_loads, expert_parameters, parameters, routed
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.ownership import load_aware
from planetary.runs.mixture.methods.recent_rows import RecentRows, calibration_rows, no_rows, remember
from planetary.runs.mixture.methods.surrogate import are_copies, expert_outputs, fit_surrogates, initial_surrogates
from planetary.runs.mixture.program.signature import in_layer, state_specs, zeros_for
from planetary.runs.mixture.training.participant_states import (
    ComposerState,
    Surrogates,
    SyncerState,
    TrainingState,
    computed_weights,
    expert_name,
)
from planetary.runs.mixture.training.replicas import replicated_slots
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runtime.device_program import Program


def drawn_model(config: LatentMoeConfig) -> Tensors:
    """Return the ordinary model's parameters from the seed, by the names of `models.latent_moe`."""
    return flat_names(draw(parameters(config), config.seed))


def initial_training(
    config: LatentMoeConfig,
    training: MoeTraining,
    owners: np.ndarray,
    composer: Program,
    expert: Program,
    *,
    given: Tensors | None = None,
    rows: Sequence[RecentRows] = (),
) -> TrainingState:
    """Return the state before the first step, from the same model for any number of composers.

    Args:
        config: the model.
        training: how it is trained.
        owners: i32 [layers, experts].
        composer, expert: the programs.
        given: the ordinary model's parameters by the names of `models.latent_moe`; None: `drawn_model`.
        rows: of each layer, that surrogates are fitted on; none: they are units of their experts.
    """
    model = drawn_model(config) if given is None else given
    dense = {name: model[name] for name in flat_names(dense_parameters(config))}
    names = expert_parameters(config, config.n_expert)
    whole = [{n: model[in_layer(i, "experts", n)] for n in names} for i in range(config.n_layer)]
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    if training.rank and training.composers > 1:
        computed = [computed_weights(w, config) for w in whole]
        pairs = [initial_surrogates(w, training.rank) for w in computed]
        if rows and not are_copies(training.rank, config):
            layers = zip(computed, pairs, rows, owners, strict=True)
            pairs = [fitted_to(*layer, training) for layer in layers]
    by_workers = training.workers_fit(config)
    composers = []
    for number, slots in enumerate(replicated_slots(owners, training.composers, training.replicas)):
        experts = tuple(
            {name: ownership.take_slots(value[None], slots[i : i + 1])[0] for name, value in whole[i].items()}
            for i in range(config.n_layer)
        )
        composers.append(
            ComposerState(
                number,
                slots,
                dense,
                zeros_for(state_specs(composer)),
                experts,
                tuple(zeros_for(state_specs(expert)) for _ in whole),
                tuple(no_rows(training.fit.capacity, config.n_latent, config.n_expert) for _ in whole),
                tuple({} for _ in whole),
                tuple(first_fit(*pair, slots[i]) for i, pair in enumerate(pairs)) if by_workers else (),
            )
        )
    surrogates = None
    if pairs:
        surrogates = Surrogates(
            tuple(a for a, _ in pairs), tuple(b for _, b in pairs), np.zeros(owners.shape, np.int64)
        )
    start = dict(dense)
    if training.replicas > 1:
        start |= {
            expert_name(i, weight, expert): value[expert]
            for i, layer in enumerate(whole)
            for weight, value in layer.items()
            for expert in range(config.n_expert)
        }
    return TrainingState(0, tuple(composers), surrogates, SyncerState(start, {}))


def first_fit(a: np.ndarray, b: np.ndarray, slots: np.ndarray) -> Tensors:
    """Return the first surrogates of one layer's experts i32 [slots], of all of which A and B are given."""
    taken = {n: ownership.take_slots(v[None], slots[None])[0] for n, v in (("a", a), ("b", b))}
    return {**taken, "error": np.zeros(len(slots), np.float32), "progress": np.array(0, np.int64)}


def fitted_to(
    weights: Tensors, pair: tuple[np.ndarray, np.ndarray], rows: RecentRows, owners: np.ndarray, training: MoeTraining
) -> tuple[np.ndarray, np.ndarray]:
    """Return the surrogates of one layer that its owners' first fit makes of `pair`."""
    a, b = (matrix.copy() for matrix in pair)
    for owner in range(training.composers):
        ids = np.flatnonzero(owners == owner)
        u, counts = calibration_rows(rows, ids, training.fit.rows)
        wanted = expert_outputs({name: value[ids] for name, value in weights.items()}, u)
        fitted = fit_surrogates(u, counts, wanted, a=a[ids], b=b[ids], options=training.fit)
        a[ids], b[ids] = fitted.a, fitted.b
    return a, b


def first_rows(model: Tensors, config: LatentMoeConfig, order: SliceOrder, capacity: int) -> list[RecentRows]:
    """Return of each layer the inputs and gates of a model's experts in the first `capacity` training tokens.

    Raises:
        UserError: the parameters are not of this model, or the tokens cannot be read.
    """
    params = filled(parameters(config), model)
    route = jax.jit(functools.partial(routed, config=config))
    found = [no_rows(capacity, config.n_latent, config.n_expert) for _ in range(config.n_layer)]
    for tokens in _first_tokens(config, order, capacity):
        seen = route(params, tokens)
        found = [remember(old, np.asarray(u), np.asarray(g)) for old, (u, g) in zip(found, seen, strict=True)]
    return found


def _first_tokens(config: LatentMoeConfig, order: SliceOrder, count: int) -> Iterator[np.ndarray]:
    """Yield the run's first training tokens in batches i32 [B, T], `count` of them at least."""
    for step in range(-(-count // order.slice_tokens)):
        for tokens, _ in batches(read_slice(order.locate(step)), config.batch_size, config.sequence_length):
            yield tokens


LOAD_TOKENS = 16_384
"""Of the run's first training tokens that are routed, at least: with 256 experts, top 16, a thousand of each."""


def owners_by_load(model: Tensors, config: LatentMoeConfig, order: SliceOrder, composers: int) -> np.ndarray:
    """Return the load-aware ownership map of a model, i32 [layers, experts].

    Args:
        model: all parameters, by the names of `models.latent_moe`.
        config: sizes.
        order: of the training tokens.
        composers: C.

    Raises:
        UserError: the parameters are not of this model, or the tokens cannot be read.
    """
    params = filled(parameters(config), model)
    route = jax.jit(functools.partial(expert_loads, config=config))
    loads = np.zeros((config.n_layer, config.n_expert), np.int64)
    for tokens in _first_tokens(config, order, LOAD_TOKENS):
        loads += np.asarray(route(params, tokens))
    return load_aware(loads, composers)
