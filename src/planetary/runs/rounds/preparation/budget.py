"""Length of a local run whose whole command takes `train.target_minutes`.

The choice is one of a few named budgets, each a share of `train.rounds` and about √2 times the one before. Two
measurements of one machine then agree unless they lie on both sides of a boundary; and since a measurement is kept (see
`machine_speed`), a machine measures a step once and later runs have the same length. A tenth of the default run's
rounds fits into five minutes up to about 1 s a step, four times that of two AVX2 cores. Where it does not, the run
trains the smaller model that `model.smaller` describes, if there is one: the last resort.
"""

from __future__ import annotations

import msgspec

from planetary.core.configuration.schema import Config

OTHERWISE_S = 60.0
"""Least time of a command beside the rounds: preparing the data, exporting, compiling, verifying, the last evaluation
and the report. Independent of this start: a run with a warm cache has the length of the first one."""

BESIDE_MAKING_S, PER_MADE_S = 20.0, 2.0
"""The same on a machine slow to compile and verify the step: a constant, and a multiple of that time. On two cores with
AVX-512 making takes 20 s, so both are the same there."""

EVAL_SHARE = 0.4
"""An evaluation of a batch against a training step on it: the forward pass is a third of the arithmetic."""


class Budget(msgspec.Struct, frozen=True):
    """One of the lengths a fitted run may have."""

    name: str
    share: float  # fraction of `train.rounds`


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


class MachineSpeed(msgspec.Struct, frozen=True):
    """Times of this machine, measured with as many workers and threads as the run has."""

    step_s: float  # an inner step, while the other workers run theirs
    round_s: float  # time of a round beside inner steps: transfers, the outer step, the checkpoint
    made_s: float = 0.0  # time in which the step was compiled and verified

    @property
    def otherwise_s(self) -> float:
        """Time of a command beside the rounds."""
        return max(OTHERWISE_S, BESIDE_MAKING_S + PER_MADE_S * self.made_s)


UNDISTURBED_BUSY = 0.8
"""Processor seconds per second and thread from which on a timing counts as undisturbed. A step that computes on one
thread comes near 1 alone, and near a half beside one other program for each core."""

LEAST_BUSY = 0.5
"""Below this a timing is never settled: two that agree may both have been taken under the same load."""

AGREEMENT = 0.05
"""Two timings agree when their steps differ by at most this part."""


class KeptSpeed(msgspec.Struct, frozen=True):
    """A measurement in the cache.

    Attributes:
        speed: of the fastest measurement so far: other programs only make steps longer.
        busy: of that timing, the least of all processes; see `StepTimes`.
        repeated: whether the last two measurements agree.
    """

    speed: MachineSpeed
    busy: float
    repeated: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether it is not measured again: it was undisturbed, or little disturbed and repeated.

        Some steps never keep all their threads busy, so a low `busy` alone proves no disturbance.
        """
        return self.busy >= UNDISTURBED_BUSY or (self.repeated and self.busy >= LEAST_BUSY)

    def beside(self, again: KeptSpeed) -> KeptSpeed:
        """Return the measurement to keep after `again`. A compilation is timed once: the longer time counts."""
        best = self if self.speed.step_s <= again.speed.step_s else again
        differ = abs(self.speed.step_s - again.speed.step_s)
        return KeptSpeed(
            msgspec.structs.replace(best.speed, made_s=max(self.speed.made_s, again.speed.made_s)),
            best.busy,
            repeated=differ <= AGREEMENT * best.speed.step_s,
        )


class FittedBudget(msgspec.Struct, frozen=True):
    """The chosen budget and the configuration it makes."""

    budget: Budget
    config: Config
    seconds: float  # expected for the whole command

    def sentence(self, speed: MachineSpeed, rounds: int) -> str:
        """Describe measurement and choice, for the first lines of a run; `rounds`: how many the data allows."""
        tokens = rounds * self.config.fabric.workers * self.config.targets_per_slice
        return (
            f"this machine: {1e3 * speed.step_s:.0f} ms a step; training {tokens:,} tokens in {rounds} rounds "
            f"(budget {self.budget.name}), about {max(1, round(self.seconds / 60))} min. --full trains the whole budget"
        )


def fit(config: Config, speed: MachineSpeed, *, spent_s: float = 0.0) -> FittedBudget:
    """Return the longest budget that ends within `train.target_minutes`, or the shortest one if none does.

    The warm-up stays the same part of the run. `spent_s`: time spent on a larger model before.
    """
    limit = 60 * config.train.target_minutes
    fits = [_with(config, budget, speed, spent_s) for budget in BUDGETS]
    return next((one for one in reversed(fits) if one.seconds <= limit), fits[0])


def smaller(config: Config, speed: MachineSpeed) -> Config | None:
    """Return `config` with the smaller model where the configured model takes too long on this machine; None where it
    does not.

    A configuration without a smaller one keeps the model, however long it takes.
    """
    if not config.model.smaller or fit(config, speed).seconds <= 60 * config.train.target_minutes:
        return None
    replace = msgspec.structs.replace
    return replace(config, model=replace(config.model, options=config.model.options | config.model.smaller, smaller={}))


def why_smaller(config: Config, speed: MachineSpeed) -> str:
    """Say why a fitted run has another model than the configuration, for the first lines of a run."""
    options = ", ".join(f"{name} = {value}" for name, value in config.model.smaller.items())
    return (
        f"this machine: {1e3 * speed.step_s:,.0f} ms a step, with which the shortest run takes "
        f"{fit(config, speed).seconds / 60:.0f} min instead of {config.train.target_minutes:g}; it trains a smaller "
        f"model ({options}). --full trains the whole one"
    )


def _with(config: Config, budget: Budget, speed: MachineSpeed, spent_s: float) -> FittedBudget:
    replace = msgspec.structs.replace
    train, evaluation = config.train, config.eval
    rounds = max(1, round(budget.share * train.rounds))
    warmup = min(round(config.optimizer.warmup_steps * rounds / train.rounds), rounds * train.inner_steps - 1)
    fitted = replace(
        config,
        model=replace(config.model, smaller={}),
        train=replace(train, rounds=rounds, target_minutes=0.0),
        optimizer=replace(config.optimizer, warmup_steps=warmup),
    )
    evaluations = -(-rounds // evaluation.every)
    batches = -(-evaluation.batches * (1 + len(evaluation.sets)) // config.fabric.workers)
    seconds = spent_s + speed.otherwise_s + rounds * (train.inner_steps * speed.step_s + speed.round_s)
    seconds += evaluations * batches * EVAL_SHARE * speed.step_s
    return FittedBudget(budget, fitted, seconds)
