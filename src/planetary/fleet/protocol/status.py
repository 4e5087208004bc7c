"""A run at one moment, and the metrics of each round: the contract with every display.

The gateway builds a `RunStatus` for every request; the live display, the dashboard and `planetary
watch` only read it. `RoundMetrics` is one line of `metrics.jsonl`. Both are plain JSON (`msgspec.json`); a
number that is not known, or not finite, is `None` and never NaN, which JSON does not have.

"Up" is from the workers to the gateway and "down" from the gateway to the workers, in bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

RunState = Literal["preparing", "waiting", "training", "serving", "finishing", "finished", "failed", "stopped"]
"""preparing: data, export, compilation; waiting: too few workers for a round; training: a round is open;
finishing: last evaluation and pictures; finished, failed and stopped are final."""

Loss = Literal["", "crashed", "silent", "disconnected", "stuck", "refused", "banned", "replaced", "ended"]
"""How a worker was lost. crashed: the process ended; silent: nothing came from it for too long; disconnected: the
connection ended, or data for it could not be read; stuck: it made no progress, or failed, and the process is replaced;
refused: the device computes wrongly; banned: it is not used any more; replaced: by a newer connection of the worker;
ended: it took its leave; "": the journal of an older planetary."""

Leave = Literal["moved", "drained", "restarted"]
"""How a worker left in good order. moved: the site's scheduler needs it elsewhere; drained: by the operator; restarted:
the process is replaced at the operator's request."""

Departure = Literal[Loss, Leave]
"""How a worker went that had joined."""

WorkerState = Literal["starting", "fetching", "ready", "training", "evaluating", "serving", "lost", "stopped", Leave]
"""starting: the process runs; fetching: it loads the artifact; ready: connected and idle; lost: gone, may come back;
stopped: it ended on purpose; the others: see `Leave`."""

MOST_EVENTS = 100  # limit of events in a status

FINAL_STATES: frozenset[RunState] = frozenset({"finished", "failed", "stopped"})


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as the gateway sees it."""

    name: str  # stable, e.g. "node-a/0"; survives restarts
    node: str
    pid: int  # 0: no process is known
    state: WorkerState
    backend: str = ""  # "cpu", "cuda", "hip", "vulkan", "metal"
    target: str = ""  # e.g. "host", "sm_80"
    device: str = ""  # device name from the driver
    chosen: str = ""  # reason of the machine's choice of the backend, in words; "": the operator chose
    verified: str = ""  # result of the step's check on this device, in words
    round: int = 0  # round under work; 0: none yet
    step: int = 0  # finished inner steps of the task; of a composer: since the previous round's end, for the shard
    loss: float | None = None  # loss of that inner step
    lost_count: int = 0  # how often it was lost in this run
    address: str = ""  # address of the worker
    # Of the newest contribution; None before the first, and where the kind of run does not measure it
    last_contribution_at: float | None = None  # Unix time in seconds
    step_s: float | None = None  # seconds of an inner step
    transfer_s: float | None = None  # time for the parameters to leave the gateway, and for the result to arrive
    share: float | None = None  # fraction of the round's time in inner steps and transfers
    version_lag: int | None = None  # staleness of the parameters, in versions
    slow: str = ""  # why it is slower than the others; "": it is not
    # Of a served model; None in other runs
    texts: int | None = None  # texts it continues
    cache_used: float | None = None  # fraction of the cache's pages in use, 0 to 1


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


class KindMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one round that one kind of run has."""

    @property
    def figures(self) -> dict[str, float | None]:
        """Those every display shows beside the losses, by name, in order; None: this round does not have it."""
        return {}


class MixtureMetrics(KindMetrics, frozen=True, kw_only=True):
    """One round of a mixture."""

    shards: tuple[ShardMetrics, ...]
    refused: dict[str, int]  # contributions that did not count, by reason: "stale", "fenced", "regression", "unusable"
    merges: dict[str, int]  # merges by tier
    merge_s: dict[str, float]  # mean seconds from a merge's first publication to the result, by tier
    sketch_bytes: int = 0  # size of all composers' sketches for expert workers
    updates: dict[str, int] = {}  # expert updates by expert workers: "accepted", and reasons of refusals
    refused_sketches: dict[str, int] = {}  # composers' refused sketches by reason: "stale", "future"
    seconds: float = 0.0  # duration of the round
    # Of two composers' choices for the same tokens, mean over pairs; None: not compared in this round
    routing_overlap: float | None = None  # part of the chosen experts both chose
    routing_divergence: float | None = None  # KL of the router's probabilities, nats


