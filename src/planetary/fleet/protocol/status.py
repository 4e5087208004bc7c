"""A run at one moment, and the metrics of each round: the contract with every display.

The gateway builds a `RunStatus` for every request; the live display, the dashboard and `planetary
watch` only read it. `RoundMetrics` is one line of `metrics.jsonl`. Both are plain JSON (`msgspec.json`); a
number that is not known, or not finite, is `None` and never NaN, which JSON does not have.

"Up" is from the workers to the gateway and "down" from the gateway to the workers, in bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from planetary.fleet.protocol.kind_table import view_of

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

READY: frozenset[RunState] = frozenset({"waiting", "training", "serving", "finishing"})
"""States in which workers can take part."""

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
    step: int = 0  # finished inner steps of the task, or since the previous round's end
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


class KindMetrics(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The numbers of one round that one kind of run has; the tag is the kind's name.

    Attributes:
        worker: word for a worker that contributes to a round.
    """

    worker: ClassVar[str] = "worker"

    @property
    def figures(self) -> dict[str, float | None]:
        """Those every display shows beside the losses, by name, in order; None: this round does not have it."""
        return {}

    @property
    def is_shaded(self) -> bool:
        """Whether a picture of the figures sets this round apart."""
        return False

    def scalars(self) -> Iterator[tuple[str, float | None]]:
        """Yield the numbers for trackers, by name: the figures, and those that the kind adds."""
        for name, value in self.figures.items():
            yield name.replace(" ", "_"), value


class Gauge(msgspec.Struct, frozen=True):
    """A number of a status, for Prometheus.

    Attributes:
        name: without the prefix of the package.
        text: meaning, as a sentence.
        labels: names of the labels.
        values: by the values of these labels.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float]


class KindStatus(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The part of a status that one kind of run has; the tag is the kind's name."""

    @property
    def lines(self) -> list[str]:
        """The part as lines of text."""
        return []

    def gauges(self) -> Iterator[Gauge]:
        """Yield the numbers for Prometheus."""
        yield from ()

    def takes_part(self, state: RunState) -> bool:
        """Whether clients or workers are served in this state; a training that waits takes workers in."""
        return state in READY


class KindReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The part of a report that one kind of run has; the tag is the kind's name."""


class KindPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of the figures of a kind of run over the minutes of training.

    Attributes:
        file: name in the run folder.
        axis: of the values, in words.
        each_round, held_out: name of a figure, and the words for it; the second one is drawn bold.
        shaded: words for the rounds that are set apart.
    """

    file: str
    axis: str
    each_round: tuple[str, str]
    held_out: tuple[str, str]
    shaded: str


@dataclass(frozen=True, kw_only=True)
class KindView:
    """How the parts of a status and of metrics are read that one kind has.

    Attributes:
        name: of the kind.
        metrics: type of `RoundMetrics.own`; None: the kind has none.
        status: type of `RunStatus.own`; None: the kind has none.
    """

    name: str
    metrics: type[KindMetrics] | None = None
    status: type[KindStatus] | None = None


def _read(part: dict[str, Any], slot: Literal["metrics", "status"]) -> Any:
    """Return a kind's part of metrics or of a status, which was read as a plain mapping.

    Raises:
        UserError: the kind is not known here.
        ValueError: the kind has no such part, or it does not fit.
    """
    struct = getattr(view_of(str(part.get("kind", ""))), slot)
    if struct is None:
        raise ValueError(f"the kind of run {part.get('kind')!r} has no {slot} of its own")
    return msgspec.convert(part, struct, str_keys=True)


class Figure(msgspec.Struct, frozen=True):
    """A number of every round a kind of run shows beside losses.

    Attributes:
        name: as displays print it.
        points: (round, value) of the rounds that have one, ascending.
    """

    name: str
    points: tuple[tuple[int, float], ...]


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
    if TYPE_CHECKING:
        own: KindStatus | None = None  # part of the kind of run; None: it has none
    else:  # msgspec alone would read it as the empty base of all parts
        own: Any = None

    def __post_init__(self) -> None:
        """Read the kind's part of an answer."""
        if isinstance(self.own, dict):
            msgspec.structs.force_setattr(self, "own", _read(self.own, "status"))


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
    inner_steps: int  # per contribution, or the mean of it
    bytes_up: int  # workers to gateway, in this round
    bytes_down: int  # gateway to workers, in this round
    tokens_per_s: float  # tokens / seconds
    compute_fraction: float  # worker-seconds spent in inner steps / (workers * seconds); at most 1
    delta_norm: float | None = None  # Euclidean norm of the workers' merged delta; None: the gateway has not seen it
    merged: MergedMetrics | None = None  # None: the gateway has not seen it
    contributions: tuple[ContributionMetrics, ...] = ()  # contributions in the order of arrival
    bytes_ring: int = 0  # ring: payload that workers sent to workers, in this round
    if TYPE_CHECKING:
        own: KindMetrics | None = None  # part of the kind of run; None: it has none
    else:  # msgspec alone would read it as the empty base of all parts
        own: Any = None

    def __post_init__(self) -> None:
        """Read the kind's part of a line of a file."""
        if isinstance(self.own, dict):
            msgspec.structs.force_setattr(self, "own", _read(self.own, "metrics"))


def figures_of(metrics: Iterable[RoundMetrics]) -> tuple[Figure, ...]:
    """Return the figures of these rounds' kind of run, in the kind's order."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in sorted(metrics, key=lambda line: line.round):
        for name, value in ({} if line.own is None else line.own.figures).items():
            points.setdefault(name, []).extend([] if value is None else [(line.round, value)])
    return tuple(Figure(name, tuple(known)) for name, known in points.items() if known)
