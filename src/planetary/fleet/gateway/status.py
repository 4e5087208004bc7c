"""The gateway's view of its run, as every display gets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import (
    FINAL_STATES,
    RunState,
    RunStatus,
    WorkerState,
    WorkerStatus,
    figures_of,
)

if TYPE_CHECKING:
    from planetary.fleet.controller.desk import AnyDesk
    from planetary.fleet.gateway.gateway import Gateway
    from planetary.fleet.protocol.records import RunFinished
    from planetary.runs.rounds.controller.controller import Controller
    from planetary.runs.rounds.controller.pace import Latest
    from planetary.runs.rounds.gateway.gateway import RoundsGateway


class CommonState(Protocol):
    """The part of the state that every kind of run has."""

    @property
    def round(self) -> int:
        """Rounds that are finished."""
        ...

    @property
    def train_losses(self) -> Mapping[int, float]:
        """By round."""
        ...

    @property
    def evals(self) -> Mapping[int, float]:
        """By round."""
        ...

    @property
    def tokens_total(self) -> int:
        """Trained on so far."""
        ...


def base_status(host: Gateway[Any, Any, Any], state: CommonState | None, rounds_left: int | None = None) -> RunStatus:
    """Return the part of the status that all kinds of run have; without a state the run is being prepared.

    `rounds_left`: how many are expected; None: all of `train.rounds` that are not finished.
    """
    config = host.config
    status = RunStatus(
        run=config.run.name,
        state="preparing",
        stage=host.stage,
        stage_since=host.stage_since,
        rounds=0 if host.is_unfitted else config.train.rounds,
        inner_steps=config.train.inner_steps,
        started_at=host.started_at,
        message=host.news,
        notes=tuple(host.notes),
        events=tuple(host.events),
        bigram_loss=host.bigram_loss,
    )
    if state is None:
        return status
    recent, left = host.metrics[-3:], config.train.rounds - state.round if rounds_left is None else rounds_left
    seconds = [line.seconds for line in recent]
    return msgspec.structs.replace(
        status,
        rounds=state.round + left,
        rounds_finished=state.round,
        loss=tuple(sorted(state.train_losses.items())),
        eval_loss=tuple(sorted(state.evals.items())),
        figures=figures_of(host.metrics),
        tokens_total=state.tokens_total,
        tokens_per_s=sum(line.tokens for line in recent) / sum(seconds) if seconds else 0.0,
        bytes_up=host.traffic.up,
        bytes_down=host.traffic.down,
        ended_at=host.ended_at,
        seconds_left=left * sum(seconds) / len(seconds) if seconds else None,
    )


def ended_as(ended: RunFinished | None) -> RunState | None:
    """Return how a run ended, in the display's word; None while it goes on."""
    if ended is None:
        return None
    return "finished" if ended.ok else "stopped" if ended.kind == "stopped" else "failed"


def workers_seen(desk: AnyDesk, describe: Callable[[WorkerSession], WorkerStatus]) -> tuple[WorkerStatus, ...]:
    """Return every worker by name: lost, gone in good order, known from its supervisor only, or connected."""
    found: dict[str, WorkerStatus] = {}
    losses, left = desk.state.losses, desk.state.left
    for name in {**losses, **left}:
        how: WorkerState = left.get(name, "lost")
        found[name] = WorkerStatus(name=name, node="", pid=0, state=how, lost_count=losses.get(name, 0))
    for supervisor in desk.supervisors.values():
        state: WorkerState = "starting" if supervisor.restart_expected else "stopped"
        found[supervisor.worker] = WorkerStatus(
            name=supervisor.worker,
            node=supervisor.node,
            pid=supervisor.child_pid,
            state=state,
            lost_count=losses.get(supervisor.worker, 0),
        )
    for worker in desk.workers.values():
        found[worker.worker] = describe(worker)
    return tuple(found[name] for name in sorted(found))


def status_of(gateway: RoundsGateway) -> RunStatus:
    """Build the status of a run in rounds."""
    controller = gateway.controller
    if controller is None:
        return base_status(gateway, None)
    state = controller.state
    waiting_for, waiting_since = controller.training.leases.waited_for()
    run_state = _run_state(controller)
    stage, since = stage_of(gateway, run_state, controller.stalls.why or _finishing(controller))
    return msgspec.structs.replace(
        base_status(gateway, state, controller.desk.rounds_left),
        state=run_state,
        stage=stage,
        stage_since=since,
        round=state.open.round if state.open is not None else state.round,
        reducing=state.closing.round if state.closing is not None else 0,
        workers=workers_seen(controller.desk, partial(_worker, gateway, controller)),
        learning_rate=_learning_rate(controller),
        checkpoint_round=state.durable_round,
        checkpoint_at=gateway.checkpoint_at,
        checkpoint_bytes=gateway.room.checkpoint_bytes,
        disk_free=gateway.room.free,
        waiting_for=tuple(waiting_for),
        waiting_since=gateway.wall_of(waiting_since) if waiting_for else 0.0,
        message=message_of(gateway, controller.stalls.why),
        step=state.steps[-1],
        roll_out=gateway.roll_out_stage.state,
    )


def stage_of(host: Gateway[Any, Any, Any], state: RunState, why: str) -> tuple[str, float]:
    """Return the current activity, for users, and since when (Unix time in seconds).

    `why`: the reason for waiting, or the activity besides training; "" for none. A run that trains, or ended, has no
    other activity, unless an artifact is compiled.
    """
    stage, since = host.compiling
    idle = "" if state in ("training", "serving") or state in FINAL_STATES else host.stage
    return stage or why or idle, since


def message_of(host: Gateway[Any, Any, Any], why: str) -> str:
    """Return the newest event worth telling; `why`: the reason for waiting, "" for none.

    While something is compiled that is the stage, and that workers wait for it is no news.
    """
    return host.news if host.compiling[0] else why or host.news


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


def _worker(gateway: RoundsGateway, controller: Controller, worker: WorkerSession) -> WorkerStatus:
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
    return msgspec.structs.replace(
        connected_worker(worker, state, run.losses.get(worker.worker, 0)),
        round=train.round if train is not None else 0,
        step=train.step if train is not None else 0,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        version_lag=run.version - version if version >= 0 else None,
        slow=run.slow.get(worker.worker, ""),
        **({} if latest is None else _contribution(gateway, latest)),
    )


def _contribution(gateway: RoundsGateway, latest: Latest) -> dict[str, float | None]:
    return {
        "last_contribution_at": gateway.wall_of(latest.at),
        "step_s": latest.times.step_s,
        "transfer_s": latest.times.transfer_s,
        "share": latest.share,
    }


def connected_worker(worker: WorkerSession, state: WorkerState, lost: int) -> WorkerStatus:
    """Return a connected worker without its tasks; `lost`: how often it was lost before."""
    return WorkerStatus(
        name=worker.worker,
        node=worker.node,
        pid=worker.pid,
        state=state,
        backend=worker.backend,
        target=worker.target,
        device=worker.device,
        chosen=worker.chosen,
        verified=worker.verified,
        lost_count=lost,
        address=worker.address,
    )