class PolicyMetrics(KindMetrics, frozen=True, kw_only=True):
    """One round of reinforcement learning."""

    imitates: bool = False  # it trained on answers: there are no rewards
    reward: float | None = None  # mean over the completions the round was composed of
    held_out_reward: float | None = None  # mean reward of held-out prompts' likeliest completions, after the round
    staleness: dict[int, int] = {}  # how many groups were sampled by weights of how many versions ago
    groups_dropped: dict[str, int] = {}  # dropped groups by reason: "equal", "stale", "unusable"
    divergence: float | None = None  # KL of the sampling policies and the weights the round began with, nats
    entropy: float | None = None  # entropy of those weights' distributions at own tokens, nats
    reference_divergence: float | None = None  # KL to the reference policy; None: there is none
    tokens_sampled: int = 0  # generated since the round before, evaluations included

    @property
    def figures(self) -> dict[str, float | None]:
        """Rewards, and the mean staleness of the groups, in versions."""
        groups = sum(self.staleness.values())
        return {
            "sampled reward": self.reward,
            "greedy reward": self.held_out_reward,
            "staleness": sum(age * count for age, count in self.staleness.items()) / groups if groups else None,
        }


class Figure(msgspec.Struct, frozen=True):
    """A number of every round a kind of run shows beside losses.

    Attributes:
        name: as displays print it.
        points: (round, value) of the rounds that have one, ascending.
    """

    name: str
    points: tuple[tuple[int, float], ...]


class ServingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A served model, as the gateway sees it."""

    endpoint: str  # URL of the HTTP interface and the chat page
    model: str  # model name in requests; "": not loaded yet
    version: int  # the round the parameters are of; 0: they are of no run
    running: int  # texts a worker continues
    waiting: int  # texts without a worker
    cache_used: float  # part of the workers' caches that texts use, 0 to 1


PLACED_STATES = ("waiting", "offered", "placed", "cancelling", "finished", "failed", "cancelled")
"""Of a hub's job. waiting: no site has it; offered: a site was asked; placed: a site has it; the others end it."""


class PlacedJobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a hub that places jobs on sites."""

    job_id: str
    controller: str  # "training", "rl" or "inference"
    kind: str  # kind of run
    state: str  # one of PLACED_STATES
    site: str  # site with the job, or the newest offer of it; "": none. Over several sites: those of the parts
    why: str  # it is at that site; of a waiting job: why no site has it
    reason: str  # why it ended, is to end, or waits again
    attempt: int  # how many sites were asked, the present one included
    state_there: str  # newest reported state of the site's own job; "": not known
    name_there: str  # name of the site's own job
    strays: dict[str, str]  # sites where an earlier attempt may still run -> "recalled", or "away"
    priority: int | None  # None: as the site has it
    by: str  # name of the token it was submitted with
    submitted_at: float  # Unix time in seconds, as these
    placed_at: float | None  # start of the job's time at a site; None: none has had it
    ended_at: float | None
    whole: str = ""  # job over several sites it is a part of; "": none
    parts: tuple[str, ...] = ()  # jobs of the parts; empty: a job for one site
    progress: str = ""  # progress of the hub's own run of a job over several sites, in words


class HubSiteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A site of a hub that places jobs."""

    name: str
    connected: bool
    address: str  # address of the site; "": the site is away
    jobs: tuple[str, ...]  # jobs of the hub at the site, certain or possible
    controllers: dict[str, str]  # controllers taking jobs, each with "2 of 3 jobs"
    workers: tuple[str, ...]  # groups of workers that are alike, in words
    data_sets: tuple[str, ...]  # data sets at the site
    policy: str  # policy in words
    gb_today: float  # traffic of the site's line today


class HubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A hub that places jobs on sites."""

    hub: str  # identity of the hub, by which sites know it
    sites: tuple[HubSiteStatus, ...]
    jobs: tuple[PlacedJobStatus, ...]  # jobs in the order of submission


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as the gateway sees it."""

    run: str
    state: RunState
    stage: str = ""  # the activity, for users, while the state is preparing, waiting or finishing
    stage_since: float = 0.0  # Unix time in seconds at which the stage began; 0: not known
    round: int = 0  # the open round, or the last finished one when none is open; 1-based
    reducing: int = 0  # overlap: previous round during the reduction of its results; 0: none
    rounds: int = 0  # planned rounds; 0: the length of the run is not known yet
    rounds_finished: int = 0
    inner_steps: int = 0  # per round and worker
    loss: tuple[tuple[int, float], ...] = ()  # (round, training loss) of every finished round
    eval_loss: tuple[tuple[int, float], ...] = ()  # (round, held-out loss), where it was evaluated
    figures: tuple[Figure, ...] = ()  # figures of this kind of run beside losses, as rewards
    tokens_total: int = 0
    tokens_per_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    started_at: float = 0.0  # Unix time in seconds
    ended_at: float | None = None  # Unix time in seconds; None while it goes on
    seconds_left: float | None = None
    workers: tuple[WorkerStatus, ...] = ()  # workers by name
    message: str = ""  # the newest event worth telling: a lost worker, a stall, a failure
    notes: tuple[str, ...] = ()  # decisions and warnings, oldest first, each once
    mixture: MixtureMetrics | None = None  # metrics of a mixture: see `newest_mixture`
    serving: ServingStatus | None = None  # status of a served model
    events: tuple[tuple[float, str], ...] = ()  # (Unix time in seconds, text), oldest first; the newest ones
    learning_rate: float | None = None  # learning rate of the inner optimizer at the start of the open round
    bigram_loss: float | None = None  # held-out, of a bigram model of the same tokens
    checkpoint_round: int = 0  # round of the newest checkpoint; 0: there is none
    checkpoint_at: float | None = None  # Unix time in seconds at which it was written; None: not known
    checkpoint_bytes: int | None = None  # size of one; None: not known
    disk_free: int | None = None  # bytes that were free after the newest was written; None: not known
    waiting_for: tuple[str, ...] = ()  # workers without whose results the open round does not go on
    waiting_since: float = 0.0  # Unix time in seconds: when the others were done
    step: str = ""  # sha256 of the training step in use; "": none is known
    roll_out: str = ""  # state of the last replacement step: "preparing", "verified", "in use", "refused"
    hub: HubStatus | None = None  # status of a hub that places jobs, which is no run itself


class ContributionMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The contribution of one worker to a round."""

    worker: str
    loss: float  # mean training loss as it reports it, nats per token
    seconds: float | None = None  # duration of the inner steps; None: refused
    grad_norm: float | None = None  # norm at the last inner step
    delta_norm: float | None = None  # Euclidean norm of the start of the round minus the end parameters; ring: None
    cosine: float | None = None  # cosine of the delta and the mean of all that count; ring: None
    refused: str = ""  # why it does not count; "": it does
    transfer_s: float | None = None  # time for the parameters to leave the gateway, and for the result to arrive
    share: float | None = None  # fraction of the round's time in inner steps and transfers
    waited_s: float | None = None  # time in which the round waited for it alone
    version_lag: int | None = None  # staleness of the parameters, in versions


class MergedMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The merged delta of one round, as the star's gateway sees it.

    Attributes:
        delta_norm: Euclidean norm of the delta.
        radial_ratio: that over the mean norm of the deltas, weighted by tokens: 1 / √M for a mean of M orthogonal ones,
            about 1 with radial-directional averaging; None: nothing moved.
        autocorrelation: ρ, cosine with the previous round's delta; None: unknown.
        effective_rate: η (1 + μ / (1 − μρ)), which a long run moves per unit of delta; None: ρ is unknown, or the
            optimizer is Adam, whose steps do not depend on the length of the delta.
    """

    delta_norm: float
    radial_ratio: float | None
    autocorrelation: float | None
    effective_rate: float | None


class RoundMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One finished round: one line of `metrics.jsonl`."""

    round: int  # 1-based
    loss: float  # mean training loss over the round's contributions, weighted by tokens, in nats per token
    eval_loss: float | None  # held-out loss of the parameters after this round; None: not evaluated
    tokens: int  # target tokens trained on in this round
    tokens_total: int  # tokens of all rounds up to this one
    seconds: float  # time from the start of the round, or the previous round's end if that was later, to the end
    workers: int  # number of contributing workers
    inner_steps: int  # per contribution; of a mixture the mean over shards, of which `mixture` has each
    bytes_up: int  # workers to gateway, in this round
    bytes_down: int  # gateway to workers, in this round
    tokens_per_s: float  # tokens / seconds
    compute_fraction: float  # worker-seconds spent in inner steps / (workers * seconds); at most 1
    delta_norm: float | None = None  # Euclidean norm of the workers' merged delta; None: the gateway has not seen it
    merged: MergedMetrics | None = None  # None: the gateway has not seen it
    contributions: tuple[ContributionMetrics, ...] = ()  # contributions in the order of arrival
    bytes_ring: int = 0  # ring: payload that workers sent to workers, in this round
    mixture: MixtureMetrics | None = None  # metrics of a mixture
    policy: PolicyMetrics | None = None  # metrics of reinforcement learning

    @property
    def of_kind(self) -> KindMetrics:
        """The numbers of one kind of run."""
        return self.mixture or self.policy or KindMetrics()


def figures_of(metrics: Iterable[RoundMetrics]) -> tuple[Figure, ...]:
    """Return the figures of these rounds' kind of run, in the kind's order."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in sorted(metrics, key=lambda line: line.round):
        for name, value in line.of_kind.figures.items():
            points.setdefault(name, []).extend([] if value is None else [(line.round, value)])
    return tuple(Figure(name, tuple(known)) for name, known in points.items() if known)


def newest_mixture(metrics: Sequence[RoundMetrics]) -> MixtureMetrics | None:
    """Return the state of a mixture after these rounds: the last one's numbers.

    Composers' views and their routing are not looked at in every round; they are from the last one in which they were.
    """
    known = [line.mixture for line in metrics if line.mixture is not None]
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
