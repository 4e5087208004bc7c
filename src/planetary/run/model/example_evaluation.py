"""Evaluate a run on examples of several arrays: the run's own loss of the held-out batches that it evaluates itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, load_checkpoint, load_latest
from planetary.compiler.check.reference import run_reference
from planetary.core.config import load_config
from planetary.core.errors import UserError
from planetary.data.metrics import Loss, Measured, measured
from planetary.data.reader import batches_of, read_slice
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG, STEP
from planetary.runs.rounds.preparation.preparation import Prepared, prepare_run
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runs.rounds.preparation.run_step import record_of, step_in_use


class OwnLoss(msgspec.Struct, frozen=True):
    """The held-out loss of a checkpoint.

    Attributes:
        model: its name.
        version: round of the checkpoint.
        loss: mean over what counts; the standard error is over batches.
        counted: targets that count; the examples where there are no targets.
        examples: in the batches.
    """

    model: str
    version: int
    loss: Measured
    counted: int
    examples: int


def own_losses(
    run: Path,
    metrics: Sequence[str],
    *,
    cache: Path,
    checkpoint: Path | None = None,
    is_over: Callable[[], bool] = lambda: True,
) -> Iterator[OwnLoss]:
    """Yield the held-out loss of a run on columns, packed documents or pairs, and those of later checkpoints.

    Args:
        run: the run's folder.
        metrics: names that are wanted; the loss is the only one there is.
        cache: with prepared data and steps; they are made again where they are gone.
        checkpoint: its folder; None: the newest.
        is_over: whether no later checkpoint will be written; asked before each look. It may wait.

    Raises:
        UserError: another metric is wanted, or the model or the data is not that of the run any more.
    """
    if others := [name for name in metrics if name != "loss"]:
        raise UserError(
            f"--metric {others[0]}: {run} was trained on examples of several arrays, of which only the loss is known; "
            "leave it out"
        )
    own = step_in_use(run, StepRecord) or record_of(run / STEP, StepRecord)
    prepared = prepare_run(load_config(run / CONFIG), cache, lambda _: None, own)
    found = load_latest(run / CHECKPOINTS) if checkpoint is None else load_checkpoint(checkpoint)
    while True:
        sums = _sums(prepared, found)
        loss, examples = measured(Loss.name, Loss(), sums), len(sums) * prepared.config.train.batch_size
        yield OwnLoss(prepared.step.spec.model, found.info.round, loss, int(sums[:, 1].sum()), examples)
        newer = found
        while newer.info.round == found.info.round:
            ends = is_over()
            newer = found if checkpoint is not None else load_latest(run / CHECKPOINTS)
            if ends and newer.info.round == found.info.round:
                return
        found = newer


def _sums(prepared: Prepared, found: Checkpoint) -> np.ndarray:
    """Return loss times weight, and weight, of each held-out batch, float64 [n, 2], as workers compute them."""
    spec, data = prepared.step.spec, prepared.data
    weights = [found.params[one.name] for one in spec.params]
    weights += [prepared.buffer_values[one.name] for one in spec.buffers]
    rows = []
    for piece, _ in data.eval_chunks(prepared.config, 1):
        for batch in batches_of(spec.batch, read_slice(piece), data.layout):
            loss = float(run_reference(prepared.step.portable, "eval_step", [*weights, *batch], ["f32"])[0])
            rows.append((loss * data.targets_in(piece), data.targets_in(piece)))
    return np.array(rows, np.float64)
