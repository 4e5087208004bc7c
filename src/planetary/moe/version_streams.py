"""Each expert's versions as a run's journal tells them, and the proof that there is one stream of them. Pure.

An expert belongs to one shard. Under direct ownership its versions are the shard's saved states, each said under the
shard's epoch; under offload they are the judged updates of its layer. Surrogates have the step that they were fitted
after as their version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planetary.core.errors import LocalProtocolError
from planetary.moe.records import (
    ExpertsAdvanced,
    MixtureRecord,
    ShardGranted,
    ShardKept,
    SurrogatesRefreshed,
)


class ExpertVersion(msgspec.Struct, frozen=True):
    """One version of an expert: its number, the steps that it has learned from, and who made it under which epoch."""

    version: int
    step: int
    by: str
    epoch: int


def expert_streams(
    records: Iterable[MixtureRecord], owners: Sequence[Sequence[int]]
) -> dict[tuple[int, int], list[ExpertVersion]]:
    """Return the versions of every expert, by layer and number, in the journal's order.

    Args:
        records: a run's whole journal.
        owners: shard of every expert, [layers][experts].

    Raises:
        LocalProtocolError: there is more than one stream: a state or surrogates under an epoch that was over, an epoch
            or a version that was given twice or left out, or a step back.
    """
    layers = range(len(owners))
    mine: dict[tuple[int, int], list[int]] = {}
    for layer, row in enumerate(owners):
        for expert, shard in enumerate(row):
            mine.setdefault((shard, layer), []).append(expert)
    streams: dict[tuple[int, int], list[ExpertVersion]] = {
        (layer, e): [] for layer in layers for e in range(len(owners[layer]))
    }
    owner: dict[int, tuple[int, str]] = {}  # shard -> epoch, worker
    kept: dict[int, int] = {}  # shard -> step
    fitted: dict[int, int] = {}
    updated: dict[tuple[int, int], int] = {}
    offloads = False
    for record in records:
        match record:
            case ShardGranted():
                epoch = owner.get(record.shard, (0, ""))[0]
                _follows(record.epoch == epoch + 1, f"shard {record.shard} had epoch {epoch}", record)
                owner[record.shard] = record.epoch, record.worker
            case ShardKept() | SurrogatesRefreshed():
                epoch, worker = owner.get(record.shard, (0, ""))
                _follows(record.epoch == epoch, f"shard {record.shard} was {worker}'s under epoch {epoch}", record)
                if isinstance(record, SurrogatesRefreshed):
                    before = fitted.get(record.shard, 0)
                    _follows(record.step > before, f"its surrogates were of step {before}", record)
                    fitted[record.shard] = record.step
                    continue
                before = kept.get(record.shard, 0)
                _follows(record.step >= before, f"it was at step {before}", record)
                kept[record.shard] = record.step
                for layer in layers if not offloads else ():
                    for expert in mine.get((record.shard, layer), ()):
                        stream = streams[layer, expert]
                        stream.append(ExpertVersion(len(stream) + 1, record.step, worker, epoch))
            case ExpertsAdvanced():
                if not offloads:  # saved states of composers were copies of these
                    offloads = True
                    streams = {key: [] for key in streams}
                before = updated.get((record.shard, record.layer), 0)
                _follows(record.version == before + 1, f"its layer {record.layer} was at version {before}", record)
                updated[record.shard, record.layer] = record.version
                for expert in mine.get((record.shard, record.layer), ()):
                    streams[record.layer, expert].append(
                        ExpertVersion(record.version, record.step, record.worker, owner.get(record.shard, (0, ""))[0])
                    )
            case _:
                pass
    return streams


def _follows(fine: bool, before: str, record: object) -> None:
    if not fine:
        raise LocalProtocolError(f"an expert has two streams of versions: {before}, and then came {record}")
