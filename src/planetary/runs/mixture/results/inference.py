"""A trained mixture as a function from tokens to logits, with real experts or with surrogates in their place; and the
held-out losses of a run's mixture either way, beside those the run reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.config import load_config
from planetary.core.errors import UserError
from planetary.core.tensors import Tensors
from planetary.data.prepare import prepare
from planetary.data.reader import batches, read_slice
from planetary.fleet.gateway.run_files import CONFIG, METRICS
from planetary.models.context import Context
from planetary.models.initial import Draw, filled
from planetary.models.latent_moe import (
    apply,
    composer_logits,
    composer_mixture,
    decode_real,
    dense_parameters,
    forward,
    parameters,
    served_mixture,
)
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.models.layers import cross_entropy
from planetary.runs.mixture.composer.data import Batch
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.program.signature import in_layer
from planetary.runs.mixture.results.run_state import is_run, read_run
from planetary.runs.mixture.status import MixtureMetrics
from planetary.runs.mixture.training.participant_states import ComposerState, Surrogates, assembled, merged_model
from planetary.runs.mixture.training.saved import SavedTraining
from planetary.runs.rounds.metrics import RoundMetrics


class ExpertSelection(msgspec.Struct, frozen=True):
    """Which experts a model runs with: all real ones, surrogates for all, or those a composer has."""

    kind: Literal["real", "surrogates", "composer"] = "real"
    composer: int = 0


@dataclass(frozen=True)
class RunnableModel:
    """Attributes:
    logits: `logits(params, tokens i32 [B, T]) -> f32 [B, T, V]`.
    params: the pytree it takes.
    config: of the model.
    decode: the same through a context; see `models.context`. No text depends on those beside it.
    """

    logits: Callable[[Any, jax.Array], jax.Array]
    params: Any
    config: LatentMoeConfig
    decode: Callable[[Any, jax.Array, Context], jax.Array]


class MixtureLosses(msgspec.Struct, frozen=True):
    """Held-out losses, nats per token.

    Attributes:
        real: of the assembled model.
        surrogates: of the same dense parameters with surrogates of all experts; None: there are no surrogates.
        mixed: as each composer sees the model, with own experts and surrogates for the others.
        alone: of each composer's dense parameters with surrogates of all experts.
    """

    real: float
    surrogates: float | None = None
    mixed: tuple[float, ...] = ()
    alone: tuple[float, ...] = ()


def experts_named(text: str) -> ExpertSelection:
    """Return the experts that `real`, `surrogates` or `composer:N` name. Raises `UserError` for another text."""
    if text == "real":
        return ExpertSelection()
    if text == "surrogates":
        return ExpertSelection("surrogates")
    if match := re.fullmatch(r"composer:(\d+)", text):
        return ExpertSelection("composer", int(match[1]))
    raise UserError(
        "--experts: expected real, surrogates or composer:N with a composer's number, such as composer:0; found "
        f"{text!r}"
    )


def model_with(saved: SavedTraining, experts: ExpertSelection) -> RunnableModel:
    """Return a training's model with these experts.

    With `real` and `surrogates`, everything but the experts is the mean of the composers'; with `composer`, it is what
    that composer has.

    Raises:
        UserError: there are no surrogates, or no such composer.
    """
    state, config = saved.state, saved.config
    if experts.kind == "real":
        params = filled(parameters(config), merged_model(state, config))
        return RunnableModel(partial(_apply, config=config), params, config, partial(decode_real, config=config))
    if state.surrogates is None:
        why = "its only composer has all experts" if saved.training.composers == 1 else "it was trained with rank 0"
        raise UserError(f"this training has no surrogates: {why}; it runs with its real experts only")
    if experts.kind == "surrogates":
        return with_surrogates(assembled(state, config)[0], named_surrogates(state.surrogates), config)
    if experts.composer >= len(state.composers):
        raise UserError(
            f"there is no composer {experts.composer}: this training has the composers 0 to {len(state.composers) - 1}"
        )
    return composers_model(state.composers[experts.composer], state.surrogates, config)


def composers_model(composer: ComposerState, surrogates: Surrogates, config: LatentMoeConfig) -> RunnableModel:
    """Return the model as a composer executes it: own experts, surrogates for the others."""
    matrix = ownership.slot_matrix(composer.slots, config.n_expert)
    held = _surrogates_by_layer(named_surrogates(surrogates), config)
    owned = [{**layer, "ownership": matrix[i]} for i, layer in enumerate(held)]
    params = (filled(dense_parameters(config), composer.dense), [dict(layer) for layer in composer.experts], owned)
    return _stood_in(params, config)


def with_surrogates(dense: Tensors, surrogates: Tensors, config: LatentMoeConfig) -> RunnableModel:
    """Return the model with surrogates in place of all experts.

    Args:
        dense: everything but the experts, by name; others are left alone.
        surrogates: as `named_surrogates` names them.
        config: of the model.

    Raises:
        UserError: the surrogates are not those of this model.
    """
    params = (filled(dense_parameters(config), dense), [], _surrogates_by_layer(surrogates, config))
    return _stood_in(params, config)


def _stood_in(params: Any, config: LatentMoeConfig) -> RunnableModel:
    decode = partial(_composer_decode, config=config)
    return RunnableModel(partial(_composer_logits, config=config), params, config, decode)


def named_surrogates(surrogates: Surrogates) -> dict[str, np.ndarray]:
    """Return surrogates by the names that composers' programs and exported files give them."""
    return {
        in_layer(i, "surrogates", name): value
        for i, pair in enumerate(zip(surrogates.a, surrogates.b, strict=True))
        for name, value in zip("ab", pair, strict=True)
    }


