"""What is said of a round that is finished: its record, and its line of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.fabric.records import AnyRecord, RoundClosed, RoundFinished, RoundStarted
from planetary.fabric.state import OpenRound
from planetary.fabric.status import RoundMetrics

_NO_TIME = 1e-9  # seconds; a round is never divided by zero


def finished_record(opened: OpenRound, tokens_before: int, seconds: float, *, durable: bool) -> RoundFinished:
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
    )


def finished_by_checkpoint(
    records: Sequence[AnyRecord], opened: OpenRound | None, tokens_before: int, round_: int
) -> RoundFinished | None:
    """Return the end of the round whose checkpoint is the journal's last deed, though the journal does not know it.

    A gateway that dies after it has committed the checkpoint of `round_` and before it has written `round_finished`
    leaves the round open. The checkpoint is the truth, so the round is finished; the time it took is what lies between
    its start and its closing.

    Args:
        records: the journal, before it is resumed.
        opened: the round that it leaves open.
        tokens_before: target tokens of the rounds before.
        round_: that of the checkpoint which is resumed.
    """
    if opened is None or opened.round != round_ or not opened.closed:
        return None
    times = [r.t for r in records if isinstance(r, RoundStarted | RoundClosed) and r.round == round_][-2:]
    return finished_record(opened, tokens_before, times[-1] - times[0], durable=True)


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
    )
