"""Each expert's versions, from a run's journal, and the proof that there is one stream of them. Pure.

An expert belongs to one shard. Under direct ownership the versions are the shard's saved states, each under the shard's
epoch; under offload they are the judged updates of the layer; with several owners they are the merges of their copies.
Surrogates have the step they were fitted after as their version, and come from the shard's speaker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planetary.core.errors import LocalProtocolError
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.records import (
    ExpertsAdvanced,
    FragmentAdvanced,
    MixtureRecord,
    ShardGranted,
    ShardKept,
    SpeakerChanged,
    SurrogatesRefreshed,
)
from planetary.runs.mixture.training.replicas import holders


class ExpertVersion(msgspec.Struct, frozen=True):
    """One version of an expert: number, the steps it has learned from, and who made it under which epoch.

    Of a merge of copies: the most steps an owner's copy has learned from, the owners, and the epoch of the first.
    """

    version: int
    step: int
    by: str
    epoch: int


def expert_streams(
    records: Iterable[MixtureRecord], owners: Sequence[Sequence[int]], replicas: int = 1
) -> dict[tuple[int, int], list[ExpertVersion]]:
    """Return the versions of every expert, by layer and number, in the journal's order.

    Args:
        records: a run's whole journal.
        owners: shard of every expert, [layers][experts].
        replicas: owners of every expert.

    Raises:
        LocalProtocolError: there is more than one stream: a state or surrogates under an epoch that was over,
            surrogates of somebody who does not speak for the shard, a merge of copies of somebody who owns none, an
            epoch or a version given twice or left out, or a step back.
    """
    found = _Streams(owners, replicas)
    for record in records:
        found.take(record)
    return found.streams


class _Streams:
    """The versions after some records."""

    def __init__(self, owners: Sequence[Sequence[int]], replicas: int) -> None:
        self._composers, self._replicas = 1 + max(max(row) for row in owners), replicas
        self._mine: dict[tuple[int, int], list[int]] = {}  # shard, layer -> experts
        for layer, row in enumerate(owners):
            for expert, shard in enumerate(row):
                self._mine.setdefault((shard, layer), []).append(expert)
        self._layers = range(len(owners))
        self.streams: dict[tuple[int, int], list[ExpertVersion]] = {
            (layer, expert): [] for layer in self._layers for expert in range(len(owners[layer]))
        }
        self._owner: dict[int, tuple[int, str]] = {}  # shard -> epoch, worker
        self._speaker: dict[int, int] = {}
        self._kept: dict[int, int] = {}  # shard -> step
        self._fitted: dict[int, int] = {}
        self._merged: dict[int, tuple[int, int]] = {}  # shard -> version, steps
        self._updated: dict[tuple[int, int], int] = {}
        self._offloads = False

    def take(self, record: MixtureRecord) -> None:
        """Go on by one record. Raises `LocalProtocolError`."""
        match record:
            case ShardGranted():
                epoch = self._owner.get(record.shard, (0, ""))[0]
                _follows(record.epoch == epoch + 1, f"shard {record.shard} had epoch {epoch}", record)
                self._owner[record.shard] = record.epoch, record.worker
            case SpeakerChanged():
                able = holders(record.shard, self._composers, self._replicas)
                _follows(record.by in able, f"the experts of shard {record.shard} have the owners {able}", record)
                self._speaker[record.shard] = record.by
            case SurrogatesRefreshed():
                by = record.shard if record.by is None else record.by
                speaker = self._speaker.get(record.shard, record.shard)
                _follows(by == speaker, f"the composer of shard {speaker} spoke for shard {record.shard}", record)
                self._under_its_epoch(by, record.epoch, record)
                before = self._fitted.get(record.shard, 0)
                _follows(record.step > before, f"its surrogates were of step {before}", record)
                self._fitted[record.shard] = record.step
            case ShardKept():
                worker = self._under_its_epoch(record.shard, record.epoch, record)
                before = self._kept.get(record.shard, 0)
                _follows(record.step >= before, f"it was at step {before}", record)
                self._kept[record.shard] = record.step
                if not self._offloads and self._replicas == 1:
                    self._extend(record.shard, self._layers, record.step, worker, record.epoch)
            case FragmentAdvanced(tier=Tier.EXPERTS):
                able = holders(record.fragment, self._composers, self._replicas)
                of_owners = self._replicas > 1 and set(record.shards) <= set(able)
                _follows(of_owners, f"the experts of shard {record.fragment} have the owners {able}", record)
                version, steps = self._merged.get(record.fragment, (0, 0))
                _follows(record.version == version + 1, f"its copies' merge was at version {version}", record)
                self._merged[record.fragment] = record.version, steps + record.steps
                grants = [self._owner.get(shard, (0, "")) for shard in record.shards]
                by = "+".join(worker for _, worker in grants)
                self._extend(record.fragment, self._layers, steps + record.steps, by, grants[0][0])
            case ExpertsAdvanced():
                if not self._offloads:  # saved states of composers were copies of these
                    self._offloads = True
                    self.streams = {key: [] for key in self.streams}
                before = self._updated.get((record.shard, record.layer), 0)
                due = {before + 1, before + (record.accepted > 0)}  # see `records.apply`
                _follows(record.version in due, f"its layer {record.layer} was at version {before}", record)
                if record.version == before:
                    return
                self._updated[record.shard, record.layer] = record.version
                epoch = self._owner.get(record.shard, (0, ""))[0]
                self._extend(record.shard, [record.layer], record.step, record.worker, epoch)
            case _:
                pass

    def _under_its_epoch(self, shard: int, epoch: int, record: object) -> str:
        """Return the composer of a shard under a record's epoch."""
        now, worker = self._owner.get(shard, (0, ""))
        _follows(epoch == now, f"shard {shard} was {worker}'s under epoch {now}", record)
        return worker

    def _extend(self, shard: int, layers: Iterable[int], step: int, by: str, epoch: int) -> None:
        for layer in layers:
            for expert in self._mine.get((shard, layer), ()):
                stream = self.streams[layer, expert]
                stream.append(ExpertVersion(len(stream) + 1, step, by, epoch))


def _follows(fine: bool, before: str, record: object) -> None:
    if not fine:
        raise LocalProtocolError(f"an expert has two streams of versions: {before}, and then came {record}")
