"""Tries a training step before anybody trains: does the model know every token, and has the first batch a gradient?

An id beyond a model's tables is no error to StableHLO: a gather clamps it to the last row, a one-hot product makes it
zero, and the run goes on with a loss that means nothing. The graph shows most limits of ids. Where it does not, the
loss is asked: the tokenizer's last id must not give the loss of an id that cannot exist. Where some tokens are no
targets, the loss has to be the mean over the others. The checks run on the reference, and the cache remembers the
models that passed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planetary.artifacts.store import write_atomically
from planetary.core.configuration.schema import Config
from planetary.core.errors import NumericsError, UserError
from planetary.core.example_layout import BATCH_PREFIX, Batch, ExampleLayout, column_name
from planetary.core.index_limits import IndexLimit
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.data.columns import first_example
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import IGNORED, batches_of, read_slice

if TYPE_CHECKING:
    from planetary.compiler.step.train_step import TrainStep

log = logging.getLogger(__name__)

LARGEST_COST = 10**13
"""Operations of a training step (six per parameter and token) up to which the loss is tried: minutes on one core."""

LARGEST_GRADIENT_COST = 10**12
"""The same for the gradient, whose execution without a plan for memory keeps every activation."""


def check_model(
    config: Config,
    step: TrainStep,
    data: PreparedData,
    limits: Mapping[str, Sequence[IndexLimit]],
    *,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    cache: Path,
    stage: Callable[[str], None],
    tried: tuple[float, float] | None,
) -> None:
    """Try the step on the reference: every id of the vocabulary, then the first batch of the data.

    Args:
        config: names model, tokenizer and shapes for the errors.
        step: takes inputs and targets of tokens.
        data: tokens and the size of their vocabulary.
        limits: of the model's arguments, by name; `check_values` has looked at those.
        params: initial parameters by name, host arrays.
        buffers: the model's constant inputs by name, host arrays.
        cache: remembers in `checks/` the models that passed.
        stage: called with the name of each activity.
        tried: loss and gradient norm of the first batch, where they are known.

    Raises:
        UserError: the model has fewer tokens than the tokenizer, or counts targets that are none.
        NumericsError: loss or gradient of the first batch is not finite, or the gradient is zero.
    """
    passed = cache / "checks" / f"{_key(config, step, data)}.json"
    if passed.exists():
        return
    from planetary.compiler.check.interpreter import step_cost

    cost = step_cost(step.spec)
    if cost > LARGEST_COST:
        log.info("the model is not tried before the run: a step of it takes %.1e operations", cost)
        return
    stage("trying the model on the first batch")
    if data.vocab_size > 1 and (asked := _without_limit(step.spec, data, limits)):
        _check_vocabulary(config, step, params, buffers, data, asked=asked)
    if data.is_marked:
        _check_ignored(config, step, params, buffers, data.layout)
    if config.data.packing:
        _check_segments(config, step, params, buffers, data.layout)
    if tried is not None or cost <= LARGEST_GRADIENT_COST:
        found = tried or _first_gradient(config, step, params, buffers, data)
        _judge(config.model.source, *found, scaled=config.train.precision == "f16")
    passed.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(passed, json.dumps({"model": step.spec.model, "vocab_size": data.vocab_size}).encode())


def _key(config: Config, step: TrainStep, data: PreparedData) -> str:
    weights = Path(config.model.weights) if config.model.weights else None
    parts = [
        step.spec.stablehlo_digest,
        data.key,
        data.vocab_size,
        config.run.seed,
        str(weights),
        weights.stat().st_mtime_ns if weights is not None and weights.exists() else 0,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_FAR = 2**31 - 2  # no vocabulary has this id


# --- the vocabulary -----------------------------------------------------------------------------------------


def _without_limit(spec: StepSpec, data: PreparedData, limits: Mapping[str, Sequence[IndexLimit]]) -> list[int]:
    """Return which arrays of a batch hold ids whose limits the model's graph does not show."""
    return [
        position
        for position, part in enumerate(spec.batch)
        if not any(limit.covers(part.shape[1:]) for limit in limits.get(part.name, ()))
        and (data.layout is None or column_name(part) in ("tokens", data.layout.targets))
    ]


