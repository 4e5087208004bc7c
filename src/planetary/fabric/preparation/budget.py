"""How long a local run trains so that the whole command takes the time that `train.target_minutes` allows.

The choice is one of a few named budgets, each a share of `train.rounds` and about √2 times the one before. Two
measurements of one machine then agree unless they lie on both sides of a boundary; and since a measurement is kept
(see `planetary.fabric.preparation.fitting`), a machine measures a step once and its next runs have the same length. The
model never changes: a tenth of the default run's rounds fits into five minutes up to 1 s a step, four times that of two
AVX2 cores.
"""

from __future__ import annotations

import msgspec

from planetary.core.config import Config

OTHERWISE_S = 60.0
"""What a command takes beside its rounds: preparing the data, exporting, compiling, verifying, the last evaluation and
the report. A constant, and not what this start took: a run with a warm cache has the length of the first one."""

EVAL_SHARE = 0.4
"""An evaluation of a batch against a training step on it: the forward pass is a third of the arithmetic."""


class Budget(msgspec.Struct, frozen=True):
    """One of the lengths that a fitted run may have."""

    name: str
    share: float  # of `train.rounds`


BUDGETS = (
    Budget("tenth", 0.1),
    Budget("seventh", 0.15),
    Budget("fifth", 0.2),
    Budget("quarter", 0.25),
    Budget("third", 0.35),
    Budget("half", 0.5),
    Budget("two-thirds", 0.7),
    Budget("full", 1.0),
    Budget("full-and-half", 1.4),
    Budget("double", 2.0),
)


class Speed(msgspec.Struct, frozen=True):
    """What this machine needs, measured with as many workers and threads as the run has."""

    step_s: float  # an inner step, while the other workers run theirs
    round_s: float  # what a round takes beside its inner steps: transfers, the outer step, the checkpoint


class Fit(msgspec.Struct, frozen=True):
    """The chosen budget and the configuration that it makes."""

    budget: Budget
    config: Config
    seconds: float  # expected for the whole command

    def sentence(self, speed: Speed) -> str:
        """Say what was measured and chosen, for the first lines of a run."""
        train = self.config.train
        tokens = train.rounds * self.config.fabric.workers * self.config.targets_per_slice
        return (
            f"this machine: {1e3 * speed.step_s:.0f} ms a step; training {tokens:,} tokens in {train.rounds} rounds "
            f"(budget {self.budget.name}), about {max(1, round(self.seconds / 60))} min. --full trains the whole budget"
        )


def fit(config: Config, speed: Speed) -> Fit:
    """Return the longest budget that ends within `train.target_minutes`, or the shortest one if none does.

    The warm-up stays the same part of the run.
    """
    limit = 60 * config.train.target_minutes
    fits = [_with(config, budget, speed) for budget in BUDGETS]
    return next((one for one in reversed(fits) if one.seconds <= limit), fits[0])


def _with(config: Config, budget: Budget, speed: Speed) -> Fit:
    replace = msgspec.structs.replace
    train, evaluation = config.train, config.eval
    rounds = max(1, round(budget.share * train.rounds))
    warmup = min(round(config.optimizer.warmup_steps * rounds / train.rounds), rounds * train.inner_steps - 1)
    fitted = replace(
        config,
        train=replace(train, rounds=rounds, target_minutes=0.0),
        optimizer=replace(config.optimizer, warmup_steps=warmup),
    )
    evaluations = -(-rounds // evaluation.every)
    batches = -(-evaluation.batches // config.fabric.workers)
    seconds = OTHERWISE_S + rounds * (train.inner_steps * speed.step_s + speed.round_s)
    seconds += evaluations * batches * EVAL_SHARE * speed.step_s
    return Fit(budget, fitted, seconds)
