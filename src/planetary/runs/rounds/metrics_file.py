"""The lines of `metrics.jsonl`: a finished round's, those a resumed run keeps, and those it has still to write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.machine.journal import Record
from planetary.runs.rounds.kept_metrics import trim_metrics, write_lines
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.records import EvalFinished, RoundFinished, RoundMerged


def metrics_of(finished: RoundFinished, inner_steps: int) -> RoundMetrics:
    """Return a round's metrics as far as the journal knows them; the shell adds the bytes."""
    line = RoundMetrics(
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
    if not isinstance(finished, RoundMerged):
        return line
    return msgspec.structs.replace(
        line, delta_norm=finished.delta_norm, merged=finished.merged, contributions=finished.contributions
    )


def unreported(records: Sequence[Record], told: Collection[int], until: int, inner_steps: int) -> list[RoundMetrics]:
    """Return the metrics of finished rounds up to `until` that are not among those `told`, in order.

    A gateway dying during an evaluation leaves the round's line unwritten.
    """
    ends = {r.round: r for r in records if isinstance(r, RoundFinished) and r.round <= until and r.round not in told}
    return [metrics_of(ends[number], inner_steps) for number in sorted(ends)]


def lines_at_resume(
    records: Sequence[Record], written: Sequence[RoundMetrics], until: int, inner_steps: int, *, evaluates: bool
) -> tuple[list[RoundMetrics], list[RoundMetrics]]:
    """Return the metrics to keep, and those for the resumed run to write.

    After a power cut a line may be on the disk without the record of the evaluation. The journal is the state, so the
    line loses that held-out loss.

    Args:
        records: the journal, before it is resumed.
        written: the metrics so far, of rounds up to `until`.
        until: the round the run goes on from.
        inner_steps: of each round.
        evaluates: whether the parameters of `until` are evaluated now. An earlier stop may have written the round's
            line without the held-out loss; it is written again.
    """
    known = {record.version for record in records if isinstance(record, EvalFinished)}
    agreed = [
        line
        if line.round in known or line.eval_loss is None
        else msgspec.structs.replace(line, eval_loss=None, evaluated={})
        for line in written
    ]
    stay = [line for line in agreed if line.round < until or not evaluates]
    late = unreported(records, {line.round for line in written}, until, inner_steps)
    return stay, late + [line for line in agreed if line.round == until and evaluates]


def resume_metrics(
    path: Path,
    records: Sequence[Record],
    until: int,
    inner_steps: int,
    *,
    evaluates: bool,
    files: DurableFiles = DISK,
) -> tuple[list[RoundMetrics], list[RoundMetrics]]:
    """Cut the file of metrics to the rounds that stay; see `lines_at_resume`, whose result it returns."""
    stay, late = lines_at_resume(records, trim_metrics(path, until, files), until, inner_steps, evaluates=evaluates)
    if path.exists():
        write_lines(path, stay, files)
    return stay, late
