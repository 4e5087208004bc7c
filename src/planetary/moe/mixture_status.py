"""A mixture's run as every display gets it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from planetary.fabric.sessions import Phase, WorkerSession
from planetary.fabric.status import RunState, RunStatus, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from planetary.moe.mixture_controller import MixtureController
    from planetary.moe.mixture_gateway import MixtureGateway


def mixture_status(gateway: MixtureGateway, wall: float) -> RunStatus:
    """Build the status; `wall` is Unix time in seconds."""
    del wall
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
        stage=controller.stall or gateway.stage,
        round=min(state.round + 1, config.train.rounds),
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
        mixture=gateway.metrics[-1].mixture if gateway.metrics else None,
        message=controller.stall or gateway.news,
    )


def _run_state(controller: MixtureController) -> RunState:
    ended = controller.state.ended
    if ended is not None:
        return "finished" if ended.ok else "stopped" if ended.kind == "stopped" else "failed"
    if controller.state.round >= controller.policy.rounds:
        return "finishing"
    return "training" if controller.composing else "waiting"


def _workers(controller: MixtureController) -> tuple[WorkerStatus, ...]:
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
        found[worker.worker] = _worker(controller, worker)
    return tuple(found[name] for name in sorted(found))


def _worker(controller: MixtureController, worker: WorkerSession) -> WorkerStatus:
    composing = controller.composing.get(worker.session)
    state: WorkerState = "ready" if worker.phase is Phase.READY else "fetching"
    steps = controller.policy.plan.steps_per_round
    round_, step, loss = 0, 0, None
    if composing is not None:
        done = composing.step >= controller.policy.plan.steps
        state = "ready" if done else "training"
        round_, step, loss = min(composing.step // steps + 1, controller.policy.rounds), composing.step % steps, None
        loss = composing.loss if composing.loss is not None and math.isfinite(composing.loss) else None
    if controller.rounds.evaluates(worker.session):
        state = "evaluating"
    return WorkerStatus(
        name=worker.worker,
        node=worker.node,
        pid=worker.pid,
        state=state,
        backend=worker.backend,
        target=worker.target,
        round=round_,
        step=step,
        loss=loss,
        lost_count=controller.state.losses.get(worker.worker, 0),
    )
