"""Everything between a configuration and a run that workers can join: data, model, training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.compiler.step.step_module import TrainStep
from planetary.core.configuration.schema import Config
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.step import StepSpec
from planetary.core.tensors import host_dtype
from planetary.data.evaluation_sets import with_sets
from planetary.data.fitting import fit_to_data
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import SIGNED, TOKEN_DTYPES
from planetary.fleet.preparation.compiling import ModelToCompile, StepToCompile
from planetary.runs.rounds.preparation.model_checks import check_examples, check_model, check_values, first_batch
from planetary.runs.rounds.preparation.prepared_steps import (
    StepRecord,
    StoredArrays,
    check_untrained,
    files_read,
    find_record,
    first_change,
    keep_record,
)
from planetary.runs.rounds.preparation.run_model import model_of
from planetary.runs.rounds.preparation.training_options import step_options

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The parts of a run.

    Attributes:
        config: the run's configuration, fitted to the data.
        data: the prepared token files.
        step: the training step in StableHLO.
        params: initial parameters by name, host arrays.
        buffer_values: the model's constant inputs by name, host arrays.
        record: the sources of the step; the store has all that it names.
    """

    config: Config
    data: PreparedData
    step: TrainStep
    params: Mapping[str, np.ndarray]
    buffer_values: Mapping[str, np.ndarray]
    record: StepRecord

    @property
    def buffers(self) -> str:
        """Digest of the buffers, packed, in the store; "" without any."""
        return self.record.buffers

    @property
    def base(self) -> str:
        """Digest of the buffers that were parameters (`model.freeze`, `[adapter]`); "" without any."""
        return self.buffers if self.config.model.freeze or self.config.adapter.rank else ""

    @property
    def param_count(self) -> int:
        """Number of trained scalars."""
        return self.step.spec.param_count


def prepare_run(
    config: Config,
    cache: Path,
    stage: Callable[[str], None],
    own: StepRecord | None = None,
    made: Callable[[StepToCompile], None] = lambda step: None,
) -> Prepared:
    """Prepare data, model and training step.

    A step made before from the same configuration, files and packages is read back.

    Args:
        config: the run's configuration.
        cache: folder of prepared data and compiled modules.
        stage: called with the name of each activity.
        own: the record of the run that goes on, which counts whatever became of these files and packages.
        made: called with a step that was not made before, ahead of its checks.

    Raises whatever is wrong with the user's data or model: `UserError`, `CompileError`, `NumericsError`,
    `ResourceError`.
    """
    stage("preparing the data")
    data = prepare(config, cache / "data")
    config = fit_to_data(config, data)
    data = with_sets(config, data)
    declared = config.model.options.get("vocab_size")
    if isinstance(declared, int) and declared < data.vocab_size:
        raise UserError(
            f"the tokenizer has {data.vocab_size} tokens but the model was given model.options.vocab_size = {declared}"
        )
    store, options = BlobStore(cache / "blobs"), step_options(config, marked_targets=data.is_marked)
    record = find_record(store, config, options, own)
    if config.data.has_pairs:
        from planetary.runs.rounds.preparation.preference import with_reference

        stage("the pairs' log-probabilities by the model as it is")
        data = with_reference(config, data, store, record)
    tried: tuple[float, float] | None = None
    if record is None:
        record, tried = _make_step(config, options, store, data, stage=stage, made=made)
        if own is not None:
            check_frozen(config, own, record)
    else:
        stage("reading the training step that was prepared before")
        check_values(config, data, record.limits)
    spec = record.spec
    step = TrainStep("", spec, store.get(spec.stablehlo_digest), notes=record.notes)
    _check_batch(config, step, data)
    _check_statistics(config, spec)
    check_untrained(spec.model, spec.buffers)
    params = StoredArrays(store, record.params, spec.params)
    buffers = StoredArrays(store, record.buffers, spec.buffers)
    check_model(
        config, step, data, record.limits, params=params, buffers=buffers, cache=cache, stage=stage, tried=tried
    )
    return Prepared(config, data, step, params, buffers, record)


