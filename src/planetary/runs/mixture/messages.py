"""Messages of a mixture trained over composers, between composers, expert workers and the gateway.

A `payload` comes with a message as one tensor of bytes, "payload", and is named by kind and sha256. A shard is the
experts that one composer owns; every grant of it has a higher `epoch`, and messages under an older one are stale.
`step` counts the steps a shard has taken, `progress` those of the run: the mean over all shards, as far as the sender
knows. The schedule of the learning rate goes by the latter.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from planetary.core.step import FunctionSpec
from planetary.fleet.protocol.messages import FABRIC, RoleJob, RoleMessage
from planetary.wire.message import Order

TierName = Literal["router", "latent", "backbone", "experts"]


class MixtureJob(RoleJob, frozen=True, kw_only=True):
    """The worker's job: `plan` is a `planetary.runs.mixture.plan.MixturePlan`, in JSON."""

    functions: dict[str, FunctionSpec]  # functions of the artifact's module


class MixtureReady(RoleMessage, frozen=True, kw_only=True):
    """The worker loaded the artifact. `shard`: whose state it has, if any."""

    artifact: str
    device: str = ""  # device name from the driver
    verified: str = ""  # result of the comparison with the job's reference, in words
    roles: tuple[str, ...] = ()  # roles allowed by the operator and possible on the device; empty: all
    composer_s: float = 0.0  # duration of a composer's largest function on the device; 0: not measured
    shard: int = -1
    epoch: int = 0
    step: int = 0


class GrantShard(RoleMessage, frozen=True, kw_only=True):
    """The worker is the composer of this shard; the shard's state comes along unless the worker keeps one."""

    shard: int
    epoch: int
    step: int  # step of the attached state
    payload: str  # "": go on with the state you have
    speaks: tuple[int, ...]  # shards as in `AssignSpeaker`
    steps: tuple[int, ...]  # steps of every shard


class AssignSpeaker(RoleMessage, frozen=True, kw_only=True):
    """The composer publishes the surrogates of these shards from now on, and of no others.

    With one owner of every expert they are those of the composer's shard. With several they come from the first that
    lives.
    """

    shards: tuple[int, ...]


class StandBy(RoleMessage, frozen=True, kw_only=True):
    """The worker owns no shard; one it had belongs to another composer."""

    reason: str


class PublishFragment(RoleMessage, frozen=True, kw_only=True):
    """A composer's parameters of one fragment, trained from version `base` of it."""

    shard: int
    epoch: int
    tier: TierName
    fragment: int
    base: int
    tokens: int
    steps: int
    payload: str


class FragmentMerged(RoleMessage, frozen=True, kw_only=True):
    """A version of a fragment, merged from the publications of the composers of `shards`."""

    tier: TierName
    fragment: int
    version: int
    shards: tuple[int, ...]
    payload: str


class PublishSurrogates(RoleMessage, frozen=True, kw_only=True):
    """Surrogates of the shard `of`, fitted when the composer of `shard`, which owns these experts, had taken `step`
    steps.
    """

    shard: int
    epoch: int
    of: int
    step: int
    progress: float  # at the fit; where expert workers fit, before the steps of their sketches, mean over layers
    error: float | None  # mean relative error on the calibration rows; None for exact copies
    payload: str  # the surrogates whole
    change: str = ""  # payload that comes along in place of them: their changes to those in the payload `base`
    base: str = ""


class SurrogatesReady(RoleMessage, frozen=True, kw_only=True):
    """A shard's surrogates, fitted by another composer."""

    shard: int
    step: int
    progress: float  # progress as in `PublishSurrogates`
    payload: str  # payload as in `PublishSurrogates`
    change: str = ""
    base: str = ""


class SaveShard(RoleMessage, frozen=True, kw_only=True):
    """A shard's whole state after `step` steps, from which the next owner goes on.

    Nothing that others wait for stands behind it.
    """

    order: ClassVar[Order] = Order.BESIDE
    shard: int
    epoch: int
    step: int
    progress: int
    loss: float | None = None  # mean cross-entropy of the steps since the last end of a round, at the end of one
    compute_s: float = 0.0  # duration of these steps
    payload: str


