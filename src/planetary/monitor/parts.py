"""What each worker did in a run, from its journal and metrics. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from planetary.fabric.protocol.status import ContributionMetrics, RoundMetrics
from planetary.monitor.run_folder import Event


class WorkerPart(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part in a run. Means are over its contributions; None where nothing was measured."""

    worker: str
    address: str  # that it connected from last
    contributions: int  # that count
    refused: int  # that do not
    tokens: int
    step_s: float | None  # seconds of an inner step, mean
    transfer_s: float | None  # seconds of transfers, mean
    share: float | None  # of the rounds' time in inner steps and transfers, mean
    waited_s: float  # for which rounds waited for it alone, sum
    version_lag: float | None  # versions that its parameters were behind the newest, mean
    lost: int  # how often
    slow_rounds: int  # between a mark and its end, with the round of the mark
    slow: str  # why it was slow when it was marked last; "": it never was


def workers_of(events: Sequence[Event], metrics: Sequence[RoundMetrics]) -> tuple[WorkerPart, ...]:
    """Return the part of each worker that contributed to a round, by name."""
    names = sorted({one.worker for line in metrics for one in line.contributions})
    return tuple(_part(name, [e for e in events if e.get("worker") == name], metrics) for name in names)


def _part(name: str, events: Sequence[Event], metrics: Sequence[RoundMetrics]) -> WorkerPart:
    own = [(line, one) for line in metrics for one in line.contributions if one.worker == name]
    counted = [(line, one) for line, one in own if not one.refused]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    def each(of: str) -> list[float | None]:
        return [getattr(one, of) for _, one in counted]

    return WorkerPart(
        worker=name,
        address=next((e.get("address", "") for e in reversed(events) if e.get("event") == "worker_joined"), ""),
        contributions=len(counted),
        refused=len(own) - len(counted),
        tokens=sum(line.tokens // len(_counted(line)) for line, _ in counted),
        step_s=mean(None if one.seconds is None else one.seconds / max(1, line.inner_steps) for line, one in counted),
        transfer_s=mean(each("transfer_s")),
        share=mean(each("share")),
        waited_s=sum(value or 0.0 for value in each("waited_s")),
        version_lag=mean(each("version_lag")),
        lost=sum(e.get("event") == "worker_lost" for e in events),
        slow_rounds=_slow_rounds(events, metrics[-1].round if metrics else 0),
        slow=next((e.get("reason", "") for e in reversed(events) if e.get("event") == "worker_slow"), ""),
    )


def _counted(line: RoundMetrics) -> list[ContributionMetrics]:
    return [one for one in line.contributions if not one.refused]


def _slow_rounds(events: Sequence[Event], last: int) -> int:
    """Return how many rounds a worker was marked for; `last` is the run's."""
    rounds, since, lease_round = 0, None, 0
    for event in events:
        lease_round = event.get("round", lease_round)
        match event.get("event"):
            case "worker_slow":
                since = lease_round
            case "worker_recovered" | "worker_lost" if since is not None:
                rounds, since = rounds + lease_round - since, None
    return rounds + (0 if since is None else last + 1 - since)
