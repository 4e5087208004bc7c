"""The training step's options and the learning rate, by the configuration."""

from __future__ import annotations

from planetary.core.configuration.schema import Config
from planetary.core.configuration.step_options import ComputeOptions, StepOptions, UpdateOptions
from planetary.core.extension_points import INNER_OPTIMIZERS, SCHEDULES
from planetary.core.schedules import Schedule


def step_options(config: Config, *, marked_targets: bool = False) -> StepOptions:
    """Return the configuration's settings of the training step, but for the learning rate.

    `marked_targets`: the data has tokens that are no targets.
    """
    optimizer, train = config.optimizer, config.train
    return StepOptions(
        **{name: getattr(optimizer, name) for name in UpdateOptions.__struct_fields__},
        **{name: getattr(train, name) for name in ComputeOptions.__struct_fields__},
        optimizer=INNER_OPTIMIZERS.pin(optimizer.name),
        marked_targets=marked_targets,
    )


def schedule_of(config: Config, total_steps: int) -> Schedule:
    """Return the learning-rate schedule of a run with a number of inner steps. Raises `UserError` if it cannot be."""
    optimizer = config.optimizer
    schedule = Schedule(
        kind=SCHEDULES.pin(optimizer.schedule),
        peak=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=total_steps,
        final_fraction=optimizer.final_fraction,
    )
    schedule.check()
    return schedule
