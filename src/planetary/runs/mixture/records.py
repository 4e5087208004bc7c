"""The syncer's journal: records of a mixture beside the fabric's, and the state they fold to."""

from __future__ import annotations

import msgspec

from planetary.core.errors import LocalProtocolError
from planetary.machine.journal import Record
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.rounds.fold import TrainingFold
from planetary.runs.rounds.records import RoundFinished, TrainingRecord, TrainingResumed

FORGET_STEPS = 20
"""Work on sketches that are older by so many steps is dropped (12.10), unless an expert worker has begun it."""


class FragmentStart(msgspec.Struct, frozen=True):
    """A fragment before the first step."""

    tier: Tier
    fragment: int
    payload: str


class MixtureStarted(Record, frozen=True, kw_only=True, tag="mixture_started"):
    """The start of all participants, as names in the payload store, and the run's ownership map."""

    steps_per_round: int  # steps of each shard in a round, on average
    owners: tuple[tuple[int, ...], ...]  # composer of each expert, [layers][experts]
    shards: tuple[str, ...]  # each shard's state
    surrogates: tuple[str, ...]  # each shard's surrogates; empty without
    experts: tuple[tuple[str, ...], ...] = ()  # under offload, each shard's experts with their moments, by layer
    fragments: tuple[FragmentStart, ...]


class ShardGranted(Record, frozen=True, kw_only=True, tag="shard_granted"):
    """A worker is the composer of a shard from now on."""

    shard: int
    epoch: int
    worker: str
    step: int  # first step
    progress: int = 0  # steps of the run then, the mean over all shards; journals of before have none
    why: str

    @property
    def news(self) -> str:
        if not self.step:
            return ""  # at the start all shards are given out
        return f"{self.worker} is the composer of shard {self.shard} from step {self.step} on: {self.why}"


class SpeakerChanged(Record, frozen=True, kw_only=True, tag="speaker_changed"):
    """Another owner of a shard's experts publishes their surrogates from now on."""

    shard: int
    by: int  # shard of which that owner is the composer
    why: str

    @property
    def news(self) -> str:
        return f"the composer of shard {self.by} speaks for the experts of shard {self.shard}: {self.why}"


class ShardKept(Record, frozen=True, kw_only=True, tag="shard_kept"):
    """A shard's whole state is in the payload store."""

    shard: int
    epoch: int
    step: int
    progress: int  # steps of the run, the mean over all shards, as far as the composer knew
    payload: str
    loss: float | None = None  # mean cross-entropy since the end of the last round, at the end of a round
    compute_s: float = 0.0  # spent in the steps since then


class FragmentAdvanced(Record, frozen=True, kw_only=True, tag="fragment_merged"):
    """A fragment has a new version."""

    tier: Tier
    fragment: int
    version: int
    shards: tuple[int, ...]  # shards of the merged publications
    payload: str
    velocity: str  # velocity of the outer step; "" without momentum
    seconds: float  # duration since the first publication
    why: str
    steps: int = 0  # the most that a publication had taken since the version before


class SurrogatesRefreshed(Record, frozen=True, kw_only=True, tag="surrogates_refreshed"):
    """A shard has new surrogates."""

    shard: int
    by: int | None = None  # shard whose composer made them, as the speaker of this one; None: this one's
    epoch: int  # epoch of that composer
    step: int
    progress: float = 0.0  # progress of the run at the fit; older journals have none
    error: float | None
    payload: str
    change: str = ""  # payload of their changes to those in the payload `base`; "": they came whole
    base: str = ""


