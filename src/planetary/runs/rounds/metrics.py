"""The metrics of each round of a training: one line of `metrics.jsonl`, with a slot for the kind of run.

A number that is not known, or not finite, is `None` and never NaN, which JSON does not have. "Up" is from the workers
to the gateway and "down" from the gateway to the workers, in bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from planetary.core import decoding
from planetary.fleet.protocol.kind_table import view_of
from planetary.fleet.protocol.records import MetricsLine


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


class Figure(msgspec.Struct, frozen=True):
    """A number of every round a kind of run shows beside losses.

    Attributes:
        name: as displays print it.
        points: (round, value) of the rounds that have one, ascending.
    """

    name: str
    points: tuple[tuple[int, float], ...]


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


class RoundMetrics(MetricsLine, frozen=True, kw_only=True):
    """One finished round: one line of `metrics.jsonl`."""

    round: int  # 1-based
    loss: float  # mean training loss over the round's contributions, weighted by tokens, in nats per token
    eval_loss: float | None  # held-out loss of the parameters after this round; None: not evaluated
    # Other figures of the evaluation: named set -> metric -> value
    evaluated: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
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
        """Read the kind's part of a line of a file. Raises `UserError` for a kind that is not known here."""
        if isinstance(self.own, dict):
            struct = getattr(view_of(str(self.own.get("kind", ""))), "metrics", None)
            if struct is None:
                raise ValueError(f"the kind of run {self.own.get('kind')!r} has no metrics of its own")
            msgspec.structs.force_setattr(self, "own", decoding.convert(self.own, struct, str_keys=True))

    @property
    def number(self) -> int:
        return self.round


def figures_of(metrics: Iterable[RoundMetrics]) -> tuple[Figure, ...]:
    """Return the figures of evaluations ("notes loss"), and of these rounds' kind of run, in the kind's order."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in sorted(metrics, key=lambda line: line.round):
        for name, values in line.evaluated.items():
            for metric, value in values.items():
                points.setdefault(f"{name} {metric}", []).append((line.round, value))
        for name, value in ({} if line.own is None else line.own.figures).items():
            points.setdefault(name, []).extend([] if value is None else [(line.round, value)])
    return tuple(Figure(name, tuple(known)) for name, known in points.items() if known)
