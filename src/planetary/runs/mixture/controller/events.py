"""Events and instructions of the mixture's controller, beside those of the fabric's machines."""

from __future__ import annotations

import msgspec

from planetary.core.step import FunctionSpec
from planetary.core.token_slice import Slice
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.machine.events import Event, Instruction, Payload
from planetary.runs.mixture.controller.syncer_machine import SyncPolicy
from planetary.runs.mixture.messages import MixtureJob
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.records import ExpertWork
from planetary.runs.mixture.training.routing import RoutingAgreement


class MixturePolicy(FabricPolicy, frozen=True, kw_only=True):
    """The constants of one run."""

    plan: MixturePlan
    functions: dict[str, FunctionSpec]
    config_hash: str
    sync: SyncPolicy
    secret: str  # decides which work is checked; no worker knows it
    first_task: int  # number of the first expert work; no other life of the gateway has one of those that follow
    checkpoint_every: int
    workers: int  # planned workers: the fastest of those within `startup_grace_s` of the first compose
    task_s: float  # smallest limit of a worker's task; it is longer where tasks usually are
    last_model_tries: int = 5  # how often the last round's model is put together, one grace time apart, when it fails
    stuck_after_s: float  # a composer that takes no step for this long is restarted, if steps are usually shorter

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.plan.training.expert_optimizer.roles)

    def job(self, artifact: str, reference: str) -> MixtureJob:
        return MixtureJob(
            run=self.run,
            artifact=artifact,
            reference=reference,
            functions=self.functions,
            plan=msgspec.json.encode(self.plan).decode(),
        )

    @property
    def rounds(self) -> int:
        """Rounds of the whole run."""
        return self.plan.steps // self.plan.steps_per_round

    @property
    def composers(self) -> int:
        """Composers of a complete mixture."""
        return self.plan.training.composers

    @property
    def grace_s(self) -> float:
        """Seconds after which a stall is reported: those for which a lost composer's shard is kept for it."""
        return self.sync.grace_s

    def eval_due(self, round_: int) -> bool:
        """Whether the assembled model of a round is evaluated."""
        return bool(self.plan.held_out) and (round_ == self.rounds or self.plan.evaluates_at(round_))

    def checkpoint_due(self, round_: int) -> bool:
        """Whether the assembled model of a round is written as a checkpoint."""
        return round_ == self.rounds or round_ % self.checkpoint_every == 0


class StoredPayload(Payload, frozen=True):
    """A payload in the store, as one tensor of bytes "payload"."""

    name: str


class WeightsOf(Payload, frozen=True):
    """The experts in a payload as composers get them: the weights they compute with."""

    experts: str


class NothingNew(Payload, frozen=True):
    """In place of the weights of experts a composer was sent before."""


class SliceTokens(Payload, frozen=True):
    """The tokens of slices, one after the other."""

    slices: tuple[Slice, ...]


class PublishedPart(msgspec.Struct, frozen=True):
    """One shard's part of a merge."""

    shard: int
    payload: str
    tokens: int
    steps: int


class MakeFragment(Instruction, frozen=True):
    """Merge publications into a new version of a fragment; answer with `FragmentMade`."""

    tier: Tier
    fragment: int
    version: int
    before: str  # payload of the version before
    velocity: str  # payload of the outer velocity; "" for none
    published: tuple[PublishedPart, ...]
    why: str


class FragmentMade(Event, frozen=True):
    """A merge is in the payload store; `failed`: why it is not."""

    tier: Tier
    fragment: int
    version: int
    shards: tuple[int, ...]
    payload: str = ""
    velocity: str = ""
    why: str = ""
    failed: str = ""
    steps: int = 0  # the most that a publication had taken


class AssembleModel(Instruction, frozen=True):
    """Put the model of a finished round together from all shards' states; answer with `ModelAssembled`."""

    round: int
    shards: tuple[str, ...]  # payloads, by shard
    checkpoint: bool  # write a checkpoint of the run folder, too
    experts: tuple[tuple[str, ...], ...] = ()  # under offload, payloads by shard and layer
    views: tuple[str, ...] = ()  # payloads: where each composer's router sends the same tokens


class ModelAssembled(Event, frozen=True):
    """The model of a round is in the payload store; `failed`: why it is not."""

    round: int
    payload: str = ""
    checkpoint: str = ""  # name of the checkpoint's folder
    seconds: float = 0.0
    failed: str = ""
    routing: RoutingAgreement | None = None


class WorkOf(Payload, frozen=True):
    """An expert worker's input: the experts in this payload, and the work's sketches."""

    work: ExpertWork
    experts: str


class JudgeExperts(Instruction, frozen=True):
    """Judge an expert worker's result against the experts it improved; answer with `ExpertsJudged`."""

    task: int
    shard: int
    layer: int
    before: str  # payload of the experts
    attachment: int  # attachment of the result's message
    second: int = 0  # attachment of another worker's result of the same work; 0: none
    version: int = 0  # version of these experts
    base_version: int = 0  # version of the experts that made the sketches
    used: tuple[str, ...] = ()  # payloads of the worker's sketches
    audited: bool = False
    other: str = ""  # payload of a sketch it had not; "": there is none
    fits: bool = False  # the work was to fit surrogates
    progress: int = 0  # progress of the run before the sketches' step


class ExpertsJudged(Event, frozen=True):
    """A result was judged, the accepted part is in the payload store; `failed`: why it cannot be judged."""

    task: int
    payload: str = ""  # payload of the experts; the old experts where nothing counts
    accepted: int = 0  # experts
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # experts, by reason
    failed: str = ""
    change: str = ""  # payload of the changes, as they travel to composers; "": they get the weights
    doubts: tuple[tuple[str, str], ...] = ()  # audits and comparisons: reason and sentence


class CollectPayloads(Instruction, frozen=True):
    """Remove old payloads that are not among these names."""

    keep: frozenset[str]
