"""How a gateway of reinforcement learning begins: a new run, or one that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from planetary.artifacts.checkpoint import Checkpoint, checkpoint_to_resume
from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.artifacts.store import BlobStore, write_atomically
from planetary.core import decoding
from planetary.core.configuration.own_files import own_files
from planetary.core.configuration.schema import Config
from planetary.core.errors import TrustError, UserError
from planetary.core.tensors import Tensors, TensorSpec, digest_of
from planetary.fleet.gateway.run_files import (
    CHECKPOINTS,
    EVENTS,
    MANIFEST,
    METRICS,
    STEP,
    earlier_records,
    keep_code,
    write_config,
)
from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.fleet.protocol.run_fold import forgiven
from planetary.machine.journal import Record, replay
from planetary.runs.rl.events import PolicyOfRun
from planetary.runs.rl.preparation import PreparedPolicy
from planetary.runs.rl.records import ReinforcementState
from planetary.runs.rl.status import READER
from planetary.runs.rounds.kept_metrics import trim_metrics
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.preparation.prepared_steps import UntrainedTensors, first_change
from planetary.runs.rounds.preparation.run_step import record_of
from planetary.runs.rounds.preparation.whole_versions import WholeVersions
from planetary.runs.rounds.records import Mark, TrainingResumed, TrainingStarted
from planetary.sync.outer import initial_state
from planetary.sync.outer_optimizers import OuterState, optimizer_of

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import GatewayOptions

REFERENCE_FILE = "reference.safetensors"
"""In the run folder: the parameters at the end of the imitation, which a resumed run compares with, too."""


@dataclass
class PolicyStart:
    """The state the gateway goes on from."""

    policy: PolicyOfRun
    state: ReinforcementState
    parameters: WholeVersions
    reference: Tensors | None
    records: list[Record]
    metrics: list[RoundMetrics]


def begin_policy(
    config: Config,
    options: GatewayOptions,
    prepared: PreparedPolicy,
    policy: PolicyOfRun,
    files: DurableFiles = DISK,
) -> PolicyStart:
    """Read or make the run folder.

    Raises:
        UserError: there is already a run in the folder, or none to resume; or the journal is damaged.
        TrustError: the checkpoint is damaged, or belongs to another model or configuration.
    """
    folder, specs, optimizer = options.folder, prepared.trained, optimizer_of(config.outer)
    initial = initial_state(specs, prepared.initial, optimizer)
    base = prepared.model.arrays() if prepared.adapters else {}
    untrained = UntrainedTensors({name: digest_of(array) for name, array in base.items()})
    keep_code(folder, own_files(config, "the configuration"), BlobStore(options.cache / "blobs", files), files)
    earlier = earlier_records(folder, READER, resume=options.resume)
    if not options.resume:
        write_config(folder, config, files)
        write_atomically(folder / MANIFEST, prepared.manifest.to_json(), files)
        if prepared.adapters:
            write_atomically(folder / STEP, msgspec.json.encode(untrained), files)
        started = TrainingStarted(
            kind=READER.name,
            format=FORMAT,
            run=config.run.name,
            rounds=policy.rounds,
            config_hash=policy.config_hash,
            model=prepared.program.digest,
            params=prepared.param_count,
        )
        parameters = WholeVersions(specs, initial, 0, optimizer)
        state = replay([started], ReinforcementState())
        return PolicyStart(policy, state, parameters, prepared.reference, [started], [])
    before = record_of(folder / STEP, UntrainedTensors)
    if prepared.adapters and before is not None and (changed := first_change(before.frozen, untrained.frozen)):
        raise UserError(
            f"the run's adapters were trained with other values of {changed!r} than {config.model.source} has now: put "
            "the first values back, or begin another run"
        )
    state = replay(earlier, ReinforcementState(), folder / EVENTS)
    found = checkpoint_to_resume(folder / CHECKPOINTS, options.resume_from)
    mark, outer = Mark(0, 0, 1), initial
    if found is not None:
        _check_same(found, prepared, policy)
        mark = decoding.from_json(found.info.controller, Mark)
        outer = OuterState(dict(found.params), dict(found.velocity), dict(found.moments))
    resumed = TrainingResumed(run=config.run.name, rounds=policy.rounds, mark=mark, config_hash=policy.config_hash)
    state.apply(resumed)
    for pardon in (pardons := forgiven(state, options.forgive)):
        state.apply(pardon)
    reference = prepared.reference
    imitated = policy.imitated if state.imitation_ended is None else state.imitation_ended
    if reference is None and mark.round >= imitated:
        reference = read_reference(options)
    write_config(folder, config, files)
    write_atomically(folder / MANIFEST, prepared.manifest.to_json(), files)
    metrics = trim_metrics(folder / METRICS, mark.round, files)
    newest = list({line.round: line for line in metrics}.values())
    parameters = WholeVersions(specs, outer, mark.round, optimizer)
    return PolicyStart(policy, state, parameters, reference, [resumed, *pardons], newest)


def keep_reference(
    options: GatewayOptions, specs: Sequence[TensorSpec], params: Tensors, files: DurableFiles = DISK
) -> None:
    """Put the reference policy into the run folder. Raises `ResourceError`."""
    write_atomically(options.folder / REFERENCE_FILE, b"".join(safetensors_pieces(specs, params)), files)


def read_reference(options: GatewayOptions) -> Tensors:
    """Return the reference policy of the run folder. Raises `TrustError`, and `UserError` where it is missing."""
    try:
        return read_safetensors(options.folder / REFERENCE_FILE)[1]
    except OSError as error:
        raise UserError(f"cannot resume {options.folder}: {REFERENCE_FILE}: {error.strerror or error}") from error


def _check_same(checkpoint: Checkpoint, prepared: PreparedPolicy, policy: PolicyOfRun) -> None:
    info = checkpoint.info
    if tuple(info.param_specs) != prepared.trained:
        raise TrustError(f"the checkpoint of round {info.round} has other parameters than the policy")
    if info.config_hash != policy.config_hash:
        raise TrustError(
            f"the checkpoint of round {info.round} was written with another configuration ({info.config_hash[:12]}) "
            f"than this one ({policy.config_hash[:12]}): only the number of rounds and what does not change the "
            "mathematics may differ in a resumed run"
        )
