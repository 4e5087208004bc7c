"""The gateway's view of the run, as every display gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from planetary.fleet.controller.desk import Desk, SessionT
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.fleet.protocol.status import (
    FINAL_STATES,
    RunState,
    RunStatus,
    WorkerState,
    WorkerStatus,
)

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import Gateway


StatusT = TypeVar("StatusT", bound=RunStatus)
WorkerT = TypeVar("WorkerT", bound=WorkerStatus)


def base_status(host: Gateway[Any], status: type[StatusT] = RunStatus, **own: Any) -> StatusT:
    """Return the status of a run that is being prepared; `own` has fields of the kind's `status`."""
    return status(
        run=host.config.run.name,
        state="preparing",
        stage=host.stage,
        stage_since=host.stage_since,
        started_at=host.started_at,
        message=host.news,
        notes=tuple(host.notes),
        events=tuple(host.events),
        bytes_up=host.traffic.up,
        bytes_down=host.traffic.down,
        ended_at=host.ended_at,
        **host.facts,
        **own,
    )


def workers_seen(
    desk: Desk[FabricPolicy, RunFold, SessionT], status: type[WorkerT], describe: Callable[[SessionT], WorkerT]
) -> tuple[WorkerT, ...]:
    """Return every worker by name: lost, gone in good order, known from the supervisor only, or connected."""
    found: dict[str, WorkerT] = {}
    losses, left = desk.state.losses, desk.state.left
    for name in {**losses, **left}:
        how: WorkerState = left.get(name, "lost")
        found[name] = status(name=name, node="", pid=0, state=how, lost_count=losses.get(name, 0))
    for supervisor in desk.supervisors.values():
        state: WorkerState = "starting" if supervisor.restart_expected else "stopped"
        found[supervisor.worker] = status(
            name=supervisor.worker,
            node=supervisor.node,
            pid=supervisor.child_pid,
            state=state,
            lost_count=losses.get(supervisor.worker, 0),
        )
    for worker in desk.workers.values():
        found[worker.worker] = describe(worker)
    return tuple(found[name] for name in sorted(found))


def stage_of(host: Gateway[Any], state: RunState, why: str) -> tuple[str, float]:
    """Return the current activity, for users, and since when (Unix time in seconds).

    `why`: the reason for waiting, or the activity besides training; "" for none. A run that trains, or ended, has no
    other activity, unless an artifact is compiled.
    """
    stage, since = host.compiling
    idle = "" if state in ("training", "serving") or state in FINAL_STATES else host.stage
    return stage or why or idle, since


def message_of(host: Gateway[Any], why: str) -> str:
    """Return the newest event worth telling; `why`: the reason for waiting, "" for none.

    During a compilation, that is the stage, and waiting workers are no news.
    """
    return host.news if host.compiling[0] else why or host.news


def connected_worker(
    worker: WorkerSession, state: WorkerState, lost: int, status: type[WorkerT] = WorkerStatus, **own: Any
) -> WorkerT:
    """Return a connected worker; `lost`: number of earlier losses, `own`: fields of the kind's `status`."""
    return status(
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
        **own,
    )
