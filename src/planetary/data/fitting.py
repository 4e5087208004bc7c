"""Fits a run to the data that there is: a tiny source makes a tiny run, and the log says what became smaller."""

from __future__ import annotations

import logging

import msgspec

from planetary.core.config import Config
from planetary.core.configuration.strict import with_fitting_warmup
from planetary.core.errors import UserError
from planetary.data.prepare import PreparedData

log = logging.getLogger(__name__)


def fit_to_data(config: Config, data: PreparedData) -> Config:
    """Return `config` with what the data is too small for made smaller, each with a warning that has both numbers.

    `eval.batches` becomes the number of held-out batches, `train.inner_steps` (of an ordinary run) that of training
    batches, and `train.rounds` as many as `data.max_epochs` allows with `fabric.workers` workers.

    Raises:
        UserError: there is not even one batch to train or to measure on, or `data.max_epochs` allows no round.
    """
    batches = _batches(config, data.train.count, "training")
    held = _batches(config, data.held_out.count, "held-out")
    replace = msgspec.structs.replace
    if held < config.eval.batches:
        _warn("eval.batches", held, config.eval.batches, f"the held-out data has {data.held_out.count} tokens")
        config = replace(config, eval=replace(config.eval, batches=held))
    if not config.moe.composers and batches < config.train.inner_steps:
        _warn(
            "train.inner_steps",
            batches,
            config.train.inner_steps,
            f"the training data has {data.train.count} tokens, which is {batches} batches of {config.tokens_per_batch}",
        )
        config = replace(config, train=replace(config.train, inner_steps=batches))
    return with_fitting_warmup(_within_epochs(config, data))


FITTED = ("train.rounds", "train.inner_steps", "eval.batches", "optimizer.warmup_steps")
"""Keys that a run may have smaller than it was given them."""


def changes(given: Config, fitted: Config) -> str:
    """Return what `fit_to_data` changed, for a display; "" for nothing."""
    found = []
    for dotted in FITTED:
        section, key = dotted.split(".")
        before, after = (getattr(getattr(config, section), key) for config in (given, fitted))
        if before != after:
            found.append(f"{dotted} is {after} instead of {before}")
    return f"fitted to the data: {', '.join(found)}" if found else ""


def _batches(config: Config, tokens: int, part: str) -> int:
    batches = tokens // config.tokens_per_batch
    if not batches:
        raise UserError(
            f"the {part} data has {tokens} tokens, and one batch (train.batch_size × (train.sequence_length + 1)) "
            f"takes {config.tokens_per_batch}: give more data, or lower train.batch_size or train.sequence_length"
        )
    return batches


def _within_epochs(config: Config, data: PreparedData) -> Config:
    epochs = config.data.max_epochs
    if not epochs:
        return config
    parts = config.moe.composers or config.fabric.workers
    if config.moe.composers:  # a lease is one step of all composers
        rounds = epochs * (data.train.count // (parts * config.tokens_per_batch)) // config.train.inner_steps
    else:
        rounds = epochs * (data.train.count // config.tokens_per_slice) // parts
    if rounds >= config.train.rounds:
        return config
    reason = (
        f"data.max_epochs = {epochs} allows {epochs * data.train.count} tokens, and a round of {parts} takes "
        f"{parts * config.tokens_per_slice}"
    )
    if not rounds:
        raise UserError(
            f"{reason}: not one round is possible. Raise data.max_epochs, give more data, or lower train.inner_steps, "
            "train.batch_size or fabric.workers"
        )
    _warn("train.rounds", rounds, config.train.rounds, reason)
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, rounds=rounds))


def _warn(key: str, fitting: int, given: int, reason: str) -> None:
    log.warning("%s: %d instead of %d, because %s", key, fitting, given, reason)
