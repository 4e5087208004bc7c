"""A `RunStatus` from a run folder: the gateway's display, as far as the files tell. Pure.

Inner steps are not journaled, so a worker in training shows no step; the live gateway knows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.fleet.protocol.news import LastingNews, news_of
from planetary.fleet.protocol.records import AnyRecord, RunStarted
from planetary.fleet.protocol.status import (
    FINAL_STATES,
    MOST_EVENTS,
    RoundMetrics,
    RunState,
    RunStatus,
    WorkerStatus,
    figures_of,
    newest_mixture,
)
from planetary.monitor.run_folder import Event, RunHistory

_SILENT = frozenset({"round_finished", "lease_assigned", "lease_started", "delta_accepted", "round_started"})
_ROUNDS_FOR_SPEED = 3  # the duration of the newest rounds predicts that of the next


def status_of(history: RunHistory) -> RunStatus:
    """Return the newest status the journal and the metrics of a run tell."""
    state: RunState = "preparing"
    stage, message = "starting", ""
    started_at, rounds, open_round = 0.0, 0, 0
    under_way: set[int] = set()  # rounds; two where they overlap
    ended_at: float | None = None
    checkpoint: tuple[int, float | None] = (0, None)
    workers: dict[str, WorkerStatus] = {}
    step = ""
    for event in history.events:
        name = event.get("event")
        workers = _workers_after(workers, event)
        under_way = _under_way_after(under_way, event)
        step = str(event.get("model", step)) if name in ("run_started", "step_replaced") else step
        match name:
            case "checkpoint_written":
                checkpoint = int(event["round"]), float(event.get("t", 0.0))
            case "run_started" | "run_resumed":
                started_at = started_at or float(event.get("t", 0.0))
                rounds = int(event.get("rounds", rounds))
                state, stage, ended_at = "waiting", "waiting for workers", None
                if name == "run_resumed":
                    message = "the run was resumed"
            case "round_started":
                state, stage, open_round = "training", "", int(event["round"])
            case "round_finished":
                message = ""
            case "run_finished":
                ok, ended_at = bool(event.get("ok")), float(event.get("t", 0.0))
                failed = event.get("kind", "stopped") not in ("stopped", "")
                state, stage = ("finished" if ok else "failed" if failed else "stopped"), ""
                message = "" if ok else str(event.get("reason", ""))
            case _:
                message = _news(event) or message
    metrics = history.metrics
    done = metrics[-1].round if metrics else 0
    recent = metrics[-_ROUNDS_FOR_SPEED:]
    seconds = sum(m.seconds for m in recent)
    over = state in FINAL_STATES
    return RunStatus(
        run=history.facts.run if history.facts else history.name,
        state=state,
        stage=stage,
        round=max(open_round, done),
        reducing=min(under_way) if len(under_way) > 1 else 0,
        rounds=max(rounds, done),
        rounds_finished=done,
        inner_steps=_inner_steps(history, metrics),
        loss=tuple((m.round, m.loss) for m in metrics),
        eval_loss=tuple((m.round, m.eval_loss) for m in metrics if m.eval_loss is not None),
        figures=figures_of(metrics),
        tokens_total=metrics[-1].tokens_total if metrics else 0,
        tokens_per_s=sum(m.tokens for m in recent) / seconds if seconds > 0 else 0.0,
        bytes_up=sum(m.bytes_up for m in metrics),
        bytes_down=sum(m.bytes_down for m in metrics),
        started_at=started_at,
        ended_at=ended_at,
        seconds_left=seconds / len(recent) * max(0, rounds - done) if recent and not over else None,
        workers=tuple(_with_pace(workers[key], metrics) for key in sorted(workers)),
        message=message,
        mixture=newest_mixture(metrics),
        notes=_notes(history.events),
        events=_told(history.events),
        bigram_loss=history.facts.bigram_loss if history.facts else None,
        checkpoint_round=checkpoint[0],
        checkpoint_at=checkpoint[1],
        step=step,
    )


def _told(events: Sequence[Event]) -> tuple[tuple[float, str], ...]:
    """Return the newest events with the gateway's messages about them; rounds have their line of metrics."""
    told: list[tuple[float, str]] = []
    for event in reversed(events):
        if len(told) == MOST_EVENTS:
            break
        if event.get("event") in _SILENT:
            continue
        try:
            record = msgspec.convert(event, AnyRecord)
        except msgspec.ValidationError:  # of another kind of run, or another version
            continue
        if text := news_of(record):
            told.append((record.t, text))
    return tuple(reversed(told))