def mixture_losses(saved: SavedTraining, batches: Sequence[Batch]) -> MixtureLosses:
    """Evaluate a training's model with every choice of experts, on batches of tokens and targets i32 [B, T]."""
    state, config = saved.state, saved.config
    whole, stood_in = _loss_of(partial(_apply, config=config)), _loss_of(partial(_composer_logits, config=config))
    real = whole(model_with(saved, ExpertSelection()).params, batches)
    if state.surrogates is None:
        return MixtureLosses(real)
    names = named_surrogates(state.surrogates)
    return MixtureLosses(
        real,
        stood_in(model_with(saved, ExpertSelection("surrogates")).params, batches),
        tuple(stood_in(composers_model(c, state.surrogates, config).params, batches) for c in state.composers),
        tuple(stood_in(with_surrogates(c.dense, names, config).params, batches) for c in state.composers),
    )


def _loss_of(logits: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, Sequence[Batch]], float]:
    compiled = jax.jit(lambda params, tokens, targets: cross_entropy(logits(params, tokens), targets))
    return lambda params, batches: float(np.mean([float(compiled(params, x, y)) for x, y in batches]))


def _apply(params: Any, tokens: jax.Array, *, config: LatentMoeConfig) -> jax.Array:
    return apply(params, tokens, config)


def _composer_logits(params: Any, tokens: jax.Array, *, config: LatentMoeConfig) -> jax.Array:
    dense, experts, held = params
    return composer_logits(dense, experts, held, tokens, config)


def _composer_decode(params: Any, tokens: jax.Array, context: Context, *, config: LatentMoeConfig) -> jax.Array:
    dense, experts, held = params
    config = msgspec.structs.replace(config, capacity=0.0)
    mix = composer_mixture(experts, held, config, compute=served_mixture)
    return forward(dense, tokens, config, mix, context)[0]


