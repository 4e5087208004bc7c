"""Keys of `[rl]` and of other sections that have to fit together. Needs no JAX."""

from __future__ import annotations

from planetary.core.config import Config
from planetary.core.errors import UserError


def check_keys(config: Config) -> None:
    """Raise `UserError` for keys that do not fit together."""
    rl = config.rl
    if rl.ahead > rl.lag:
        raise UserError(
            f"rl.ahead = {rl.ahead} samples texts that are {rl.ahead} versions old when they are trained, and rl.lag = "
            f"{rl.lag} allows {rl.lag}: raise rl.lag, or lower rl.ahead"
        )
    if rl.imitated_rounds > config.train.rounds:
        raise UserError(f"rl.imitated_rounds = {rl.imitated_rounds} is more than train.rounds = {config.train.rounds}")
    if rl.imitation_goal and not (rl.imitated_rounds and rl.held_out):
        raise UserError(
            f"rl.imitation_goal = {rl.imitation_goal:g} ends an imitation by the reward of held-out prompts: set "
            "rl.imitated_rounds and rl.held_out, too"
        )
    if rl.imitation_every and not (rl.imitated_rounds and rl.held_out):
        raise UserError(
            f"rl.imitation_every = {rl.imitation_every} evaluates an imitation by held-out prompts: set "
            "rl.imitated_rounds and rl.held_out, too"
        )
    if (rl.objective == "distillation") != bool(rl.teacher):
        raise UserError('rl.teacher and rl.objective = "distillation" belong together: set both, or neither')
    if rl.teacher and rl.kl:
        raise UserError("rl.kl compares with the imitation's end, and rl.teacher with the teacher: set one of them")
    if rl.completions < 2 and rl.objective != "distillation":
        raise UserError(f"rl.completions = {rl.completions}: advantages compare a prompt's completions; 2 at least")
    if config.fabric.island != 1:
        raise UserError("a policy computes on one device: fabric.island must be 1")
    if config.train.batch_size % config.train.micro_batches:
        raise UserError(
            f"train.batch_size = {config.train.batch_size} texts cannot be divided into train.micro_batches = "
            f"{config.train.micro_batches} equal parts"
        )
