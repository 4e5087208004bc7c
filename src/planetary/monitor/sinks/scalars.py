"""The numbers of a round by name, as trackers take them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planetary.runs.rounds.metrics import RoundMetrics

_OF_ROUND = (
    "loss",
    "eval_loss",
    "tokens",
    "tokens_total",
    "seconds",
    "workers",
    "inner_steps",
    "bytes_up",
    "bytes_down",
    "bytes_ring",
    "tokens_per_s",
    "compute_fraction",
    "delta_norm",
)
_OF_WORKER = (
    "loss",
    "seconds",
    "grad_norm",
    "delta_norm",
    "cosine",
    "transfer_s",
    "share",
    "waited_s",
    "version_lag",
)


def scalars_of(line: RoundMetrics) -> dict[str, float]:
    """Return the finite numbers of a round: `loss`, `worker/NAME/seconds`, `mixture/shards/0/loss`, ..."""
    return {name: float(value) for name, value in _named(line) if value is not None and math.isfinite(value)}


def _named(line: RoundMetrics) -> Iterator[tuple[str, float | None]]:
    for key in _OF_ROUND:
        yield key, getattr(line, key)
    for name, values in line.evaluated.items():
        yield from ((f"eval/{name}/{metric}", value) for metric, value in values.items())
    if line.merged is not None:
        for key in ("radial_ratio", "autocorrelation", "effective_rate"):
            yield key, getattr(line.merged, key)
    for one in line.contributions:
        place = f"worker/{one.worker}"
        yield f"{place}/counts", 0.0 if one.refused else 1.0
        for key in _OF_WORKER:
            yield f"{place}/{key}", getattr(one, key)
    if line.own is not None:
        yield from line.own.scalars()
