"""Evaluate a trained or published model on named sets of held-out tokens: `planetary evaluate`.

The model's whole forward pass, as `generate` and `serve` verify theirs against, runs in this process. So metrics may
read logits, which workers of a run do not send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.core.config import load_config
from planetary.core.configuration.pretrained import TOKENIZER_FILE, is_pretrained
from planetary.core.configuration.schema import BUILT_IN_TOKENIZERS, DataSource
from planetary.core.configuration.weight_file import pretrained_folder
from planetary.core.errors import UserError
from planetary.data.evaluation_sets import cut_into_rows, read_set
from planetary.data.metrics import (
    OWN_SET,
    Measured,
    Metric,
    ScoredRows,
    bytes_of_tokens,
    measured,
    metrics_of,
    row_sums,
)
from planetary.data.prepare import prepare
from planetary.data.reader import IGNORED, read_slice
from planetary.data.tokenizer import SAVED_TOKENIZER
from planetary.fleet.gateway.run_files import CONFIG, PRETRAINED
from planetary.run.model.example_evaluation import own_losses
from planetary.run.model.served import load_folder, load_trained
from planetary.runs.serve.program.traced_model import TracedModel

USUAL_METRICS = ("loss", "perplexity", "bits_per_byte", "accuracy")
USUAL_LENGTH = 1024
"""Tokens of a row for a pretrained model that takes more."""
SCORE_BYTES = 128 << 20
"""Bytes of the logits that are computed at a time, unless one row has more."""


class SetEvaluation(msgspec.Struct, frozen=True):
    """The evaluation of one set.

    Attributes:
        name: of the set.
        source: path or URL; "" for a run's own held-out part.
        targets: tokens that count.
        rows: sequences they are in.
        nbytes: bytes of text that the targets stand for.
        values: metric -> value.
        failed: metric -> why it has no value.
    """

    name: str
    source: str
    targets: int
    rows: int
    nbytes: int
    values: dict[str, Measured]
    failed: dict[str, str]


class ModelEvaluation(msgspec.Struct, frozen=True):
    """The evaluation of a model.

    Attributes:
        model: its name.
        version: round of the checkpoint; 0: there is none.
        length: targets of a whole row; 0: the run's own examples.
        sets: in the order given.
    """

    model: str
    version: int
    length: int
    sets: tuple[SetEvaluation, ...]


def evaluate_folder(
    folder: Path,
    sources: Mapping[str, DataSource],
    metrics: Sequence[str] = (),
    *,
    cache: Path,
    length: int | None = None,
    checkpoint: Path | None = None,
    is_over: Callable[[], bool] = lambda: True,
) -> Iterator[ModelEvaluation]:
    """Yield the evaluation of the model of a run's folder or of a pretrained one, and of a run's later versions.

    Args:
        folder: as of `planetary serve`.
        sources: name -> source; empty: the held-out batches that the run evaluates itself.
        metrics: names; empty: `USUAL_METRICS`. The loss is always there.
        cache: with prepared data, for a run's own held-out part.
        length: targets of a row; None: the run's sequence length, or `USUAL_LENGTH` at most.
        checkpoint: another one than the newest.
        is_over: whether no later version will be published; asked before each look. It may wait.

    Raises:
        UserError: model, metric or set is not usable, or they do not fit together.
    """
    if not is_pretrained(folder) and not (_run_of(folder) / CONFIG).is_file():
        raise UserError(f"there is nothing to evaluate in {folder}: expected a run folder, or a pretrained one")
    if not sources and not is_pretrained(folder) and load_config(_run_of(folder) / CONFIG).data.has_examples:
        if length is not None:
            raise UserError(f"--context {length}: the held-out part of {folder} is examples, which have one length")
        run, own = _run_of(folder), None if (folder / CONFIG).is_file() else folder
        for one in own_losses(run, metrics, cache=cache, checkpoint=checkpoint or own, is_over=is_over):
            values = {"loss": one.loss}
            found = SetEvaluation(OWN_SET, "", one.counted, one.examples, 0, values, {})
            yield ModelEvaluation(one.model, one.version, 0, (found,))
        return
    chosen = metrics_of(dict.fromkeys(("loss", *(metrics or USUAL_METRICS))))
    model = load_folder(folder) if checkpoint is None else load_trained(folder, checkpoint)
    folder = pretrained_folder(folder)
    length = _length(model, folder, length)
    if model.tokenizer.vocab_size > model.vocabulary:
        raise UserError(
            f"the tokenizer of {folder} has {model.tokenizer.vocab_size} tokens, and the model knows "
            f"{model.vocabulary}: it is another model's"
        )
    if sources:
        place = _tokenizer_place(folder)
        sets = {
            name: cut_into_rows(read_set(name, source, model.tokenizer, place, model.vocabulary), length)
            for name, source in sources.items()
        }
    else:
        sets = {OWN_SET: _own_rows(folder, length, cache)}
    scorer = _Scorer(model, chosen)
    while True:
        found = []
        for name, rows in sets.items():
            values, failed, totals = scorer.evaluate(model.params, rows)
            source = sources[name].source if name in sources else ""
            found.append(SetEvaluation(name, source, totals[0], len(rows), totals[1], values, failed))
        yield ModelEvaluation(model.name, model.version, length, tuple(found))
        newer = None
        while newer is None:
            ends = is_over()
            newer = None if model.refresh is None else model.refresh(model.version)
            if newer is None and ends:
                return
        assert isinstance(newer, TracedModel)
        model = newer


def _length(model: TracedModel, folder: Path, given: int | None) -> int:
    longest = model.only_length or (None if model.sizes is None else model.sizes.positions)
    length = given or (min(model.window, USUAL_LENGTH) if is_pretrained(folder) else model.window)
    if longest is not None and length > longest:
        raise UserError(f"--context {length}: the model {model.name} takes {longest} tokens at most")
    return length


def _run_of(folder: Path) -> Path:
    """Return the run's folder, also for the folder of one of the run's checkpoints."""
    return folder if (folder / CONFIG).is_file() else folder.parent.parent


def _tokenizer_place(folder: Path) -> str:
    """Return the tokenizer of a model's folder as `data.tokenizer` names one; see `trained_model.tokenizer_of_run`."""
    if is_pretrained(folder):
        return str(folder / TOKENIZER_FILE)
    run = _run_of(folder)
    named, kept = load_config(run / CONFIG).data.tokenizer, run / PRETRAINED / SAVED_TOKENIZER
    return str(kept) if named not in BUILT_IN_TOKENIZERS and kept.is_file() else named