def _check_vocabulary(
    config: Config,
    step: TrainStep,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    data: PreparedData,
    *,
    asked: Sequence[int],
) -> None:
    """Raise `UserError` where an argument does not tell the last ids apart; `asked`: positions in the batch."""
    from planetary.compiler.check.reference import run_reference
    from planetary.compiler.check.verify import make_trial

    spec, size = step.spec, data.vocab_size
    trial = make_trial(spec, params, buffers)  # no parameter is zero, so every embedding counts
    weights = [*trial.params.values(), *trial.buffers.values()]
    known: dict[tuple[int, int], float] = {}
    plain = _plain_batch(spec, data.layout)

    def loss(position: int, token: int) -> float:
        """Return the loss with `token` in every second place of one argument of the batch, and small ids elsewhere."""
        if (position, token) not in known:
            batch = [part.copy() for part in plain]
            batch[position][..., ::2] = token
            arguments = [*weights, *(a.astype(host_dtype(b.dtype)) for a, b in zip(batch, spec.batch, strict=True))]
            known[position, token] = float(run_reference(step.portable, "eval_step", arguments, ["f32"])[0])
        return known[position, token]

    def exists(position: int, token: int) -> bool:
        """Whether the model has `token`.

        One it does not have gives no number, or the loss of the id before it (both clamped to the last row), or that of
        ids far outside, above and below alike (no row at all).
        """
        found = loss(position, token)
        if not np.isfinite(found) or found == loss(position, token - 1):
            return False
        kind = np.iinfo(host_dtype(spec.batch[position].dtype))
        far = min(kind.max, _FAR)
        return kind.min == 0 or token == far or not found == loss(position, far) == loss(position, -far)

    for position in asked:
        if exists(position, size - 1) or not exists(position, 1):
            continue  # a model that does not even tell 0 and 1 apart does not look at this argument
        below, above = 1, size - 1  # exists, and does not
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if exists(position, middle) else (below, middle)
        raise _small_vocabulary(config, above, f"as its loss shows (argument {spec.batch[position].name})", size)


def _plain_batch(spec: StepSpec, layout: ExampleLayout | None) -> list[np.ndarray]:
    """Return a batch of tokens 0 and 1, int64; in packed sequences of one document each."""
    batch = []
    for part in spec.batch:
        values = np.arange(part.size).reshape(part.shape) % 2
        if layout is not None and column_name(part) == "segment_ids":
            values = np.ones_like(values)
        if layout is not None and column_name(part) == "positions":
            values = np.broadcast_to(np.arange(part.shape[1]), part.shape)
        if layout is not None and column_name(part) == "targets" and values.ndim == 3:
            values = np.stack([values[:, 0], 1 - values[:, 0]], 1)  # two answers with different losses
        batch.append(values)
    return batch


def _small_vocabulary(config: Config, tokens: int, how: str, size: int) -> UserError:
    where = " (model.options.vocab_size)" if "vocab_size" in config.model.options else ""
    return UserError(
        f"the model {config.model.source} has {tokens} tokens, {how}, but the tokenizer {config.data.tokenizer!r} has "
        f"{size}: ids from {tokens} on would train as another token, or as none. Give the model a vocabulary of at "
        f"least {size}{where}, or take the tokenizer that it was made for (data.tokenizer)"
    )


def check_values(config: Config, data: PreparedData, limits: Mapping[str, Sequence[IndexLimit]]) -> None:
    """Raise `UserError` where an integer of the data is an index beyond a table of the model.

    Args:
        config: of the run.
        data: of which all examples are looked at; of tokens, the ids of the tokenizer.
        limits: of the model's arguments, by name.
    """
    for argument, found in limits.items():
        name = argument.removeprefix(BATCH_PREFIX)
        for limit in found:
            if data.layout is None or (not config.data.has_columns and name in ("tokens", "targets")):
                wrong = np.flatnonzero(limit.illegal(np.arange(data.vocab_size)))
                if wrong.size:
                    how = f"as the use of its argument {argument} shows{_at(limit)}"
                    raise _small_vocabulary(config, int(wrong[0]), how, data.vocab_size)
            elif any(column.name == name for column in data.layout.columns):
                _check_column(config, data, name, limit)


_EXAMPLES = 1 << 14
"""Examples looked at together."""


