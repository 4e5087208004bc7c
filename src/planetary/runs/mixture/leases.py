"""How a mixture divides its training tokens: a lease is one step of all composers."""

from __future__ import annotations

import msgspec

from planetary.core.config import Config
from planetary.core.configuration.strict import with_fitting_warmup
from planetary.core.errors import UserError
from planetary.data.fitting import warn_of_fitting
from planetary.runs.mixture.config import MoeConfig


class StepLeases:
    """A lease is one step of all composers of a mixture."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """A round is no lease, and may be longer than an epoch."""
        return config.train.inner_steps

    def within_epochs(self, config: Config, tokens: int) -> Config:
        """Every step is that of all composers, so that passes are a number of rounds.

        Raises:
            UserError: not one round is possible.
        """
        epochs, composers = config.data.max_epochs, config.of(MoeConfig).composers
        if not epochs:
            return config
        rounds = epochs * (tokens // (composers * config.tokens_per_batch)) // config.train.inner_steps
        if rounds >= config.train.rounds:
            return config
        reason = (
            f"data.max_epochs = {epochs} allows {epochs * tokens} tokens, and a round of {composers} takes "
            f"{composers * config.tokens_per_slice}"
        )
        if not rounds:
            raise UserError(
                f"{reason}: not one round is possible. Raise data.max_epochs, give more data, or lower "
                "train.inner_steps, train.batch_size or moe.composers"
            )
        warn_of_fitting("train.rounds", rounds, config.train.rounds, reason)
        shorter = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, rounds=rounds))
        return with_fitting_warmup(shorter, shorter.total_inner_steps)


STEP_LEASES = StepLeases()
