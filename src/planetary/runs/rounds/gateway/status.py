"""The status of a run in rounds: what every kind of run has, and rounds, learning rate, checkpoint and step."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from planetary.fleet.gateway.status import (
    connected_worker,
    message_of,
    stage_of,
    workers_seen,
)
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.sessions import Phase
from planetary.fleet.protocol.status import RunState, WorkerState
from planetary.runs.rounds.progress import training_status
from planetary.runs.rounds.sessions import Trainer
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import Gateway
    from planetary.runs.rounds.controller.controller import Controller
    from planetary.runs.rounds.controller.pace import Latest
    from planetary.runs.rounds.gateway.gateway import RoundsRun


def status_of(run: RoundsRun, kind: str = "rounds") -> TrainingStatus:
    """Build the status of a run in rounds, or of a `kind` derived from that."""
    gateway, controller = run.gateway, run.controller
    state = controller.state
    waiting_for, waiting_since = controller.training.leases.waited_for()
    run_state = _run_state(controller)
    stage, since = stage_of(gateway, run_state, controller.stalls.why or _finishing(controller))
    return msgspec.structs.replace(
        training_status(gateway, kind, state, controller.desk.rounds_left),
        state=run_state,
        stage=stage,
        stage_since=since,
        round=state.open.round if state.open is not None else state.round,
        reducing=state.closing.round if state.closing is not None else 0,
        workers=workers_seen(controller.desk, TrainerStatus, partial(_worker, gateway, controller)),
        learning_rate=_learning_rate(controller),
        checkpoint_round=state.durable_round,
        checkpoint_at=run.room.written_at,
        checkpoint_bytes=run.room.checkpoint_bytes,
        disk_free=run.room.free,
        waiting_for=tuple(waiting_for),
        waiting_since=gateway.wall_of(waiting_since) if waiting_for else 0.0,
        message=message_of(gateway, controller.stalls.why),
        step=state.steps[-1],
        roll_out=run.stage.state,
    )


def _learning_rate(controller: Controller) -> float | None:
    """Return the rate with which the open round begins."""
    desk = controller.desk
    return None if desk.state.open is None else desk.policy.schedule.rate(desk.first_step())


def _finishing(controller: Controller) -> str:
    is_evaluating = controller.evaluation.versions and controller.is_trained
    return "evaluating the last parameters" if is_evaluating else ""


def _run_state(controller: Controller) -> RunState:
    ended = ended_as(controller.state.ended)
    if ended is not None:
        return ended
    if controller.state.open is not None:
        return "training"
    return "finishing" if controller.is_trained else "waiting"


def _worker(gateway: Gateway[Any], controller: Controller, worker: Trainer) -> TrainerStatus:
    train, run = worker.train, controller.state
    latest = controller.training.leases.pace.latest.get(worker.worker)
    version = train.version if train is not None else worker.version
    state: WorkerState = "ready"
    if worker.phase is not Phase.READY:
        state = "fetching"
    elif train is not None and (train.started or worker.evaluate is None):
        state = "training"
    elif worker.evaluate is not None:
        state = "evaluating"
    loss = train.loss if train is not None else None
    return connected_worker(
        worker,
        state,
        run.losses.get(worker.worker, 0),
        TrainerStatus,
        round=train.round if train is not None else 0,
        step=train.step if train is not None else 0,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        version_lag=run.version - version if version >= 0 else None,
        slow=run.slow.get(worker.worker, ""),
        **({} if latest is None else _contribution(gateway, latest)),
    )


def _contribution(gateway: Gateway[Any], latest: Latest) -> dict[str, float | None]:
    return {
        "last_contribution_at": gateway.wall_of(latest.at),
        "step_s": latest.times.step_s,
        "transfer_s": latest.times.transfer_s,
        "share": latest.share,
    }
