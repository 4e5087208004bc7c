"""The gateway's view of its run, as every display gets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from planetary.fabric.protocol.sessions import Phase, WorkerSession
from planetary.fabric.protocol.status import RunState, RunStatus, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from planetary.fabric.controller.controller import Controller
    from planetary.fabric.controller.desk import AnyDesk
    from planetary.fabric.gateway.gateway import Gateway
    from planetary.fabric.gateway.rounds_gateway import RoundsGateway
    from planetary.fabric.protocol.records import RunFinished


class Progress(Protocol):
    """What the state of every kind of run has."""

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


def base_status(host: Gateway[Any, Any, Any], state: Progress | None, rounds_left: int | None = None) -> RunStatus:
    """Return what the status of every kind of run has in common; without a state the run is being prepared.

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


def workers_seen(
    desk: AnyDesk, losses: Mapping[str, int], describe: Callable[[WorkerSession], WorkerStatus]
) -> tuple[WorkerStatus, ...]:
    """Return every worker by name: lost, known from its supervisor only, or connected."""
    found: dict[str, WorkerStatus] = {}
    for name, count in losses.items():
        found[name] = WorkerStatus(name=name, node="", pid=0, state="lost", lost_count=count)
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
    stage, since = gateway.compiling
    if not stage:
        stage = controller.stalls.why or _stage(gateway, controller)
    return msgspec.structs.replace(
        base_status(gateway, state, controller.desk.rounds_left),
        state=_run_state(controller),
        stage=stage,
        stage_since=since,
        round=state.open.round if state.open is not None else state.round,
        reducing=state.closing.round if state.closing is not None else 0,
        workers=workers_seen(
            controller.desk, state.losses, lambda worker: _worker(worker, state.losses.get(worker.worker, 0))
        ),
        message=controller.stalls.why or gateway.news,
    )


def _stage(gateway: RoundsGateway, controller: Controller) -> str:
    if controller.evaluation.versions and controller.is_trained:
        return "evaluating the last parameters"
    return gateway.stage


def _run_state(controller: Controller) -> RunState:
    ended = ended_as(controller.state.ended)
    if ended is not None:
        return ended
    if controller.state.open is not None:
        return "training"
    return "finishing" if controller.is_trained else "waiting"


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
    return msgspec.structs.replace(
        connected_worker(worker, state, lost),
        round=train.round if train is not None else 0,
        step=train.step if train is not None else 0,
        loss=loss if loss is not None and math.isfinite(loss) else None,
    )


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
    )
