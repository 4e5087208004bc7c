"""How a gateway begins: a new run, or one that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, checkpoint_to_resume
from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.store import BlobStore
from planetary.core import decoding
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.own_files import own_files
from planetary.core.configuration.schema import Config
from planetary.core.errors import TrustError, UserError
from planetary.core.extension_points import CODECS, JUDGES, MERGE_RULES, OVERLAPS, TOPOLOGIES
from planetary.data.fitting import length_of
from planetary.data.metrics import OWN_SET, Metric, bytes_of_tokens, metrics_of
from planetary.data.prepared_data import PreparedData
from planetary.data.slices import eval_chunks
from planetary.data.token_file import TokenFile
from planetary.fleet.gateway.run_files import (
    CHECKPOINTS,
    EVENTS,
    METRICS,
    earlier_records,
    keep_code,
    write_config,
)
from planetary.fleet.protocol.kind_reader import FORMAT, KindReader
from planetary.fleet.protocol.run_fold import forgiven
from planetary.machine.journal import Record, replay
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.round_end import finished_by_checkpoint
from planetary.runs.rounds.lease_ledger import LeaseLedger
from planetary.runs.rounds.messages import Compression, Fragmentation
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.metrics_file import resume_metrics
from planetary.runs.rounds.policy import ControllerPolicy, EvalChunk
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.preparation.run_step import keep_step, write_record
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runs.rounds.records import LeaseMark, RoundsResumed, StepReplaced, TrainingStarted
from planetary.runs.rounds.state import ControllerState
from planetary.runs.rounds.status import READER
from planetary.sync.outer import initial_state
from planetary.sync.outer_optimizers import OuterState, optimizer_of
from planetary.sync.rounds import RoundPolicy

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import GatewayOptions


FIRST_STEP_S = 900.0
"""Time for a worker's first sign of progress, while no step time is known. Long on purpose: a large model on a slow
machine is no fault, and a dead process is noticed by other means at once."""


@dataclass
class RoundsStart:
    """The state the gateway goes on from."""

    policy: ControllerPolicy
    state: ControllerState
    parameters: ParameterVersions
    records: list[Record]  # new ones: to be written to the journal
    metrics: list[RoundMetrics]  # metrics of earlier rounds
    unreported: list[RoundMetrics]  # metrics of finished rounds whose lines are still to be written


def begin(
    config: Config,
    options: GatewayOptions,
    prepared: Prepared,
    extend: Callable[[ControllerPolicy, OuterState], ControllerPolicy],
    *,
    files: DurableFiles = DISK,
    reader: KindReader[ControllerState] = READER,
) -> RoundsStart:
    """Read or make the run folder with the operations of `files`; `extend`: adds the topology's constants.

    Raises:
        UserError: there is already a run in the folder, or none to resume; or the journal is damaged.
        TrustError: the checkpoint is damaged, or belongs to another model, data set or configuration.
    """
    folder = options.folder
    policy = msgspec.structs.replace(policy_of(config, prepared), local=options.local_threads is not None)
    keep_code(folder, own_files(config, "the configuration"), BlobStore(options.cache / "blobs", files), files)
    earlier = earlier_records(folder, reader, resume=options.resume)
    if not options.resume:
        write_config(folder, config, files)
        write_record(folder, prepared.record, files)
        started = TrainingStarted(
            kind=reader.name,
            format=FORMAT,
            run=config.run.name,
            rounds=policy.length.expected_rounds,
            config_hash=policy.config_hash,
            model=prepared.step.spec.stablehlo_digest,
            params=prepared.step.spec.param_count,
            notes=prepared.step.notes,
            counts=prepared.data.counts,
        )
        specs = prepared.step.spec.params
        state = initial_state(specs, prepared.params, policy.outer)
        parameters = ParameterVersions(
            specs,
            state,
            0,
            policy.compression,
            fragments=policy.fragments.count,
            optimizer=policy.outer,
            statistics=policy.spec.statistics,
        )
        policy = msgspec.structs.replace(policy, inner_state_of=started.model, start_digest=parameters.start_digest)
        policy = extend(policy, parameters.state)
        return RoundsStart(policy, replay([started], reader.fold()), parameters, [started], [], [])
    start = _resume(config, options, prepared, policy, earlier, state=reader.fold(), files=files)
    policy = msgspec.structs.replace(
        policy, inner_state_of=start.state.inner_state_of, start_digest=start.parameters.start_digest
    )
    start.policy = extend(policy, start.parameters.state)
    return start


def _resume(
    config: Config,
    options: GatewayOptions,
    prepared: Prepared,
    policy: ControllerPolicy,
    earlier: list[Record],
    *,
    state: ControllerState,
    files: DurableFiles,
) -> RoundsStart:
    folder, specs = options.folder, prepared.step.spec.params
    replay(earlier, state, folder / EVENTS)
    checkpoint = checkpoint_to_resume(folder / CHECKPOINTS, options.resume_from)
    if checkpoint is not None:
        _check_same(checkpoint, prepared, policy)
    mark, outer = outer_state_of(checkpoint, prepared)
    if mark.round > policy.length.most_rounds:
        raise UserError(
            f"{folder} has {mark.round} finished rounds already, more than train.rounds = {config.train.rounds}"
        )
    late = finished_by_checkpoint(earlier, state.closing or state.open, state.tokens_total, mark.round)
    if late is not None:
        state.apply(late)
        earlier = [*earlier, late]
    resumed = RoundsResumed(
        run=config.run.name, rounds=policy.length.expected_rounds, mark=mark, config_hash=policy.config_hash
    )
    state.apply(resumed)
    model, replaced = prepared.step.spec.stablehlo_digest, []
    if model != state.steps[-1]:  # the configuration, or a model's file whose own step is lost, changed
        why = "the run was resumed with another step"
        replaced = [StepReplaced(round=mark.round, model=model, before=state.steps[-1], why=why, keeps_state=False)]
        state.apply(replaced[0])
        keep_step(folder, prepared.record, files)
    for pardon in (pardons := forgiven(state, options.forgive)):
        state.apply(pardon)
    evaluates = mark.round not in state.evals and RoundsDesk(policy, state).eval_due(mark.round)
    metrics, untold = resume_metrics(
        folder / METRICS, earlier, mark.round, config.train.inner_steps, evaluates=evaluates, files=files
    )
    write_config(folder, config, files)
    write_record(folder, prepared.record, files)
    records: list[Record] = [*([] if late is None else [late]), resumed, *replaced, *pardons]
    shown = {} if checkpoint is None else checkpoint.shown
    parameters = ParameterVersions(
        specs,
        outer,
        mark.round,
        policy.compression,
        shown,
        fragments=policy.fragments.count,
        optimizer=policy.outer,
        statistics=policy.spec.statistics,
    )
    return RoundsStart(policy, state, parameters, records, metrics, untold)


def outer_state_of(checkpoint: Checkpoint | None, prepared: Prepared) -> tuple[LeaseMark, OuterState]:
    """Return where a run stands at a checkpoint, and the outer state there; without one, both at the start."""
    if checkpoint is None:
        optimizer = optimizer_of(prepared.config.outer)
        return LeaseMark(0, 0, 1, LeaseLedger()), initial_state(prepared.step.spec.params, prepared.params, optimizer)
    mark = decoding.from_json(checkpoint.info.controller, LeaseMark)
    return mark, OuterState(dict(checkpoint.params), dict(checkpoint.velocity), dict(checkpoint.moments))


def _check_same(checkpoint: Checkpoint, prepared: Prepared, policy: ControllerPolicy) -> None:
    info = checkpoint.info
    if tuple(info.param_specs) != tuple(prepared.step.spec.params):
        raise TrustError(
            f"the checkpoint of round {info.round} has other parameters than the model of the configuration; a run is "
            "resumed with the configuration it was started with"
        )
    if info.base != prepared.base:
        raise TrustError(
            f"the checkpoint of round {info.round} was trained beside other parameters that are not trained "
            f"({info.base[:12] or 'none'}) than the model has ({prepared.base[:12] or 'none'})"
        )
    if info.data_key != prepared.data.key:
        raise TrustError(
            f"the checkpoint of round {info.round} was trained on other data than data.source gives now: the file, the "
            "tokenizer or the batch shape changed"
        )
    if info.config_hash != policy.config_hash:
        raise TrustError(
            f"the checkpoint of round {info.round} was written with another configuration "
            f"({info.config_hash[:12]}) than this one ({policy.config_hash[:12]}): "
            "only the number of rounds and keys without effect on the mathematics may differ in a resumed run"
        )


def metrics_of_run(config: Config, data: PreparedData) -> dict[str, Metric]:
    """Return the metrics of `eval.metrics`. Raises `UserError` for one that losses and bytes of text do not suffice."""
    found = metrics_of(config.eval.metrics)
    for name, metric in found.items():
        if metric.reads_logits:
            raise UserError(
                f"eval.metrics: {name} reads logits, and workers send losses alone; `planetary evaluate RUN --metric "
                "...` computes it from a checkpoint"
            )
        if metric.reads_bytes and data.tokenizer is None:
            raise UserError(
                f"eval.metrics: {name} counts bytes of text, and the data is tokens: name their tokenizer.json as "
                "data.tokenizer"
            )
    return found


def eval_tasks_of(config: Config, data: PreparedData, size: int, metrics: Mapping[str, Metric]) -> Iterator[EvalChunk]:
    """Yield the tasks of one evaluation: `eval.batches` batches of each set, `size` of each in a task.

    A task has all sets, so that each worker has one before it trains on.
    """
    nbytes = None
    if data.tokenizer is not None and any(metric.reads_bytes for metric in metrics.values()):
        nbytes = bytes_of_tokens(data.tokenizer, data.vocab_size)

    def chunks_of(name: str, file: TokenFile, count: int) -> Iterator[EvalChunk]:
        for piece, batches in eval_chunks(file, count, config.tokens_per_batch, size):
            text = 0
            if nbytes is not None:
                rows = data.targets_of(piece).astype(np.int64)
                text = int(nbytes[rows[rows >= 0]].sum())
            yield EvalChunk(piece, batches, data.targets_in(piece), text, name)

    named = [chunks_of(name, file, file.count // config.tokens_per_batch) for name, file in data.sets.items()]
    for own in chunks_of(OWN_SET, data.held_out, config.eval.batches):
        more = (next(chunks, None) for chunks in named)
        yield msgspec.structs.replace(own, more=tuple(chunk for chunk in more if chunk is not None))


def policy_of(config: Config, prepared: Prepared) -> ControllerPolicy:
    """Derive the controller's constants from the configuration."""
    from planetary.compiler.backends.pipeline import compiler_version

    timings, length = config.timings, length_of(config, prepared.data.train.count)
    chunk, metrics = max(1, -(-config.eval.batches // config.fabric.workers)), metrics_of_run(config, prepared.data)
    return ControllerPolicy(
        run=config.run.name,
        length=length,
        config_hash=config_hash(config),
        round=RoundPolicy(
            quorum=config.fabric.quorum,
            grace_s=timings.grace_s,
            deadline_s=config.fabric.round_deadline_s,
            grace_steps=config.sync.grace_steps,
            delay=config.sync.delay,
            least_steps=config.train.inner_steps,
        ),
        startup_grace_s=timings.startup_grace_s,
        first_step_s=FIRST_STEP_S,
        abandon_after_s=config.fabric.abandon_after_s,
        inner_state=config.train.inner_state,
        schedule=schedule_of(config, length.schedule_steps),
        tokens_per_lease=config.targets_per_slice // config.leases_per_slice,
        leases=config.fabric.leases,
        locate=prepared.data.order(config).locate,
        held_out=tuple(eval_tasks_of(config, prepared.data, chunk, metrics)),
        metrics=metrics,
        eval_every=config.eval.every,
        patience=config.eval.patience,
        least_gain=config.eval.least_gain,
        gateway_delivers=config.data.delivery == "gateway",
        outer=optimizer_of(config.outer),
        merge=MERGE_RULES.pin(config.outer.merge),
        judge=JUDGES.make(JUDGES.chosen(config.outer.judge, config.outer)),
        loss_rise=config.outer.loss_rise,
        compression=Compression(
            up=CODECS.pin(config.sync.compression),
            down=CODECS.pin(config.sync.broadcast_compression),
            start=CODECS.pin(config.sync.start_compression),
        ),
        overlap=OVERLAPS.pin(config.sync.overlap),
        topology=TOPOLOGIES.pin(config.sync.topology),
        fragments=Fragmentation(count=config.sync.fragments, delay=config.sync.delay, mixing=config.sync.mixing),
        checkpoint_every=config.checkpoint.every,
        heartbeat_s=timings.heartbeat_s,
        silent_after_s=timings.silent_after_s,
        iree_version=compiler_version(),
        spec=prepared.step.spec,
        seed=config.run.seed,
        layout=prepared.data.layout,
        buffers=prepared.buffers,
    )