def _make_step(
    config: Config,
    options: StepOptions,
    store: BlobStore,
    data: PreparedData,
    *,
    stage: Callable[[str], None],
    made: Callable[[StepToCompile], None],
) -> tuple[StepRecord, tuple[float, float] | None]:
    """Return the step's record, and loss and gradient norm of the first batch where the comparison computed both."""
    stage("exporting the model to StableHLO")
    from planetary.compiler.check.meaning import compare_meaning
    from planetary.compiler.frontend.index_limits import index_limits
    from planetary.compiler.step.train_step import build_train_step

    with files_read() as read:
        model = model_of(config)
    stage("differentiating it and adding the optimizer")
    step = build_train_step(model, options)
    params, buffers = model.start, model.initial("buffer")
    made(ModelToCompile(step, params, buffers))
    stage("comparing loss and gradients with the model's own framework")
    limits = index_limits(model)
    check_values(config, data, limits)  # before the author's framework gets such a batch
    batch = _first_batch(config, data, model)
    compared = compare_meaning(model, batch)
    meaning = compared.meaning
    log.info("meaning of the model: %s", meaning.summary)
    record = keep_record(
        store,
        config,
        options,
        portable=step.portable,
        spec=step.spec,
        params=params,
        buffers=buffers,
        notes=(*step.notes, *([meaning.summary] if meaning.author != "framework" else [])),
        meaning=meaning,
        limits=limits,
        read=read,
    )
    # Numbers of 16 bits with a small range may overflow where the model's own do not.
    return record, None if batch is None or config.train.precision == "f16" else compared.first


def check_frozen(config: Config, own: StepRecord, made: StepRecord) -> None:
    """Raise `UserError` where a run would go on with other values of tensors that it does not train."""
    freezes = config.model.freeze or config.adapter.rank
    if freezes and (changed := first_change(own.frozen, made.frozen)):
        raise UserError(
            f"the run was trained with other values of {changed!r}, which it does not train, than "
            f"{config.model.weights or config.model.source} has now. Put the first values back, or begin another run"
        )


def _first_batch(config: Config, data: PreparedData, model: Model) -> list[np.ndarray] | None:
    """Return the first batch of the data as a model takes it; None for a model of other arguments."""
    rows, specs = config.train.batch_size // config.train.micro_batches, model.manifest.of_role("input", "target")
    if data.layout is not None:
        check_examples(data.layout, specs, rows, config)
        return list(first_batch(config, data, specs))
    expected = (rows, config.train.sequence_length)
    if len(specs) != 2 or any(spec.shape != expected or spec.dtype not in TOKEN_DTYPES for spec in specs):
        return None
    return list(first_batch(config, data, specs))


def _check_statistics(config: Config, spec: StepSpec) -> None:
    """Raise `UserError` where a model has statistics and the run would do more to them than average them."""
    sync = config.sync
    wrong = {
        "sync.overlap": (sync.overlap, "none"),
        "sync.compression": (sync.compression, "none"),
        "sync.broadcast_compression": (sync.broadcast_compression, "none"),
        "sync.start_compression": (sync.start_compression, "none"),
        "sync.ring_compression": (sync.ring_compression, "none"),
    }
    found = [f"{key} = {value!r} instead of {kept!r}" for key, (value, kept) in wrong.items() if value != kept]
    found += [f"a section [{name}]" for name, section in config.kinds.items() if section.merges_other_runs]
    if spec.statistics and found:
        raise UserError(
            f"the model {config.model.source} has statistics that its loss gives new values of "
            f"({', '.join(spec.statistics[:3])}{', …' if len(spec.statistics) > 3 else ''}); they are averaged by "
            f"rounds without codec and overlap only, found {'; '.join(found)}. Change these keys, or use "
            "normalisation without running statistics, such as layer or group normalisation"
        )


def _check_batch(config: Config, step: TrainStep, data: PreparedData) -> None:
    """Raise `UserError` unless the model takes batches as the data gives them."""
    expected = (config.train.batch_size, config.train.sequence_length)
    batch, vocab_size = step.spec.batch, data.vocab_size
    if data.layout is not None:
        check_examples(data.layout, batch, config.train.batch_size, config)
        return
    if len(batch) != 2 or any(b.shape != expected or b.dtype not in TOKEN_DTYPES for b in batch):
        found = ", ".join(f"{b.name}: {b.dtype}{list(b.shape)}" for b in batch)
        raise UserError(
            f"the model's batch must be inputs and targets, each of shape {list(expected)} (train.batch_size × "
            f"train.sequence_length) and of type {', '.join(TOKEN_DTYPES[:-1])} or {TOKEN_DTYPES[-1]}; "
            f"it takes {found}. Other batches are trained from columns of arrays (data.columns, docs/data.md)"
        )
    narrowest = min((b.dtype for b in batch), key=lambda dtype: np.iinfo(host_dtype(dtype)).max)
    if vocab_size - 1 > np.iinfo(host_dtype(narrowest)).max:
        raise UserError(
            f"the tokenizer has {vocab_size} tokens but the model takes tokens as {narrowest}, of at most "
            f"{np.iinfo(host_dtype(narrowest)).max}"
        )
    if data.train.is_marked and host_dtype(batch[1].dtype).kind == "u":
        raise UserError(
            f"some tokens of the data are no targets (chats), and the model takes targets as {batch[1].dtype}: {SIGNED}"
        )
