"""The gateway's view of its run, as every display gets it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from planetary.fabric.sessions import Phase, WorkerSession
from planetary.fabric.status import RunState, RunStatus, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from planetary.fabric.controller import Controller
    from planetary.fabric.gateway import Gateway


def status_of(gateway: Gateway, wall: float, now: float) -> RunStatus:
    """Build the status; `wall` is Unix time, `now` monotonic time, both in seconds."""
    config, controller = gateway.config, gateway.controller
    if controller is None:
        return RunStatus(
            run=config.run.name,
            state="preparing",
            stage=gateway.stage,
            rounds=config.train.rounds,
            inner_steps=config.train.inner_steps,
            started_at=gateway.started_at,
            message=gateway.news,
        )
    state = controller.state
    recent = gateway.metrics[-3:]
    seconds = [line.seconds for line in recent]
    left = (config.train.rounds - state.round) * sum(seconds) / len(seconds) if seconds else None
    return RunStatus(
        run=config.run.name,
        state=_run_state(controller),
        stage=controller.stall or _stage(gateway, controller),
        round=state.open.round if state.open is not None else state.round,
        reducing=state.closing.round if state.closing is not None else 0,
        rounds=config.train.rounds,
        rounds_finished=state.round,
        inner_steps=config.train.inner_steps,
        loss=tuple(sorted(state.train_losses.items())),
        eval_loss=tuple(sorted(state.evals.items())),
        tokens_total=state.tokens_total,
        tokens_per_s=sum(line.tokens for line in recent) / sum(seconds) if seconds else 0.0,
        bytes_up=gateway.traffic.up,
        bytes_down=gateway.traffic.down,
        started_at=gateway.started_at,
        ended_at=gateway.ended_at,
        seconds_left=left,
        workers=_workers(controller),
        message=controller.stall or gateway.news,
    )


def _stage(gateway: Gateway, controller: Controller) -> str:
    if controller.evaluation.versions and controller.state.round >= controller.policy.rounds:
        return "evaluating the last parameters"
    return gateway.stage


def _run_state(controller: Controller) -> RunState:
    ended = controller.state.ended
    if ended is not None:
        return "finished" if ended.ok else "stopped" if ended.kind == "stopped" else "failed"
    if controller.state.open is not None:
        return "training"
    return "finishing" if controller.state.round >= controller.policy.rounds else "waiting"


def _workers(controller: Controller) -> tuple[WorkerStatus, ...]:
    losses = controller.state.losses
    found: dict[str, WorkerStatus] = {}
    for name, count in losses.items():
        found[name] = WorkerStatus(name=name, node="", pid=0, state="lost", lost_count=count)
    for supervisor in controller.desk.supervisors.values():
        state: WorkerState = "starting" if supervisor.restart_expected else "stopped"
        found[supervisor.worker] = WorkerStatus(
            name=supervisor.worker,
            node=supervisor.node,
            pid=supervisor.child_pid,
            state=state,
            lost_count=losses.get(supervisor.worker, 0),
        )
    for worker in controller.desk.workers.values():
        found[worker.worker] = _worker(worker, losses.get(worker.worker, 0))
    return tuple(found[name] for name in sorted(found))


def _worker(worker: WorkerSession, lost: int) -> WorkerStatus:
    train = worker.train
    state: WorkerState = "ready"
    if worker.phase is not Phase.READY:
        state = "fetching"
    elif train is not None and (train.started or worker.evaluate is None):
        state = "training"
    elif worker.evaluate is not None:
        state = "evaluating"
    loss = train.loss if train is not None else None
    return WorkerStatus(
        name=worker.worker,
        node=worker.node,
        pid=worker.pid,
        state=state,
        backend=worker.backend,
        target=worker.target,
        round=train.round if train is not None else 0,
        step=train.step if train is not None else 0,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        lost_count=lost,
    )
