"""What is said of a round that is finished: its record, and its line of metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planetary.fabric.protocol.records import RoundClosed, RoundFinished, RoundStarted
from planetary.fabric.protocol.state import OpenRound
from planetary.fabric.protocol.status import ContributionMetrics, RoundMetrics
from planetary.machine.journal import Record

_NO_TIME = 1e-9  # seconds; a round is never divided by zero


def finished_record(
    opened: OpenRound, tokens_before: int, seconds: float, *, durable: bool, delta_norm: float | None = None
) -> RoundFinished:
    """Return the record that ends `opened`, which took `seconds`; `tokens_before` were trained before it."""
    seconds = max(seconds, _NO_TIME)
    workers = len({c.worker for c in opened.contributions})
    busy = sum(c.seconds for c in opened.contributions)
    return RoundFinished(
        round=opened.round,
        workers=workers,
        tokens=opened.tokens,
        tokens_total=tokens_before + opened.tokens,
        loss=opened.mean_loss,
        seconds=seconds,
        compute_fraction=min(1.0, busy / (workers * seconds)),
        durable=durable,
        delta_norm=delta_norm,
        contributions=_contributions(opened),
    )


def _contributions(opened: OpenRound) -> tuple[ContributionMetrics, ...]:
    """Return what is known of each contribution: of those that count, and of those that were refused."""
    counted = {c.task: c for c in opened.contributions}
    if opened.judged is None:
        return tuple(
            ContributionMetrics(worker=c.worker, loss=c.loss, seconds=c.seconds, grad_norm=c.grad_norm)
            for c in opened.contributions
        )
    lines = []
    for measure in opened.judged.measures:
        own = counted.get(measure.task)
        lines.append(
            ContributionMetrics(
                worker=measure.worker,
                loss=measure.loss,
                seconds=None if own is None else own.seconds,
                grad_norm=None if own is None else own.grad_norm,
                delta_norm=measure.delta_norm,
                cosine=measure.cosine,
                refused=measure.refused,
            )
        )
    return tuple(lines)


def finished_by_checkpoint(
    records: Sequence[Record], opened: OpenRound | None, tokens_before: int, round_: int
) -> RoundFinished | None:
    """Return the end of the round whose checkpoint is the journal's last deed, though the journal does not know it.

    A gateway that dies after it has committed the checkpoint of `round_` and before it has written `round_finished`
    leaves the round open. The checkpoint is the truth, so the round is finished; the time it took is what lies between
    its start (or the end of the one before it) and its closing.

    Args:
        records: the journal, before it is resumed.
        opened: the round that it leaves open.
        tokens_before: target tokens of the rounds before.
        round_: that of the checkpoint which is resumed.
    """
    if opened is None or opened.round != round_ or not opened.closed:
        return None
    ends = [r.t for r in records if isinstance(r, RoundClosed) and r.round == round_]
    return finished_record(opened, tokens_before, ends[-1] - began_at(records, round_), durable=True)


def began_at(records: Sequence[Record], round_: int) -> float:
    """Return the Unix time, in seconds, from which a round counts: its start or the end of the one before it.

    Whichever is later: so no second counts twice where rounds overlap.
    """
    times = [
        r.t
        for r in records
        if (isinstance(r, RoundStarted) and r.round == round_)
        or (isinstance(r, RoundFinished) and r.round == round_ - 1)
    ]
    return times[-1]


def unreported(records: Sequence[Record], told: Collection[int], until: int, inner_steps: int) -> list[RoundMetrics]:
    """Return the metrics of finished rounds up to `until` that are not among those `told`, in order.

    A gateway that dies while a round is evaluated leaves its line unwritten.
    """
    ends = {r.round: r for r in records if isinstance(r, RoundFinished) and r.round <= until and r.round not in told}
    return [metrics_of(ends[number], inner_steps) for number in sorted(ends)]


def metrics_of(finished: RoundFinished, inner_steps: int) -> RoundMetrics:
    """Return a round's metrics as far as the journal knows them; the shell adds the bytes."""
    return RoundMetrics(
        round=finished.round,
        loss=finished.loss,
        eval_loss=None,
        tokens=finished.tokens,
        tokens_total=finished.tokens_total,
        seconds=finished.seconds,
        workers=finished.workers,
        inner_steps=inner_steps,
        bytes_up=0,
        bytes_down=0,
        tokens_per_s=finished.tokens / finished.seconds,
        compute_fraction=finished.compute_fraction,
        delta_norm=finished.delta_norm,
        contributions=finished.contributions,
    )