def _own_rows(folder: Path, length: int, cache: Path) -> np.ndarray:
    """Return the rows of the held-out batches that a run evaluates, int64 [R, length + 1]."""
    if is_pretrained(folder):
        raise UserError(f"there is no held-out data in {folder}: it is no run. Give some, as --data NAME=PATH")
    config = load_config(_run_of(folder) / CONFIG)
    if length != config.train.sequence_length:
        raise UserError(
            f"--context {length}: the run's own held-out part has rows of train.sequence_length = "
            f"{config.train.sequence_length} tokens; other rows can be made of --data NAME=PATH"
        )
    pieces = prepare(config, cache / "data").eval_chunks(config)
    return cut_into_rows(np.concatenate([read_slice(piece).astype(np.int64) for piece, _ in pieces]), length)


class _Scorer:
    """Computes metrics of one model, a few rows at a time."""

    def __init__(self, model: TracedModel, metrics: Mapping[str, Metric]) -> None:
        self._metrics, self._vocabulary = metrics, model.vocabulary
        self._only_one = bool(model.only_length)  # such a graph takes one row
        self._bytes = bytes_of_tokens(model.tokenizer, model.vocabulary)
        self._reads_logits = any(metric.reads_logits for metric in metrics.values())

        def scored(params: object, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            logits = model.logits(params, inputs).astype(jnp.float32)
            logps = jax.nn.log_softmax(logits)
            nats = -jnp.take_along_axis(logps, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
            return jnp.where(targets >= 0, nats, 0.0), logits if self._reads_logits else None

        self._scored = jax.jit(scored)

    def evaluate(self, params: Any, rows: np.ndarray) -> tuple[dict[str, Measured], dict[str, str], tuple[int, int]]:
        """Return the values, the reasons of metrics without one, and the numbers of targets and bytes."""
        sums: dict[str, list[np.ndarray]] = {name: [] for name in self._metrics}
        failed: dict[str, str] = {}
        targets, nbytes = 0, 0
        for part in self._parts(jax.device_put(params), rows):
            targets, nbytes = targets + int(part.targets.sum()), nbytes + int(part.nbytes.sum())
            if not np.isfinite(part.nats).all():
                raise UserError("the model's loss is not finite: its parameters are damaged or diverged")
            for name in sums.keys() - failed.keys():
                try:
                    sums[name].append(row_sums(name, self._metrics[name], part))
                except UserError as error:
                    failed[name] = str(error)
        values = {}
        for name in [name for name in self._metrics if name not in failed]:
            try:
                values[name] = measured(name, self._metrics[name], np.concatenate(sums[name]))
            except (UserError, ValueError) as error:
                failed[name] = str(error)
        return values, failed, (targets, nbytes)

    def _parts(self, params: Any, rows: np.ndarray) -> Iterator[ScoredRows]:
        size = SCORE_BYTES // (4 * self._vocabulary * (rows.shape[1] - 1))
        size = 1 if self._only_one else min(max(size, 1), 8, len(rows))
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            inputs = np.where(part < 0, ~part, part)[:, :-1].astype(np.int32)
            targets = np.where(part < 0, IGNORED, part)[:, 1:]
            missing = size - len(part)  # the last rows are filled, so that nothing is compiled twice
            nats, logits = self._scored(
                params,
                np.pad(inputs, ((0, missing), (0, 0))),
                np.pad(targets, ((0, missing), (0, 0)), constant_values=IGNORED).astype(np.int32),
            )
            counts = targets >= 0
            yield ScoredRows(
                nats=np.asarray(nats, np.float64)[: len(part)].sum(1),
                targets=counts.sum(1),
                nbytes=np.where(counts, self._bytes[np.maximum(targets, 0)], 0).sum(1),
                tokens=targets if logits is not None else np.empty((0, 0), np.int64),
                logits=np.empty((0, 0, 0), np.float32) if logits is None else np.asarray(logits)[: len(part)],
            )


def evaluation_table(found: ModelEvaluation) -> list[str]:
    """Return an evaluation as lines of a table; a failed metric has its reason below."""
    rows = [("set", "metric", "value", "± standard error", "tokens", "rows")]
    notes = []
    for one in found.sets:
        for name, value in one.values.items():
            error = "-" if value.error is None else f"{value.error:.4g}"
            rows.append((one.name, name, f"{value.value:.5g}", error, f"{one.targets:,}", f"{one.rows:,}"))
        notes += [f"set {one.name}: {why}" for why in one.failed.values()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, metric, *numbers in rows:
        words = [name.ljust(widths[0]), metric.ljust(widths[1])]
        lines.append("  ".join([*words, *(text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True))]))
    of = f" after round {found.version}" if found.version else ""
    rows_are = f"rows of {found.length} tokens" if found.length else "examples as in the run"
    return [f"{found.model}{of}, {rows_are}", *lines, *notes]
