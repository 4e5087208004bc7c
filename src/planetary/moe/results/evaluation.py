"""The held-out losses of a run's mixture with real experts and with surrogates, beside what the run reported."""

from __future__ import annotations

from pathlib import Path

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.config import load_config
from planetary.core.errors import UserError
from planetary.data.prepare import prepare
from planetary.data.reader import batches, read_slice
from planetary.fabric.gateway.run_files import CONFIG, METRICS
from planetary.fabric.protocol.status import RoundMetrics
from planetary.moe.results.inference import MixtureLosses, mixture_losses
from planetary.moe.results.run_state import is_run, read_run


class RunEvaluation(msgspec.Struct, frozen=True):
    """Attributes:
    run: name of its folder.
    steps: that every composer has done.
    round: that ends with them; 0: none does.
    tokens: batches, sequences of a batch and tokens of a sequence that the losses are of.
    losses: of the newest saved state.
    reported: what the run itself said after that round, as far as it is about the same tokens.
    """

    run: str
    steps: int
    round: int
    tokens: tuple[int, int, int]
    losses: MixtureLosses
    reported: Reported


class Reported(msgspec.Struct, frozen=True):
    """A run's own figures, nats per token; by shard, empty where there are none."""

    real: float | None = None
    mixed: tuple[float | None, ...] = ()
    alone: tuple[float | None, ...] = ()


def evaluate_run(folder: Path, cache: Path) -> RunEvaluation:
    """Evaluate the newest state that the composers of a run have saved, on its held-out tokens.

    Args:
        folder: of the run, which may be under way.
        cache: with prepared data, which is made when missing.

    Raises:
        UserError: it is no run of a mixture, or has not begun.
        PlanetaryError: a payload or the data cannot be read.
    """
    if not is_run(folder):
        raise UserError(
            f"cannot evaluate the saved training {folder}: it does not say which tokens it was not trained on. Whoever "
            "saved it has measured it: bench/parallax.py prints held_out, composer_view and surrogates_only"
        )
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: expected {CONFIG} in it, as `planetary train` writes it")
    config = load_config(folder / CONFIG)
    saved = read_run(folder, config)
    pieces = [piece for piece, _ in prepare(config, cache / "data").eval_chunks(config, 1)]
    size = config.train.batch_size, config.train.sequence_length
    held_out = [next(batches(read_slice(piece), *size)) for piece in pieces]
    ended, rest = divmod(saved.state.steps, config.train.inner_steps)
    round_ = 0 if rest else ended
    return RunEvaluation(
        folder.resolve().name,
        saved.state.steps,
        round_,
        (len(held_out), *size),
        mixture_losses(saved, held_out),
        _reported(folder, round_, last=round_ == config.train.rounds),
    )


def _reported(folder: Path, round_: int, *, last: bool) -> Reported:
    lines = read_json_lines(folder / METRICS, RoundMetrics) if (folder / METRICS).exists() else ()
    line = {line.round: line for line in lines}.get(round_)  # a resumed run may have trained it again
    if line is None:
        return Reported()
    if line.mixture is None or not last:  # in the middle of a run composers look at one batch only
        return Reported(line.eval_loss)
    shards = line.mixture.shards
    return Reported(line.eval_loss, tuple(s.mixed_loss for s in shards), tuple(s.surrogate_loss for s in shards))


def losses_table(found: RunEvaluation) -> list[str]:
    """Return the lines that tell it."""
    losses, reported = found.losses, found.reported
    rows = [("experts", "loss", "in the run", "surrogates alone", "in the run")]
    rows.append(("real", _number(losses.real), _number(reported.real), "", ""))
    if losses.surrogates is not None:
        rows.append(("surrogates", _number(losses.surrogates), "", "", ""))
    composers = range(len(losses.mixed))  # none without surrogates
    said = reported.mixed or [None for _ in composers], reported.alone or [None for _ in composers]
    for number in composers:
        values = losses.mixed[number], said[0][number], losses.alone[number], said[1][number]
        mixed, said_mixed, alone, said_alone = (_number(value) for value in values)
        rows.append((f"composer:{number}", mixed, said_mixed, alone, said_alone))
    first, *others = (max(len(cell) for cell in column) for column in zip(*rows, strict=True))
    table = [
        row[0].ljust(first) + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], others, strict=True)) for row in rows
    ]
    count, sequences, length = found.tokens
    after = f"round {found.round}, step {found.steps}" if found.round else f"step {found.steps}"
    return [
        f"{found.run} after {after}: held-out loss in nats per token, {count} batches of {sequences} × {length} tokens",
        *(line.rstrip() for line in table),
        *(["there are no surrogates: moe.rank is 0"] if losses.surrogates is None else []),
    ]


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
