"""The part of a gateway's status that every training has: rounds, losses, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from planetary.fleet.gateway.status import base_status
from planetary.runs.rounds.fold import TrainingFold
from planetary.runs.rounds.training_status import TrainingStatus, with_progress

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import Gateway

StatusT = TypeVar("StatusT", bound=TrainingStatus)


def training_status(
    host: Gateway[Any],
    kind: str,
    state: TrainingFold | None,
    rounds_left: int | None = None,
    status: type[StatusT] = TrainingStatus,
) -> StatusT:
    """Return the part of the status that every training has; without a state the run is being prepared.

    `rounds_left`: how many are expected; None: all of `train.rounds` that are not finished.
    """
    train = host.config.train
    preparing = base_status(host, status, kind=kind, rounds=train.rounds, inner_steps=train.inner_steps)
    if state is None:
        return preparing
    left = train.rounds - state.round if rounds_left is None else rounds_left
    return with_progress(preparing, state, host.metrics, left)