def _check_column(config: Config, data: PreparedData, name: str, limit: IndexLimit) -> None:
    assert data.layout is not None
    for file in (data.train, data.held_out):
        examples = np.memmap(file.url, np.uint8, mode="r").reshape(file.count, data.layout.nbytes)
        for start in range(0, file.count, _EXAMPLES):
            wrong = limit.first_illegal(data.layout.column(examples[start : start + _EXAMPLES], name))
            if wrong is None:
                continue
            place, value = f"{Path(file.url).name}, example {start + wrong[0]}", wrong[1]
            if config.data.has_columns:
                places = (
                    (f"{one.source}, example {first[0]}", first[1])
                    for one in config.data.parts
                    if (first := first_example(one.source, config.data.columns, name, limit.first_illegal)) is not None
                )
                place, value = next(places, (place, value))
            raise UserError(
                f"{place}: {name!r} holds {value}, and the model {config.model.source} takes a row of {limit.rows} by "
                f"it{_at(limit)}: expected {limit.expected}. Any other value would train as another row, or as none: "
                "correct it, or give the model more rows. A value that marks an example or target as not counted has "
                "to be compared in the loss, as in jnp.where(labels >= 0, …) or PyTorch's ignore_index (docs/models.md)"
            )


def _at(limit: IndexLimit) -> str:
    return f" ({limit.place})" if limit.place else ""


# --- targets that do not count ------------------------------------------------------------------------------


def _check_ignored(
    config: Config,
    step: TrainStep,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    layout: ExampleLayout | None,
) -> None:
    """Raise `UserError` unless the loss is a mean over the targets that are not `IGNORED`.

    For means over the parts of a batch, each times the number of its targets, add up to the mean over all, whatever
    terms the loss has that do not depend on the targets.
    """
    from planetary.compiler.check.reference import run_reference
    from planetary.compiler.check.verify import make_trial

    spec = step.spec
    trial = make_trial(spec, params, buffers)
    *inputs, targets = _plain_batch(spec, layout)
    is_first = np.arange(targets.size).reshape(targets.shape) % 3 == 0

    def total(counts: np.ndarray) -> float:
        batch = [*inputs, np.where(counts, targets, IGNORED)]
        given = [a.astype(host_dtype(b.dtype)) for a, b in zip(batch, spec.batch, strict=True)]
        arguments = [*trial.params.values(), *trial.buffers.values(), *given]
        return float(np.count_nonzero(counts) * run_reference(step.portable, "eval_step", arguments, ["f32"])[0])

    whole, parts = total(np.ones_like(is_first)), total(is_first) + total(~is_first)
    if not math.isfinite(whole):
        scaled = ", adapter.alpha scales them" if config.adapter.rank else ""
        raise UserError(f"the loss of the model {config.model.source} is {whole} with its first values{scaled}")
    if not abs(whole - parts) <= SAME_LOSS * abs(whole):  # NaN is no mean either
        raise UserError(
            "the data has tokens that are no targets (what the assistant of a chat did not say, padding of packed "
            f"documents), and the loss of the model {config.model.source} counts them: with target {IGNORED} in some "
            "places it is not the mean over the others. Let the loss leave out negative targets, as "
            "planetary.models.layers.cross_entropy does and PyTorch's cross_entropy by itself (docs/models.md)"
        )


SAME_LOSS = 1e-4
"""Relative error of a float32 sum over a batch."""


