"""The numbers of a round by name, as trackers take them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planetary.fleet.protocol.status import MixtureMetrics, RoundMetrics

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
_OF_SHARD = ("loss", "surrogate_error", "surrogate_age", "mixed_loss", "surrogate_loss", "steps", "sketch_bytes")


def scalars_of(line: RoundMetrics) -> dict[str, float]:
    """Return the finite numbers of a round: `loss`, `worker/NAME/seconds`, `mixture/shards/0/loss`, ..."""
    return {name: float(value) for name, value in _named(line) if value is not None and math.isfinite(value)}


def _named(line: RoundMetrics) -> Iterator[tuple[str, float | None]]:
    for key in _OF_ROUND:
        yield key, getattr(line, key)
    if line.merged is not None:
        for key in ("radial_ratio", "autocorrelation", "effective_rate"):
            yield key, getattr(line.merged, key)
    for one in line.contributions:
        place = f"worker/{one.worker}"
        yield f"{place}/counts", 0.0 if one.refused else 1.0
        for key in _OF_WORKER:
            yield f"{place}/{key}", getattr(one, key)
    for name, value in line.of_kind.figures.items():
        yield name.replace(" ", "_"), value
    if line.mixture is not None:
        yield from _of_mixture(line.mixture)


def _of_mixture(mixture: MixtureMetrics) -> Iterator[tuple[str, float | None]]:
    for number, shard in enumerate(mixture.shards):
        for key in _OF_SHARD:
            yield f"mixture/shards/{number}/{key}", getattr(shard, key)
    for kind in ("merges", "refused", "updates", "refused_sketches", "merge_s"):
        for key, value in getattr(mixture, kind).items():
            yield f"mixture/{kind}/{key}", value
    yield "mixture/sketch_bytes", mixture.sketch_bytes
    yield "mixture/routing_overlap", mixture.routing_overlap
    yield "mixture/routing_divergence", mixture.routing_divergence