def _surrogates_by_layer(surrogates: Tensors, config: LatentMoeConfig) -> list[dict[str, Any]]:
    first = surrogates.get(in_layer(0, "surrogates", "a"), np.zeros(0))
    experts, latent, width = config.n_expert, config.n_latent, first.shape[-1]
    pair = {"a": Draw((experts, latent, width)), "b": Draw((experts, width // config.read, latent))}
    tree = filled({"layers": [{"surrogates": pair} for _ in range(config.n_layer)]}, surrogates)
    return [layer["surrogates"] for layer in tree["layers"]]


class RunEvaluation(msgspec.Struct, frozen=True):
    """Attributes:
    run: name of the run folder.
    steps: that every composer has done.
    round: that ends with them; 0: none does.
    tokens: batches, sequences of a batch and tokens of a sequence the losses are of.
    losses: of the newest saved state.
    reported: the run's own losses after that round, of the same tokens.
    """

    run: str
    steps: int
    round: int
    tokens: tuple[int, int, int]
    losses: MixtureLosses
    reported: Reported


class Reported(msgspec.Struct, frozen=True):
    """A run's own figures, nats per token; by shard, empty where there are none."""

    real: float | None = None
    mixed: tuple[float | None, ...] = ()
    alone: tuple[float | None, ...] = ()


def evaluate_run(folder: Path, cache: Path) -> RunEvaluation:
    """Evaluate the newest state the composers of a run have saved, on the held-out tokens.

    Args:
        folder: of the run, which may be under way.
        cache: with prepared data, which is made when missing.

    Raises:
        UserError: it is no run of a mixture, or has not begun.
        PlanetaryError: a payload or the data cannot be read.
    """
    if not is_run(folder):
        raise UserError(
            f"cannot evaluate the saved training {folder}: it names no held-out tokens. The program "
            "that saved it has measured it: bench/parallax.py prints held_out, composer_view and surrogates_only"
        )
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: expected {CONFIG} in it, as `planetary train` writes it")
    config = load_config(folder / CONFIG)
    saved = read_run(folder, config)
    pieces = [piece for piece, _ in prepare(config, cache / "data").eval_chunks(config, 1)]
    size = config.train.batch_size, config.train.sequence_length
    held_out = [next(batches(read_slice(piece), *size)) for piece in pieces]
    ended, rest = divmod(saved.state.steps, config.train.inner_steps)
    round_ = 0 if rest else ended
    return RunEvaluation(
        folder.resolve().name,
        saved.state.steps,
        round_,
        (len(held_out), *size),
        mixture_losses(saved, held_out),
        _reported(folder, round_, last=round_ == config.train.rounds),
    )


def _reported(folder: Path, round_: int, *, last: bool) -> Reported:
    lines = read_json_lines(folder / METRICS, RoundMetrics) if (folder / METRICS).exists() else ()
    line = {line.round: line for line in lines}.get(round_)  # a resumed run may have trained it again
    if line is None:
        return Reported()
    if not isinstance(line.own, MixtureMetrics) or not last:  # in the middle of a run composers look at one batch only
        return Reported(line.eval_loss)
    shards = line.own.shards
    return Reported(line.eval_loss, tuple(s.mixed_loss for s in shards), tuple(s.surrogate_loss for s in shards))


def losses_table(found: RunEvaluation) -> list[str]:
    """Return an evaluation as lines of a table."""
    losses, reported = found.losses, found.reported
    rows = [("experts", "loss", "in the run", "surrogates alone", "in the run")]
    rows.append(("real", _number(losses.real), _number(reported.real), "", ""))
    if losses.surrogates is not None:
        rows.append(("surrogates", _number(losses.surrogates), "", "", ""))
    composers = range(len(losses.mixed))  # none without surrogates
    known = reported.mixed or [None for _ in composers], reported.alone or [None for _ in composers]
    for number in composers:
        values = losses.mixed[number], known[0][number], losses.alone[number], known[1][number]
        mixed, known_mixed, alone, known_alone = (_number(value) for value in values)
        rows.append((f"composer:{number}", mixed, known_mixed, alone, known_alone))
    first, *others = (max(len(cell) for cell in column) for column in zip(*rows, strict=True))
    table = [
        row[0].ljust(first) + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], others, strict=True)) for row in rows
    ]
    count, sequences, length = found.tokens
    after = f"round {found.round}, step {found.steps}" if found.round else f"step {found.steps}"
    return [
        f"{found.run} after {after}: held-out loss in nats per token, {count} batches of {sequences} × {length} tokens",
        *(line.rstrip() for line in table),
        *(["there are no surrogates: moe.rank is 0"] if losses.surrogates is None else []),
    ]


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
