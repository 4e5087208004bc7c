"""A `RunStatus` in the text format of Prometheus. Pure, but for the import of its library, which is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from planetary.core.errors import UserError
from planetary.fabric.protocol.status import RunState, RunStatus, WorkerState

# Metrics of a worker: field of `WorkerStatus`, name, help
_OF_WORKERS = (
    ("round", "worker_round", "Round that the worker works on."),
    ("step", "worker_step", "Inner steps finished in the worker's task."),
    ("loss", "worker_loss", "Training loss of the worker's newest inner step, nats per token."),
    ("step_s", "worker_step_seconds", "Seconds of an inner step in the worker's newest contribution."),
    ("transfer_s", "worker_transfer_seconds", "Seconds of transfers of the worker's newest contribution."),
    ("share", "worker_round_share", "Part of its round that the newest contribution took."),
    ("version_lag", "worker_version_lag", "Versions that the worker's parameters are behind the newest."),
    ("last_contribution_at", "worker_last_contribution_timestamp_seconds", "Unix time of its newest contribution."),
)


def exposition(*statuses: RunStatus) -> bytes:
    """Return the page that Prometheus scrapes, of one run or several. Raises `UserError` without the library."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError:
        raise UserError(
            "/metrics needs prometheus_client, which is not installed here: pip install 'planetary-compute[prometheus]'"
        ) from None

    class Run(Collector):
        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for status in statuses:
                for family in _families(status):
                    families.setdefault(family.name, family)
                    if families[family.name] is not family:
                        families[family.name].samples += family.samples
            return iter(families.values())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Run())
    return generate_latest(registry)


def _families(status: RunStatus) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def one(kind: Any, name: str, text: str, value: float | None) -> Iterator[Any]:
        if value is not None:
            family = kind(f"planetary_{name}", text, labels=["run"])
            family.add_metric([status.run], value)
            yield family

    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield from one(gauge, "rounds_planned", "Rounds that the run is to have.", status.rounds)
    yield from one(counter, "rounds_finished", "Finished rounds.", status.rounds_finished)
    yield from one(gauge, "loss", "Training loss of the last round, nats per token.", _last(status.loss))
    yield from one(gauge, "eval_loss", "Held-out loss, nats per token.", _last(status.eval_loss))
    yield from one(counter, "tokens", "Target tokens trained on.", status.tokens_total)
    yield from one(gauge, "tokens_per_second", "Target tokens a second in the last rounds.", status.tokens_per_s)
    yield from one(counter, "received_bytes", "Bytes from workers to the gateway.", status.bytes_up)
    yield from one(counter, "sent_bytes", "Bytes from the gateway to workers.", status.bytes_down)
    yield from one(gauge, "start_timestamp_seconds", "Unix time of the gateway's start.", status.started_at)
    yield from one(gauge, "waiting_for_workers", "Workers that the open round waits for.", len(status.waiting_for))
    yield from one(gauge, "checkpoint_round", "Round of the newest checkpoint; 0: none.", status.checkpoint_round)
    written = "Unix time at which the newest checkpoint was written."
    yield from one(gauge, "checkpoint_timestamp_seconds", written, status.checkpoint_at)
    yield from one(gauge, "checkpoint_bytes", "Size of a checkpoint.", status.checkpoint_bytes)
    yield from one(gauge, "disk_free_bytes", "Free on the gateway's disk after the last checkpoint.", status.disk_free)
    states = gauge("planetary_run_state", "1 for the state that the run is in.", labels=["run", "state"])
    for state in get_args(RunState):
        states.add_metric([status.run, state], float(state == status.state))
    yield states
    counts = gauge("planetary_workers", "Workers by state.", labels=["run", "state"])
    for state in get_args(WorkerState):
        counts.add_metric([status.run, state], sum(worker.state == state for worker in status.workers))
    yield counts
    yield from _of_workers(status)


def _of_workers(status: RunStatus) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["run", "worker"]
    for field, name, text in _OF_WORKERS:
        family = GaugeMetricFamily(f"planetary_{name}", text, labels=labels)
        for worker in status.workers:
            value = getattr(worker, field)
            if value is not None:
                family.add_metric([status.run, worker.name], value)
        yield family
    slow = GaugeMetricFamily("planetary_worker_slow", "1 for a worker that is slower than the others.", labels=labels)
    lost = CounterMetricFamily("planetary_worker_losses", "How often the worker was lost.", labels=labels)
    for worker in status.workers:
        slow.add_metric([status.run, worker.name], float(bool(worker.slow)))
        lost.add_metric([status.run, worker.name], worker.lost_count)
    yield slow
    yield lost


def _last(points: tuple[tuple[int, float], ...]) -> float | None:
    return points[-1][1] if points else None
