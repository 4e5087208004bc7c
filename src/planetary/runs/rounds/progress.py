"""The part of a status that every training has: rounds, losses, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from planetary.fleet.gateway.status import base_status
from planetary.fleet.protocol.progress import with_progress
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import RunStatus

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import Gateway


def training_status(host: Gateway[Any], state: RunFold | None, rounds_left: int | None = None) -> RunStatus:
    """Return the part of the status that every training has; without a state the run is being prepared.

    `rounds_left`: how many are expected; None: all of `train.rounds` that are not finished.
    """
    train = host.config.train
    status = msgspec.structs.replace(
        base_status(host), rounds=train.rounds, inner_steps=train.inner_steps, bigram_loss=host.bigram_loss
    )
    if state is None:
        return status
    return with_progress(
        status, state, host.metrics, train.rounds - state.round if rounds_left is None else rounds_left
    )
