"""How the files and the status of a mixture are read: the numbers of a round and of each shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import msgspec

from planetary.runs.mixture.records import MixtureRecord, MixtureState
from planetary.runs.rounds.metrics import KindMetrics, KindReport, RoundMetrics
from planetary.runs.rounds.training_status import TrainingReader, TrainingStatus, status_of_files


class ShardMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a mixture in one round."""

    loss: float | None  # mean cross-entropy of the composer's steps, nats per token
    surrogate_error: float | None  # mean relative error of the surrogates at the last fit
    surrogate_step: int  # step of the surrogates
    # Steps of the run since the others' surrogates its composer uses were fitted, mean; negative where these are
    # further on; None: the composer is away, or uses none
    surrogate_age: float | None
    # Held-out, with own experts and the others' surrogates: of the first batch, after the last round of all of them,
    # so it compares with that of other shards and not with `eval_loss`; None: not evaluated in this round
    mixed_loss: float | None = None
    surrogate_loss: float | None = None  # held-out, with surrogates of all experts
    steps: int = 0  # steps of the composer; more than others' where these are slower or away
    sketch_bytes: int = 0  # size of the composer's sketches for expert workers


class MixtureMetrics(KindMetrics, frozen=True, kw_only=True, tag="mixture"):
    """One round of a mixture."""

    worker: ClassVar[str] = "composer"

    shards: tuple[ShardMetrics, ...]
    refused: dict[str, int]  # contributions that did not count, by reason: "stale", "fenced", "regression", "unusable"
    merges: dict[str, int]  # merges by tier
    merge_s: dict[str, float]  # mean seconds from a merge's first publication to the result, by tier
    sketch_bytes: int = 0  # size of all composers' sketches for expert workers
    updates: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # expert updates by expert workers: "accepted", and reasons of refusals
    refused_sketches: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # composers' refused sketches by reason: "stale", "future"
    seconds: float = 0.0  # duration of the round
    # Of two composers' choices for the same tokens, mean over pairs; None: not compared in this round
    routing_overlap: float | None = None  # part of the chosen experts both chose
    routing_divergence: float | None = None  # KL of the router's probabilities, nats

    def scalars(self) -> Iterator[tuple[str, float | None]]:
        for number, shard in enumerate(self.shards):
            for key in ShardMetrics.__struct_fields__:
                yield f"mixture/shards/{number}/{key}", getattr(shard, key)
        for counts in ("merges", "refused", "updates", "refused_sketches", "merge_s"):
            for key, value in getattr(self, counts).items():
                yield f"mixture/{counts}/{key}", value
        yield "mixture/sketch_bytes", self.sketch_bytes
        yield "mixture/routing_overlap", self.routing_overlap
        yield "mixture/routing_divergence", self.routing_divergence


class MixtureStatus(TrainingStatus, frozen=True, kw_only=True):
    """One training of a mixture, as the gateway sees it."""

    kind: str = "mixture"
    newest: MixtureMetrics | None = None  # state after the newest rounds: see `newest_mixture`


def mixture_metrics(metrics: Sequence[RoundMetrics]) -> list[MixtureMetrics]:
    """Return the part of a mixture, of the rounds that have it."""
    return [line.own for line in metrics if isinstance(line.own, MixtureMetrics)]


def newest_mixture(metrics: Sequence[RoundMetrics]) -> MixtureMetrics | None:
    """Return the state of a mixture after these rounds: the last one's numbers.

    Composers' views and their routing are not looked at in every round; they are from the last one in which they were.
    """
    known = mixture_metrics(metrics)
    if not known:
        return None
    last = known[-1]
    viewed = next((one for one in reversed(known) if any(s.mixed_loss is not None for s in one.shards)), last)
    compared = next((one for one in reversed(known) if one.routing_overlap is not None), last)
    shards = tuple(
        msgspec.structs.replace(shard, mixed_loss=seen.mixed_loss, surrogate_loss=seen.surrogate_loss)
        for shard, seen in zip(last.shards, viewed.shards, strict=True)
    )
    return msgspec.structs.replace(
        last,
        shards=shards,
        routing_overlap=compared.routing_overlap,
        routing_divergence=compared.routing_divergence,
    )


class MixtureReport(KindReport, frozen=True, kw_only=True, tag="mixture"):
    """A mixture, summed over all rounds unless noted otherwise."""

    shard_losses: tuple[float | None, ...]  # training loss of each shard's composer in the last round
    surrogate_error: float | None  # mean relative error in the last round
    merges: dict[str, int]  # merges by tier
    refused: dict[str, int]  # messages of composers that did not count, by reason
    updates: dict[str, int]  # expert updates by expert workers: "accepted", and reasons of refusals
    refused_sketches: dict[str, int]  # composers' refused sketches by reason
    sketch_bytes: int
    updates_per_s: dict[str, float]  # rate over the time in rounds
    # Held-out, where composers were last asked: with own experts and others' surrogates, and with surrogates only
    mixed_losses: tuple[float | None, ...]
    surrogate_losses: tuple[float | None, ...]
    routing_overlap: float | None  # agreement of two composers' choices in the newest comparison
    routing_divergence: float | None  # KL, nats


def _status_of_files(fold: MixtureState, metrics: Sequence[RoundMetrics]) -> MixtureStatus:
    seen = status_of_files(fold, metrics, "mixture", MixtureStatus)
    return msgspec.structs.replace(seen, newest=newest_mixture(metrics))


def _report_of(metrics: Sequence[RoundMetrics]) -> MixtureReport | None:
    known = mixture_metrics(metrics)
    newest = newest_mixture(metrics)
    if newest is None:
        return None

    def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
        return dict(sum((Counter(one) for one in counts), Counter()))

    updates, seconds = total(one.updates for one in known), sum(one.seconds for one in known)
    errors = [shard.surrogate_error for shard in newest.shards if shard.surrogate_error is not None]
    return MixtureReport(
        shard_losses=tuple(shard.loss for shard in newest.shards),
        surrogate_error=sum(errors) / len(errors) if errors else None,
        merges=total(one.merges for one in known),
        refused=total(one.refused for one in known),
        updates=updates,
        refused_sketches=total(one.refused_sketches for one in known),
        updates_per_s={what: count / seconds for what, count in updates.items()} if seconds else {},
        sketch_bytes=sum(one.sketch_bytes for one in known),
        mixed_losses=tuple(shard.mixed_loss for shard in newest.shards),
        surrogate_losses=tuple(shard.surrogate_loss for shard in newest.shards),
        routing_overlap=newest.routing_overlap,
        routing_divergence=newest.routing_divergence,
    )


READER = TrainingReader(
    name="mixture",
    metrics=MixtureMetrics,
    status=MixtureStatus,
    records=MixtureRecord,
    fold=MixtureState,
    status_of_files=_status_of_files,
    report_of=_report_of,
)