class StepTaken(RoleMessage, frozen=True, kw_only=True):
    """A composer took a step."""

    order: ClassVar[Order] = Order.AHEAD
    shard: int
    epoch: int
    step: int  # how many it has taken
    loss: float  # cross-entropy of that step, nats per token
    seconds: float  # duration of the work
    # Steps of the run since the others' surrogates it has were fitted, mean; None: it has none
    surrogate_age: float | None = None


class RunProgress(RoleMessage, frozen=True, kw_only=True):
    """How many steps every shard has taken; answers `StepTaken`."""

    order: ClassVar[Order] = Order.AHEAD
    steps: tuple[int, ...]


class ViewModel(RoleMessage, frozen=True, kw_only=True):
    """How a composer sees the model at the end of a round, on held-out batches.

    With it come the router's probabilities of the first batch. It is sent beside the others, before the state, because
    it has to be there before it.
    """

    order: ClassVar[Order] = Order.BESIDE
    shard: int
    epoch: int
    step: int
    progress: int
    mixed_loss: float  # loss with own experts and surrogates for the others, nats per token
    surrogate_loss: float  # surrogates for all
    payload: str


class RequestTokens(RoleMessage, frozen=True, kw_only=True):
    """A composer without access to tokens asks for those of `count` steps of the shard, from step `first` on."""

    order: ClassVar[Order] = Order.AHEAD
    shard: int
    epoch: int
    first: int
    count: int


class TokensReady(RoleMessage, frozen=True, kw_only=True):
    """Tokens of a shard's steps, one after the other, in the token file's type; shard -1: of the held-out batches."""

    shard: int
    first: int
    count: int

    def sending_order(self) -> Order:
        """Send held-out tokens in turn: they have to be there before the first evaluation."""
        return Order.BESIDE if self.shard >= 0 else Order.IN_TURN


class EvaluateMixture(RoleMessage, frozen=True, kw_only=True):
    """Evaluate the assembled model, which comes along, on held-out batches; answer with `MixtureEvaluated`."""

    task: int
    version: int  # the round it is from
    payload: str


class OfferSketches(RoleMessage, frozen=True, kw_only=True):
    """The input of one layer's experts on a composer in one step, for expert workers."""

    shard: int
    epoch: int
    step: int  # index of the step, from 0
    progress: int  # progress before the step
    layer: int
    version: int  # version of the composer's experts of the layer in the step
    payload: str


class ImproveExperts(RoleMessage, frozen=True, kw_only=True):
    """An expert worker is to improve a shard's experts of one layer with these sketches.

    The experts' weights and moments come along, and the sketches, packed into one payload.
    """

    task: int
    shard: int
    layer: int
    progress: int  # progress before the sketches' step
    fits: bool = False  # fit the surrogates of the new weights, too
    payload: str


class ExpertsImproved(RoleMessage, frozen=True, kw_only=True):
    """An expert worker's answer: the experts and their moments after the update."""

    task: int
    payload: str


class MixtureEvaluated(RoleMessage, frozen=True, kw_only=True):
    """The answer to `EvaluateMixture`."""

    order: ClassVar[Order] = Order.AHEAD
    task: int
    version: int
    loss: float  # mean over the batches
    batches: int


class ExpertsUpdate(RoleMessage, frozen=True, kw_only=True):
    """A shard's experts of one layer: the newest version, also where an update was refused and it is the old one.

    Their weights come along, or their changes to version `base`, and the expert workers' surrogates; nothing where
    `base` is that version itself.
    """

    shard: int
    layer: int
    version: int
    base: int = -1  # -1: the weights whole
    step: int  # index of the step whose sketches were last used; -1: none yet
    arrived: int  # index of the step whose sketch of that layer came last on this connection; -1: none yet
    waiting: tuple[int, ...]  # steps of the shard's sketches of that layer without answer, of all owners
    payload: str


MIXTURES = FABRIC.extended(
    MixtureJob,
    MixtureReady,
    GrantShard,
    AssignSpeaker,
    StandBy,
    PublishFragment,
    FragmentMerged,
    PublishSurrogates,
    RunProgress,
    SurrogatesReady,
    SaveShard,
    StepTaken,
    EvaluateMixture,
    MixtureEvaluated,
    OfferSketches,
    ImproveExperts,
    ExpertsImproved,
    TokensReady,
    ExpertsUpdate,
    ViewModel,
    RequestTokens,
)
"""Messages of a mixture's run, with all that a worker has to read to take part in any kind of run."""
