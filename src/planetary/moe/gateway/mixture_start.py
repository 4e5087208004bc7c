"""How a mixture's gateway begins: a new run, or one that goes on from its journal and its payloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.artifacts.payload_store import PayloadStore
from planetary.artifacts.store import write_atomically
from planetary.core.config import Config, config_hash, to_toml
from planetary.core.errors import TrustError, UserError
from planetary.data.slices import LeaseLedger
from planetary.fabric.gateway.rounds_start import resume_metrics
from planetary.fabric.gateway.run_files import CONFIG, EVENTS, METRICS
from planetary.fabric.gateway.run_step import write_record
from planetary.fabric.protocol.records import Mark, RunResumed, RunStarted
from planetary.fabric.protocol.run_fold import forgiven
from planetary.fabric.protocol.status import RoundMetrics
from planetary.fabric.shell.system import SYSTEM, System
from planetary.machine.journal import Record, replay
from planetary.moe.controller.mixture_events import MixturePolicy
from planetary.moe.controller.records import MixtureRecord, MixtureStarted, MixtureState
from planetary.moe.controller.syncer_messages import SyncPolicy
from planetary.moe.gateway.mixture_preparation import PreparedMixture, store_start
from planetary.moe.methods.tiers import Tier
from planetary.moe.plan.plan import OwnerMap

if TYPE_CHECKING:
    from planetary.fabric.gateway.gateway import GatewayOptions

STUCK_AFTER_S = 120.0
"""A composer without a step for this long, and for twenty of its usual steps, is restarted."""


@dataclass
class MixtureStart:
    """What the gateway goes on from."""

    policy: MixturePolicy
    state: MixtureState
    records: list[Record]  # new ones: to be written to the journal
    metrics: list[RoundMetrics]  # of earlier rounds
    late: list[RoundMetrics]  # of finished rounds whose lines are still to be written


def owners_of_run(folder: Path) -> OwnerMap | None:
    """Return who owns what in a run that has begun, as its journal says; None: it has not."""
    records = read_json_lines(folder / EVENTS, MixtureRecord) if (folder / EVENTS).exists() else ()
    return next((record.owners for record in records if isinstance(record, MixtureStarted)), None)


def begin_mixture(
    config: Config,
    options: GatewayOptions,
    prepared: PreparedMixture,
    store: PayloadStore,
    system: System = SYSTEM,
) -> MixtureStart:
    """Read or make the run folder with the file operations of `system`.

    Raises:
        UserError: there is already a run in the folder, or none that can be resumed; or its journal is damaged.
        TrustError: it was started with another configuration.
        ResourceError: the payload store fails.
    """
    folder, resume, files = options.folder, options.resume, system.files
    earlier = list(read_json_lines(folder / EVENTS, MixtureRecord)) if (folder / EVENTS).exists() else []
    policy = msgspec.structs.replace(mixture_policy(config, prepared, system), local=options.local_threads is not None)
    steps = prepared.plan.steps_per_round
    if not resume:
        if earlier:
            raise UserError(f"{folder} already holds a run: resume it with --resume, or choose another folder")
        write_atomically(folder / CONFIG, to_toml(config).encode(), files)
        write_record(folder, prepared.record, files)
        started = RunStarted(
            run=config.run.name,
            rounds=config.train.rounds,
            config_hash=policy.config_hash,
            model=prepared.program.digest,
            params=prepared.param_count,
        )
        records: list[Record] = [started, store_start(prepared, store)]
        return MixtureStart(policy, replay(records, MixtureState(steps_per_round=steps)), records, [], [])
    state = replay(earlier, MixtureState(steps_per_round=steps), folder / EVENTS)
    if not earlier:
        raise UserError(f"{folder} holds no run that could be resumed: {EVENTS} is missing or empty")
    _check_same(earlier, policy, prepared, folder)
    records = []
    if not state.shards:  # the gateway died between its first two records
        records.append(start := store_start(prepared, store))
        state.apply(start)
    for name in sorted(state.needed()):
        if not store.has(name):
            raise UserError(
                f"cannot resume {folder}: the payload {name[:24]}… is not in {store.url}; a run needs its payloads "
                "where they were"
            )
    mark = Mark(state.round, state.tokens_total, 1, LeaseLedger())
    resumed = RunResumed(run=config.run.name, rounds=config.train.rounds, mark=mark, config_hash=policy.config_hash)
    state.apply(resumed)
    for pardon in (pardons := forgiven(state, options.forgive)):
        state.apply(pardon)
    write_atomically(folder / CONFIG, to_toml(config).encode(), files)
    write_record(folder, prepared.record, files)
    evaluates = state.evaluates_last(config.train.rounds)
    metrics, late = resume_metrics(folder / METRICS, earlier, state.round, steps, evaluates=evaluates, files=files)
    return MixtureStart(policy, state, [*records, resumed, *pardons], metrics, late)


def _check_same(earlier: list[MixtureRecord], policy: MixturePolicy, prepared: PreparedMixture, folder: Path) -> None:
    started = next(record for record in earlier if isinstance(record, RunStarted))
    if started.config_hash != policy.config_hash:
        raise TrustError(
            f"the run in {folder} was started with another configuration ({started.config_hash[:12]}) than this one "
            f"({policy.config_hash[:12]}): only the number of rounds and what does not change the mathematics may "
            "differ in a resumed run"
        )
    prepared.plan.pace.check_resumable()


def mixture_policy(config: Config, prepared: PreparedMixture, system: System = SYSTEM) -> MixturePolicy:
    """Derive the controller's constants from the configuration; `system` draws the numbers of one gateway's life."""
    from planetary.compiler.backends.pipeline import compiler_version

    timings, moe = config.timings, config.moe
    fragments: dict[Tier, int] = {}
    for tier, _ in prepared.plan.fragments(prepared.dense, prepared.experts):
        fragments[tier] = fragments.get(tier, 0) + 1
    return MixturePolicy(
        run=config.run.name,
        abandon_after_s=config.fabric.abandon_after_s,
        heartbeat_s=timings.heartbeat_s,
        silent_after_s=timings.silent_after_s,
        iree_version=compiler_version(),
        plan=prepared.plan,
        functions=dict(prepared.program.functions),
        config_hash=config_hash(config),
        sync=SyncPolicy(
            moe.composers,
            fragments,
            quorum=prepared.plan.pace.quorum(moe.composers, moe.quorum),
            grace_s=timings.grace_s,
            return_s=timings.startup_grace_s,
            replicas=moe.replicas,
        ),
        secret=system.entropy(8).hex(),
        first_task=(int.from_bytes(system.entropy(4), "big") >> 1) << 31,
        checkpoint_every=config.checkpoint.every,
        lease_s=STUCK_AFTER_S,
        stuck_after_s=STUCK_AFTER_S,
    )
