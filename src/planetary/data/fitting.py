"""Fits a run to the data: a tiny source makes a tiny run, and the log names the reduced keys."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from planetary.core.configuration.derived import with_fitting_warmup
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data.prepared_data import PreparedData
from planetary.data.run_length import RunLength

log = logging.getLogger(__name__)


class LeasePlan(Protocol):
    """How a kind of run divides the training tokens into leases."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """Return the largest `train.inner_steps` that a data set of so many batches allows."""
        ...

    def within_epochs(self, config: Config, tokens: int) -> Config:
        """Return `config` reduced to `data.max_epochs` of a data set of so many tokens."""
        ...


class RoundLeases:
    """A lease is one worker's tokens of a round."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """There has to be one lease."""
        return batches

    def within_epochs(self, config: Config, tokens: int) -> Config:
        """The controller counts leases, so it does not matter how many workers come."""
        return with_fitting_warmup(config, length_of(config, tokens).schedule_steps)


BEYOND = 3
"""A site may train this many times its rounds beyond them for a part of a job. A site that trained alone has trained
them before the hub has all versions; and a site whose hub never comes back is to end at some time.
"""


def length_of(config: Config, tokens: int) -> RunLength:
    """Return the limits of a run in rounds on a data set of so many training tokens."""
    return RunLength(
        rounds=config.train.rounds,
        leases=config.data.max_epochs * (tokens // config.tokens_per_slice) * config.leases_per_slice,
        inner_steps=config.train.inner_steps,
        workers=config.fabric.workers,
        parts=config.leases_per_slice,
        beyond=BEYOND * config.train.rounds if any(one.ended_by_another for one in config.kinds.values()) else 0,
    )


ROUND_LEASES = RoundLeases()


def fit_to_data(config: Config, data: PreparedData, leases: LeasePlan = ROUND_LEASES) -> Config:
    """Return `config` with keys reduced where the data is too small, each with a warning with both numbers.

    `eval.batches` becomes the number of held-out batches, and `train.inner_steps` at most that of training batches.
    `leases`: of the kind of run, which may reduce more; default: of one in rounds.

    Raises:
        UserError: there is not even one batch to train or to measure on, or `data.max_epochs` allows no round.
    """
    if data.layout is not None and data.train.count < config.fabric.workers:
        raise UserError(
            f"the training data has {data.train.count} examples, fewer than fabric.workers = {config.fabric.workers}, "
            "and every worker trains on others: give more data, or lower fabric.workers"
        )
    batches = _batches(config, data.train.count, "training", data.elements)
    held = _batches(config, data.held_out.count, "held-out", data.elements)
    replace = msgspec.structs.replace
    if held < config.eval.batches:
        warn_of_fitting(
            "eval.batches", held, config.eval.batches, f"the held-out data has {data.held_out.count} {data.elements}"
        )
        config = replace(config, eval=replace(config.eval, batches=held))
    most = leases.most_inner_steps(config, batches)
    if most < config.train.inner_steps:
        warn_of_fitting(
            "train.inner_steps",
            most,
            config.train.inner_steps,
            f"the training data has {data.train.count} {data.elements}, which is {batches} batches of "
            f"{config.tokens_per_batch}",
        )
        config = replace(config, train=replace(config.train, inner_steps=most))
    config = with_fitting_warmup(config, config.total_inner_steps)
    return leases.within_epochs(config, data.train.count)


def _batches(config: Config, tokens: int, part: str, elements: str) -> int:
    batches = tokens // config.tokens_per_batch
    if not batches and elements == "examples":
        raise UserError(
            f"the {part} data has {tokens} examples, and one batch takes {config.tokens_per_batch} "
            "(train.batch_size): give more data, change data.held_out_fraction, or lower train.batch_size"
        )
    if not batches:
        raise UserError(
            f"the {part} data has {tokens} tokens, and one batch (train.batch_size × (train.sequence_length + 1)) "
            f"takes {config.tokens_per_batch}: give more data, or lower train.batch_size or train.sequence_length"
        )
    return batches


def warn_of_fitting(key: str, fitting: int, given: int, reason: str) -> None:
    """Warn that a key gets another value than the configuration has."""
    log.warning("%s: %d instead of %d, because %s", key, fitting, given, reason)


FITTED = ("train.rounds", "train.inner_steps", "eval.batches", "optimizer.warmup_steps")
"""Keys a run may have smaller than it was given them."""


def changes(given: Config, fitted: Config) -> str:
    """Return the changes of `fit_to_data`, for a display; "" for none."""
    found = []
    for dotted in FITTED:
        section, key = dotted.split(".")
        before, after = (getattr(getattr(config, section), key) for config in (given, fitted))
        if before != after:
            found.append(f"{dotted} is {after} instead of {before}")
    return f"fitted to the data: {', '.join(found)}" if found else ""