class ExpertWork(Record, frozen=True, kw_only=True, tag="expert_work"):
    """Experts of one layer of a shard are to be improved with the sketches of one step.

    Attributes:
        shard, layer, step: the work's identity; composers count steps of their own.
        payloads: sha256 of the sketches, in the composers' order.
        progress: of the run at that step, by which work of several shards is older or newer.
        version: of these experts on their composer in that step. Other composers' sketches of the same work know these
            experts by their surrogates only.
    """

    shard: int
    layer: int
    step: int
    payloads: tuple[str, ...]
    progress: int
    version: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Shard, layer and step: offers with equal keys are the same work."""
        return self.shard, self.layer, self.step

    def outdates(self, work: tuple[int, int, int], progress: int) -> bool:
        """Whether other work is older by so many steps of the run, or of the composer, that it is dropped."""
        shard, layer, step = work
        same = (shard, layer) == (self.shard, self.layer)
        return progress < self.progress - FORGET_STEPS or (same and step <= self.step - FORGET_STEPS)


class ExpertWorkEnded(Record, frozen=True, kw_only=True, tag="expert_work_ended"):
    """Expert work ended, and the experts are as before.

    It is "old", "stale", or "failed" in every attempt, or was judged when the run was "over".
    """

    shard: int
    layer: int
    step: int
    why: str


class ExpertsAdvanced(Record, frozen=True, kw_only=True, tag="experts_updated"):
    """Expert workers' update of a shard's experts of one layer was judged.

    Where none of it counts, the version and the payload are those before.
    """

    shard: int
    layer: int
    version: int
    step: int  # step of the sketches
    worker: str
    accepted: int  # experts
    refused: dict[str, int]  # experts, by reason
    payload: str
    change: str = ""  # payload of the changes to the version before, where updates are lossy


class SyncNote(Record, frozen=True, kw_only=True, tag="sync_note"):
    """A refusal, or a change of hands; `what` is a word, `why` a sentence."""

    what: str
    why: str

    @property
    def news(self) -> str:
        return f"{self.what}: {self.why}"


MixtureRecord = (
    TrainingRecord
    | TrainingResumed
    | RoundFinished
    | MixtureStarted
    | ShardGranted
    | SpeakerChanged
    | ShardKept
    | FragmentAdvanced
    | SurrogatesRefreshed
    | ExpertWork
    | ExpertWorkEnded
    | ExpertsAdvanced
    | SyncNote
)


class Shard(msgspec.Struct):
    """A shard's state, as the journal has it.

    Attributes:
        step, progress: of the saved state.
        surrogate_step, surrogate_progress: steps of the composer, and of the run, at the fit of the surrogates.
        surrogate_change: payload of their changes to those in `surrogate_base`; "": they came whole.
        speaker: shard whose composer publishes this one's surrogates.
        round_step: steps of the composer at the end of the last finished round.
        marks: the shard's first state at or after the end of rounds not finished yet.
    """

    payload: str = ""
    step: int = 0
    progress: int = 0
    epoch: int = 0
    owner: str = ""
    surrogates: str = ""
    surrogate_step: int = 0
    surrogate_progress: float = 0.0
    surrogate_error: float | None = None
    surrogate_change: str = ""
    surrogate_base: str = ""
    speaker: int = 0
    round_step: int = 0
    marks: dict[int, ShardKept] = {}


class Fragment(msgspec.Struct):
    """The newest version of a fragment."""

    payload: str = ""
    velocity: str = ""
    version: int = 0
    shards: tuple[int, ...] = ()
    seconds: float = 0.0


class Experts(msgspec.Struct):
    """The authoritative experts of a shard in one layer, under offload."""

    payload: str = ""
    version: int = 0
    step: int = -1  # step of the newest judged sketches
    change: str = ""  # payload of the change from the previous version; "": only the whole exists


class MixtureState(TrainingFold, kw_only=True):
    """Everything the journal of a mixture determines.

    Attributes:
        steps_per_round: steps of each shard in a round, on average; 0 before `MixtureStarted`.
        owners: which composer owns which expert, [layers][experts].
        shards: by number.
        fragments: by tier and number.
        experts: by shard and layer; empty under direct ownership.
        work: expert work that has not ended, by shard, layer and step.
        judged: progress of the run at expert work that was judged and is not outdated, by shard, layer and step.
    """

    steps_per_round: int = 0
    owners: tuple[tuple[int, ...], ...] = ()
    shards: list[Shard] = msgspec.field(default_factory=list)
    fragments: dict[tuple[Tier, int], Fragment] = msgspec.field(default_factory=dict)
    experts: dict[tuple[int, int], Experts] = msgspec.field(default_factory=dict)
    work: dict[tuple[int, int, int], ExpertWork] = msgspec.field(default_factory=dict)
    judged: dict[tuple[int, int, int], int] = msgspec.field(default_factory=dict)

    def experts_of(self, shard: int) -> tuple[str, ...]:
        """Return the payloads of a shard's experts, by layer; none under direct ownership."""
        layers = len(self.owners) if self.experts else 0
        return tuple(self.experts[shard, layer].payload for layer in range(layers))

    def evaluates_last(self, rounds: int) -> bool:
        """Whether the last of `rounds` is finished, and the model not evaluated yet."""
        return self.round == rounds and rounds not in self.evals

    def needed(self) -> set[str]:
        """Return the names of all payloads the run may still ask for."""
        names = {s.payload for s in self.shards} | {s.surrogates for s in self.shards}
        names |= {s.surrogate_change for s in self.shards}
        names |= {kept.payload for s in self.shards for kept in s.marks.values()}
        names |= {f.payload for f in self.fragments.values()} | {f.velocity for f in self.fragments.values()}
        names |= {held.payload for held in self.experts.values()} | {held.change for held in self.experts.values()}
        names |= {payload for work in self.work.values() for payload in work.payloads}
        return names - {""}

    def _apply_own(self, record: Record) -> None:
        match record:
            case MixtureStarted():
                self.steps_per_round, self.owners = record.steps_per_round, record.owners
                surrogates = record.surrogates or ("",) * len(record.shards)
                self.shards = [
                    Shard(payload=p, surrogates=s, speaker=number)
                    for number, (p, s) in enumerate(zip(record.shards, surrogates, strict=True))
                ]
                self.fragments = {(f.tier, f.fragment): Fragment(payload=f.payload) for f in record.fragments}
                self.experts = {
                    (shard, layer): Experts(payload)
                    for shard, layers in enumerate(record.experts)
                    for layer, payload in enumerate(layers)
                }
            case ExpertWork():
                self.work[record.key] = msgspec.structs.replace(record, t=0.0)
                self.judged = {key: at for key, at in self.judged.items() if not record.outdates(key, at)}
            case ExpertWorkEnded():
                del self.work[record.shard, record.layer, record.step]
            case ExpertsAdvanced():
                work = self.work.pop((record.shard, record.layer, record.step), None)
                if work is not None:  # older journals have none
                    self.judged[work.key] = work.progress
                before = self.experts[record.shard, record.layer]
                # Before version 8 of the control protocol a refused update made a version, too.
                if record.version not in {before.version + 1, before.version + (record.accepted > 0)}:
                    raise LocalProtocolError(
                        f"the experts of shard {record.shard} layer {record.layer} are at version {before.version}; "
                        f"with {record.accepted} accepted updates they cannot be at {record.version} then"
                    )
                new = Experts(record.payload, record.version, record.step, record.change)
                same = Experts(before.payload, before.version, record.step, before.change)
                self.experts[record.shard, record.layer] = new if record.version > before.version else same
            case ShardGranted():
                shard = self.shards[record.shard]
                if record.epoch != shard.epoch + 1:
                    raise LocalProtocolError(
                        f"shard {record.shard} has epoch {shard.epoch}, it cannot get {record.epoch}"
                    )
                shard.epoch, shard.owner = record.epoch, record.worker
                self.opened = self.round + 1
                # Where steps are lost no saved state has, the run goes back. A state saved then ends no later round:
                # the composer saves another one after that round.
                last = record.progress // self.steps_per_round
                shard.marks = {round_: kept for round_, kept in shard.marks.items() if round_ <= last}
            case SpeakerChanged():
                self.shards[record.shard].speaker = record.by
            case ShardKept():
                shard = self.shards[record.shard]
                shard.payload, shard.step, shard.progress = record.payload, record.step, record.progress
                # A composer cut off at the end of a round is saved later: that state stands for the round.
                for round_ in range(self.round + 1, record.progress // self.steps_per_round + 1):
                    shard.marks.setdefault(round_, record)
            case FragmentAdvanced():
                held = self.fragments[record.tier, record.fragment]
                if record.version != held.version + 1:
                    raise LocalProtocolError(
                        f"{record.tier} fragment {record.fragment} is at version {held.version}, not before "
                        f"{record.version}"
                    )
                self.fragments[record.tier, record.fragment] = Fragment(
                    record.payload, record.velocity, record.version, record.shards, record.seconds
                )
            case SurrogatesRefreshed():
                shard = self.shards[record.shard]
                shard.surrogates, shard.surrogate_step = record.payload, record.step
                shard.surrogate_progress, shard.surrogate_error = record.progress, record.error
                shard.surrogate_change, shard.surrogate_base = record.change, record.base
            case RoundFinished():
                self.opened = min(record.round + 1, self.rounds)
                for shard in self.shards:
                    if record.round in shard.marks:
                        shard.round_step = shard.marks[record.round].step
                    shard.marks = {r: kept for r, kept in shard.marks.items() if r > record.round}
            case _:
                pass
