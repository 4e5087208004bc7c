"""A mixture's run as every display gets it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from planetary.fabric.gateway.run_status import (
    base_status,
    connected_worker,
    ended_as,
    message_of,
    stage_of,
    workers_seen,
)
from planetary.fabric.protocol.sessions import Phase, WorkerSession
from planetary.fabric.protocol.status import RunState, RunStatus, WorkerState, WorkerStatus, newest_mixture

if TYPE_CHECKING:
    from planetary.moe.controller.mixture_controller import MixtureController
    from planetary.moe.gateway.mixture_gateway import MixtureGateway


def mixture_status(gateway: MixtureGateway) -> RunStatus:
    """Build the status."""
    controller = gateway.controller
    if controller is None:
        return base_status(gateway, None)
    state, run_state = controller.state, _run_state(controller)
    finishing = "evaluating the last round's model" if run_state == "finishing" else ""
    stage, since = stage_of(gateway, run_state, controller.stalls.why or finishing)
    return msgspec.structs.replace(
        base_status(gateway, state),
        state=run_state,
        stage=stage,
        stage_since=since,
        round=min(state.round + 1, gateway.config.train.rounds),
        workers=workers_seen(controller.desk, state.losses, lambda worker: worker_status(controller, worker)),
        mixture=newest_mixture(gateway.metrics),
        message=message_of(gateway, controller.stalls.why),
    )


def _run_state(controller: MixtureController) -> RunState:
    ended = ended_as(controller.state.ended)
    if ended is not None:
        return ended
    if controller.state.round >= controller.policy.rounds:
        return "finishing"
    return "training" if controller.composing else "waiting"


def worker_status(controller: MixtureController, worker: WorkerSession) -> WorkerStatus:
    """Describe a connected worker.

    A round is a number of steps of the run and not of a composer: one that is faster than others takes more than their
    mean in it, and is in the next round when its state at the end of this one is saved.
    """
    composing = controller.composing.get(worker.session)
    state: WorkerState = "ready" if worker.phase is Phase.READY else "fetching"
    round_, step, loss = 0, 0, None
    if composing is not None:
        done = controller.rounds.has_ended(composing.shard)
        state = "ready" if done else "training"
        shard = controller.state.shards[composing.shard]
        ended = max(shard.marks, default=controller.state.round)
        began = shard.marks[ended].step if ended in shard.marks else shard.round_step
        round_, step = min(ended + 1, controller.policy.rounds), max(0, composing.step - began)
        loss = composing.loss if composing.loss is not None and math.isfinite(composing.loss) else None
    if controller.rounds.evaluates(worker.session):
        state = "evaluating"
    seen = connected_worker(worker, state, controller.state.losses.get(worker.worker, 0))
    return msgspec.structs.replace(seen, round=round_, step=step, loss=loss)
