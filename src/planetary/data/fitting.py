"""Fits a run to the data that there is: a tiny source makes a tiny run, and the log says what became smaller."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from planetary.core.config import Config
from planetary.core.configuration.strict import with_fitting_warmup
from planetary.core.errors import UserError
from planetary.data.prepare import PreparedData

log = logging.getLogger(__name__)


class LeasePlan(Protocol):
    """How a kind of run divides its training tokens into leases."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """Return the largest `train.inner_steps` that a data set of so many batches allows."""
        ...

    def participants(self, config: Config) -> int:
        """Return how many workers train different tokens at a time."""
        ...

    def rounds_within(self, config: Config, tokens: int, epochs: int) -> int:
        """Return how many rounds so many epochs of a data set of so many tokens allow."""
        ...


class RoundLeases:
    """A lease is what one worker reads in a round."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """See `LeasePlan`; there has to be one lease."""
        return batches

    def participants(self, config: Config) -> int:
        """See `LeasePlan`."""
        return config.fabric.workers

    def rounds_within(self, config: Config, tokens: int, epochs: int) -> int:
        """See `LeasePlan`."""
        return epochs * (tokens // config.tokens_per_slice) // self.participants(config)


class StepLeases:
    """A lease is one step of all composers of a mixture."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """See `LeasePlan`; a round is no lease, and may be longer than an epoch."""
        return config.train.inner_steps

    def participants(self, config: Config) -> int:
        """See `LeasePlan`."""
        return config.moe.composers

    def rounds_within(self, config: Config, tokens: int, epochs: int) -> int:
        """See `LeasePlan`."""
        leases = tokens // (self.participants(config) * config.tokens_per_batch)
        return epochs * leases // config.train.inner_steps


ROUND_LEASES, STEP_LEASES = RoundLeases(), StepLeases()


def fit_to_data(config: Config, data: PreparedData, leases: LeasePlan = ROUND_LEASES) -> Config:
    """Return `config` with what the data is too small for made smaller, each with a warning that has both numbers.

    `eval.batches` becomes the number of held-out batches, `train.inner_steps` at most that of training batches, and
    `train.rounds` as many as `data.max_epochs` allows. `leases`: of the kind of run; default: of one in rounds.

    Raises:
        UserError: there is not even one batch to train or to measure on, or `data.max_epochs` allows no round.
    """
    batches = _batches(config, data.train.count, "training")
    held = _batches(config, data.held_out.count, "held-out")
    replace = msgspec.structs.replace
    if held < config.eval.batches:
        _warn("eval.batches", held, config.eval.batches, f"the held-out data has {data.held_out.count} tokens")
        config = replace(config, eval=replace(config.eval, batches=held))
    most = leases.most_inner_steps(config, batches)
    if most < config.train.inner_steps:
        _warn(
            "train.inner_steps",
            most,
            config.train.inner_steps,
            f"the training data has {data.train.count} tokens, which is {batches} batches of {config.tokens_per_batch}",
        )
        config = replace(config, train=replace(config.train, inner_steps=most))
    return with_fitting_warmup(_within_epochs(config, data, leases))


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


def _within_epochs(config: Config, data: PreparedData, leases: LeasePlan) -> Config:
    epochs = config.data.max_epochs
    if not epochs:
        return config
    parts, rounds = leases.participants(config), leases.rounds_within(config, data.train.count, epochs)
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