def _notes(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the lasting warnings, in the gateway's words."""
    lasting, told = LastingNews(), []
    for event in events:
        try:
            record = msgspec.convert(event, AnyRecord)
        except msgspec.ValidationError:  # of another kind of run, or another version
            continue
        told += [*record.notes, lasting.of(record)] if isinstance(record, RunStarted) else [lasting.of(record)]
    return tuple(note for note in told if note)


def _with_pace(worker: WorkerStatus, metrics: Sequence[RoundMetrics]) -> WorkerStatus:
    """Add the speed from the newest line of metrics with a contribution of the worker."""
    for line in reversed(metrics):
        for own in line.contributions:
            if own.worker == worker.name and own.seconds is not None:
                steps = max(1, line.inner_steps)
                return msgspec.structs.replace(worker, step_s=own.seconds / steps, share=own.share)
    return worker


def _under_way_after(rounds: set[int], event: Event) -> set[int]:
    match event.get("event"):
        case "round_started":
            return rounds | {int(event["round"])}
        case "round_finished":
            return rounds - {int(event["round"])}
        case "run_resumed" | "rolled_back" | "run_finished":
            return set()
    return rounds


def _inner_steps(history: RunHistory, metrics: Sequence[RoundMetrics]) -> int:
    if history.facts:
        return history.facts.inner_steps
    return metrics[-1].inner_steps if metrics else 0


def _news(event: Event) -> str:
    """Return the news of an event; empty for the ordinary ones."""
    reason = event.get("reason", "")
    match event.get("event"):
        case "worker_lost":
            return f"{event['worker']} was lost: {reason}"
        case "worker_left":
            return f"{event['worker']} was {event['kind']}: {reason}"
        case "worker_refused":
            return f"{event['worker']} is refused: {reason}"
        case "delta_rejected":
            return f"the contribution of {event['worker']} was rejected: {reason}"
        case "task_failed":
            return f"{event['worker']} failed: {reason}"
        case "checkpoint_failed":
            return f"no checkpoint of round {event['round']}: {reason}"
        case "run_paused":
            return f"the run pauses: {reason}"
        case "stalled":
            return f"stalled: {event.get('why', '')}"
    return ""


def _workers_after(workers: dict[str, WorkerStatus], event: Event) -> dict[str, WorkerStatus]:
    name, kind = event.get("worker"), event.get("event")
    if kind in ("run_resumed", "run_finished"):
        # Connected workers have to connect again, or end with the run.
        return {k: msgspec.structs.replace(w, state="stopped") for k, w in workers.items()}
    if not name:
        return workers
    old = workers.get(name) or WorkerStatus(name=name, node=event.get("node", ""), pid=0, state="starting")
    pid = int(event.get("pid", old.pid))
    match kind:
        case "worker_joined":
            new = msgspec.structs.replace(
                old,
                state="ready",
                pid=pid,
                backend=event.get("backend", ""),
                target=event.get("target", ""),
                device=event.get("device", ""),
                chosen=event.get("chosen", ""),
                verified=event.get("verified", ""),
                address=event.get("address", ""),
            )
        case "worker_refused":
            new = msgspec.structs.replace(old, state="stopped", pid=pid)
        case "worker_lost":
            new = msgspec.structs.replace(old, state="lost", lost_count=old.lost_count + 1, slow="")
        case "worker_left":
            new = msgspec.structs.replace(old, state=event["kind"], slow="")
        case "worker_slow":
            new = msgspec.structs.replace(old, slow=event.get("reason", ""))
        case "worker_recovered":
            new = msgspec.structs.replace(old, slow="")
        case "lease_assigned" | "lease_started":
            new = msgspec.structs.replace(old, state="training", pid=pid, round=int(event["round"]))
        case "delta_accepted":
            new = msgspec.structs.replace(
                old,
                state="ready",
                loss=event.get("loss"),
                last_contribution_at=event.get("t"),
                transfer_s=event.get("transfer_s"),
                version_lag=event.get("version_lag"),
            )
        case "delta_rejected" | "task_failed":
            new = msgspec.structs.replace(old, state="ready")
        case _:
            return workers
    return workers | {name: new}