def _check_segments(
    config: Config,
    step: TrainStep,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    layout: ExampleLayout | None,
) -> None:
    """Raise `UserError` where the scores of a document depend on the document before it in a packed sequence.

    The difference in loss of two targets of the second document is compared for two texts of the first. Terms that do
    not depend on targets cancel out.
    """
    from planetary.compiler.check.reference import run_reference
    from planetary.compiler.check.verify import make_trial

    spec = step.spec
    trial = make_trial(spec, params, buffers)
    named = dict(zip(map(column_name, spec.batch), _plain_batch(spec, layout), strict=True))
    second = np.arange(named["tokens"].shape[1]) >= named["tokens"].shape[1] // 2
    if not second[-1] or second[0]:
        return  # a sequence of one token has no two documents

    def loss(first: int, target: int) -> float:
        batch = named | {
            "tokens": np.where(second, named["tokens"], first),
            "segment_ids": np.where(second, 2, named["segment_ids"]),
            "positions": np.where(second, named["positions"] - int(np.argmax(second)), named["positions"]),
            "targets": np.where(second, np.full_like(named["targets"], target), IGNORED),
        }
        given = [batch[column_name(part)].astype(host_dtype(part.dtype)) for part in spec.batch]
        arguments = [*trial.params.values(), *trial.buffers.values(), *given]
        return float(run_reference(step.portable, "eval_step", arguments, ["f32"])[0])

    values = [loss(first, target) for first in (0, 1) for target in (0, 1)]
    change = abs(values[0] - values[1] - values[2] + values[3])
    if not change <= SAME_SCORES * max(map(abs, values)):
        raise UserError(
            f"the model {config.model.source} takes segment_ids, and its scores for a document depend on the document "
            "before it in the sequence. Let attention hide positions of other segments "
            "(query_segment == key_segment), or leave data.packing out (docs/models.md)"
        )


SAME_SCORES = 1e-6
"""Relative error of a float32 loss whose hidden scores have weight 0."""

# --- the first batch ----------------------------------------------------------------------------------------


def _first_gradient(
    config: Config,
    step: TrainStep,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    data: PreparedData,
) -> tuple[float, float]:
    """Return loss and gradient norm of the first batch at the initial values."""
    from planetary.compiler.check.reference import run_reference

    spec = step.spec
    batch = first_batch(config, data, spec.batch)
    given = [params[part.name] for part in spec.params] + [buffers[part.name] for part in spec.buffers]
    state: Sequence[TensorSpec] = spec.opt_state
    scalars = np.array(0, np.int32), np.array(0, np.float32)  # the rate changes nothing of these
    keys = spec.keys_of(config.run.seed, 0, 0)
    arguments = [*given, *(part.zeros() for part in state), *scalars, *batch, *keys]
    results = [*(part.dtype for part in (*spec.params, *state)), "f32", "f32"]
    *_, loss, norm = run_reference(step.portable, "train_step", arguments, results)
    return float(loss), float(norm)


def first_batch(config: Config, data: PreparedData, arguments: Sequence[TensorSpec]) -> Batch:
    """Return the arrays of the first step, or of its first micro-batch, as `arguments` of a loss take them."""
    first = data.order(config).locate(0)
    tokens = read_slice(data.train.slice(first.offset, arguments[0].shape[0] * config.block_tokens))
    return next(batches_of(arguments, tokens, data.layout))


def check_examples(layout: ExampleLayout, arguments: Sequence[TensorSpec], rows: int, config: Config) -> None:
    """Raise `UserError` unless a loss takes batches of `rows` examples of the data."""
    sources = ", ".join(one.source for one in config.data.parts)
    layout.check(arguments, rows, sources)
    if layout.targets and column_name(arguments[-1]) != layout.targets:
        names = ", ".join(argument.name for argument in arguments)
        raise UserError(
            f"the last array that the loss of {config.model.source} takes has to be {layout.targets}, which tell what "
            f"counts; it takes {names}"
        )


def _judge(source: str, loss: float, norm: float, *, scaled: bool) -> None:
    """Raise `NumericsError` for a loss or a gradient that nothing can be trained from."""
    tried = f"trying the model {source} on the first batch, before anything is trained: "
    if not np.isfinite(loss):
        raise NumericsError(
            f"{tried}expected a finite loss, found {loss}. The initial parameters give it: look at their values "
            "(model.weights, the manifest's init), at table values of buffers, and for a logarithm or a quotient of 0"
        )
    if not np.isfinite(norm):
        if scaled:
            return  # the first scale of the loss may be too large, and is then halved
        raise NumericsError(
            f"{tried}the loss is {loss:.6g}, but the gradient's norm is {norm}: expected a finite number. Look for a "
            "root, a logarithm or a quotient whose argument is 0, and for masked values that are infinite"
        )
    if norm == 0:
        raise NumericsError(
            f"{tried}the loss is {loss:.6g}, but its gradient is zero for every parameter: expected one that is not. "
            "Either no trained argument reaches the loss (model.roles, a stopped gradient), or the initial values are "
            "where it is flat"
        )
