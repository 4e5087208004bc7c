"""The record of a finished round, and the line of metrics, which waits for the held-out loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planetary.fleet.protocol.events import WriteMetrics
from planetary.machine.journal import Record
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.evaluation import Evaluation
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.metrics import ContributionMetrics, MergedMetrics, RoundMetrics
from planetary.runs.rounds.records import RoundClosed, RoundMerged, RoundStarted
from planetary.runs.rounds.state import OpenRound
from planetary.sync.outer_optimizers import OuterOptimizer

_NO_TIME = 1e-9  # seconds; a round is never divided by zero


def finished_record(
    opened: OpenRound,
    tokens_before: int,
    seconds: float,
    *,
    durable: bool,
    merged: MergedMetrics | None = None,
) -> RoundMerged:
    """Return the record that ends `opened`, which took `seconds`; `tokens_before` were trained before it."""
    seconds = max(seconds, _NO_TIME)
    workers = len({c.worker for c in opened.contributions})
    busy = sum(c.seconds for c in opened.contributions)
    return RoundMerged(
        round=opened.round,
        workers=workers,
        tokens=opened.tokens,
        tokens_total=tokens_before + opened.tokens,
        loss=opened.mean_loss,
        seconds=seconds,
        compute_fraction=min(1.0, busy / (workers * seconds)),
        durable=durable,
        delta_norm=None if merged is None else merged.delta_norm,
        merged=merged,
        contributions=_contributions(opened, seconds),
    )


def merged_metrics(opened: OpenRound, outer: OuterOptimizer, topology: Topology) -> MergedMetrics | None:
    """Return the metrics of the merged delta of a round; None where the gateway sees no deltas."""
    if topology.delta_norm is None or opened.judged is None:
        return None
    tokens = {c.task: c.tokens for c in opened.contributions}
    lengths = [(tokens[one.task], one.delta_norm) for one in opened.judged.measures if one.task in tokens]
    mean = sum(count * length for count, length in lengths) / max(1, sum(count for count, _ in lengths))
    rho = topology.autocorrelation
    return MergedMetrics(
        delta_norm=topology.delta_norm,
        radial_ratio=topology.delta_norm / mean if mean > 0 else None,
        autocorrelation=rho,
        effective_rate=None if rho is None else outer.effective_rate(rho),
    )


def _contributions(opened: OpenRound, round_s: float) -> tuple[ContributionMetrics, ...]:
    """Return the metrics of each contribution, counted or refused."""
    counted = {
        c.task: ContributionMetrics(
            worker=c.worker,
            loss=c.loss,
            seconds=c.seconds,
            grad_norm=c.grad_norm,
            transfer_s=c.transfer_s,
            share=min(1.0, (c.seconds + c.transfer_s) / round_s),
            waited_s=c.waited_s,
            version_lag=c.version_lag,
        )
        for c in opened.contributions
    }
    if opened.judged is None:
        return tuple(counted.values())
    return tuple(
        msgspec.structs.replace(
            counted.get(measure.task) or ContributionMetrics(worker=measure.worker, loss=measure.loss),
            delta_norm=measure.delta_norm,
            cosine=measure.cosine,
            refused=measure.refused,
        )
        for measure in opened.judged.measures
    )


def finished_by_checkpoint(
    records: Sequence[Record], opened: OpenRound | None, tokens_before: int, round_: int
) -> RoundMerged | None:
    """Return the end of the round whose checkpoint is the journal's last deed, though the journal does not know it.

    A gateway that dies after it has committed the checkpoint of `round_` and before it has written `round_finished`
    leaves the round open. The checkpoint is the truth, so the round is finished; the duration is the time from the
    round's start (or the previous round's end) to the closing.

    Args:
        records: the journal, before it is resumed.
        opened: the round it leaves open.
        tokens_before: target tokens of the rounds before.
        round_: that of the checkpoint which is resumed.
    """
    if opened is None or opened.round != round_ or not opened.closed:
        return None
    ends = [r.t for r in records if isinstance(r, RoundClosed) and r.round == round_]
    return finished_record(opened, tokens_before, ends[-1] - began_at(records, round_), durable=True)


def began_at(records: Sequence[Record], round_: int) -> float:
    """Return the Unix time, in seconds, from which a round counts: its start or the previous round's end.

    Whichever is later: so no second counts twice where rounds overlap.
    """
    times = [
        r.t
        for r in records
        if (isinstance(r, RoundStarted) and r.round == round_) or (isinstance(r, RoundMerged) and r.round == round_ - 1)
    ]
    return times[-1]


class MetricsLines:
    """Each finished round gets one line, complete where the parameters are evaluated."""

    def __init__(self, desk: RoundsDesk, evaluation: Evaluation, lines: Iterable[RoundMetrics]) -> None:
        """Start with lines an earlier incarnation of the gateway left unwritten."""
        self._desk, self._evaluation = desk, evaluation
        self._lines = {metrics.round: metrics for metrics in lines}

    def add(self, metrics: RoundMetrics | None) -> None:
        """Keep the line of a round that is finished now; None: it is not."""
        if metrics is not None:
            self._lines[metrics.round] = metrics

    def write(self, *, everything: bool = False) -> None:
        """Write the lines of rounds that are not evaluated any more; or all of them, at the end of the run."""
        for round_ in sorted(self._lines):
            if everything or round_ not in self._evaluation.versions:
                loss, values = self._desk.state.evals.get(round_), self._desk.state.values.get(round_, {})
                line = msgspec.structs.replace(self._lines.pop(round_), eval_loss=loss, evaluated=values)
                self._desk.out.append(WriteMetrics(line))

    def forget_after(self, round_: int) -> None:
        """The run went back: rounds after this one were not."""
        self._lines = {number: metrics for number, metrics in self._lines.items() if number <= round_}
