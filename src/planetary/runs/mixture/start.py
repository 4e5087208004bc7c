"""How a gateway of a mixture begins: a new run, or one that goes on from its journal and payloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planetary.artifacts.payload_store import PayloadStore
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.errors import TrustError, UserError
from planetary.fleet.gateway.run_files import EVENTS, METRICS, earlier_records, write_config
from planetary.fleet.protocol.kind_reader import FORMAT, read_journal
from planetary.fleet.protocol.run_fold import forgiven
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.journal import Record, replay
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.controller.events import MixturePolicy
from planetary.runs.mixture.controller.syncer_machine import SyncPolicy
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.payloads.experts import experts_bytes
from planetary.runs.mixture.payloads.payloads import fragment_bytes
from planetary.runs.mixture.payloads.shard import HeldFragment, shard_bytes
from planetary.runs.mixture.payloads.surrogates import messages_of, surrogates_bytes
from planetary.runs.mixture.plan import MixturePlan, OwnerMap
from planetary.runs.mixture.records import FragmentStart, MixtureStarted, MixtureState
from planetary.runs.mixture.status import READER
from planetary.runs.mixture.training.composer import LayerFit
from planetary.runs.mixture.training.expert_work import HeldExperts
from planetary.runs.mixture.training.participant_states import ComposerState
from planetary.runs.mixture.training.replicas import only_shards
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.metrics_file import resume_metrics
from planetary.runs.rounds.preparation.run_step import write_record
from planetary.runs.rounds.records import Mark, TrainingResumed, TrainingStarted
from planetary.wire.limits import GIB, MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import GatewayOptions


from planetary.runs.mixture.preparation import PreparedMixture

STUCK_AFTER_S = 120.0
"""A composer without a step for this long, and for twenty usual steps, is restarted."""


@dataclass
class MixtureStart:
    """The state the gateway goes on from."""

    policy: MixturePolicy
    state: MixtureState
    records: list[Record]  # new ones: to be written to the journal
    metrics: list[RoundMetrics]  # metrics of earlier rounds
    late: list[RoundMetrics]  # metrics of finished rounds whose lines are still to be written


def owners_of_run(folder: Path) -> OwnerMap | None:
    """Return the ownership map of a run that has begun, from the journal; None: a new run."""
    records = read_journal(folder / EVENTS, READER)
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
        UserError: there is already a run in the folder, or no resumable one; or the journal is damaged.
        TrustError: it was started with another configuration.
        ResourceError: the payload store fails.
    """
    folder, resume, files = options.folder, options.resume, system.files
    earlier = earlier_records(folder, READER, resume=resume)
    policy = msgspec.structs.replace(mixture_policy(config, prepared, system), local=options.local_threads is not None)
    if not resume:
        write_config(folder, config, files)
        write_record(folder, prepared.record, files)
        started = TrainingStarted(
            kind=READER.name,
            format=FORMAT,
            run=config.run.name,
            rounds=config.train.rounds,
            config_hash=policy.config_hash,
            model=prepared.program.digest,
            params=prepared.param_count,
        )
        records: list[Record] = [started, store_start(prepared, store)]
        return MixtureStart(policy, replay(records, MixtureState()), records, [], [])
    state = replay(earlier, MixtureState(), folder / EVENTS)
    _check_same(earlier, policy, prepared, folder)
    records = []
    if not state.shards:  # the gateway died between the first two records
        records.append(start := store_start(prepared, store))
        state.apply(start)
    for name in sorted(state.needed()):
        if not store.has(name):
            raise UserError(
                f"cannot resume {folder}: the payload {name[:24]}… is not in {store.url}; a run needs its payloads "
                "where they were"
            )
    mark = Mark(state.round, state.tokens_total, 1)
    resumed = TrainingResumed(
        run=config.run.name, rounds=config.train.rounds, mark=mark, config_hash=policy.config_hash
    )
    state.apply(resumed)
    for pardon in (pardons := forgiven(state, options.forgive)):
        state.apply(pardon)
    write_config(folder, config, files)
    write_record(folder, prepared.record, files)
    evaluates = state.evaluates_last(config.train.rounds)
    metrics, late = resume_metrics(
        folder / METRICS, earlier, state.round, prepared.plan.steps_per_round, evaluates=evaluates, files=files
    )
    return MixtureStart(policy, state, [*records, resumed, *pardons], metrics, late)


def _check_same(earlier: list[Record], policy: MixturePolicy, prepared: PreparedMixture, folder: Path) -> None:
    started = next(record for record in earlier if isinstance(record, TrainingStarted))
    if started.config_hash != policy.config_hash:
        raise TrustError(
            f"the run in {folder} was started with another configuration ({started.config_hash[:12]}) than this one "
            f"({policy.config_hash[:12]}): only the number of rounds and keys that do not change the mathematics may "
            "differ in a resumed run"
        )
    prepared.plan.pace.check_resumable()


def mixture_policy(config: Config, prepared: PreparedMixture, system: System = SYSTEM) -> MixturePolicy:
    """Derive the controller's constants from the configuration; `system` draws the numbers of one gateway's life."""
    from planetary.compiler.backends.pipeline import compiler_version

    timings, moe = config.timings, config.of(MoeConfig)
    fragments: dict[Tier, int] = {}
    for tier, _ in prepared.plan.fragments(prepared.dense, prepared.experts):
        fragments[tier] = fragments.get(tier, 0) + 1
    return MixturePolicy(
        workers=config.fabric.workers,
        startup_grace_s=timings.startup_grace_s,
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
            quorum=prepared.plan.pace.quorum(moe.composers, prepared.config.fabric.quorum),
            grace_s=timings.grace_s,
            return_s=timings.startup_grace_s,
            replicas=moe.replicas,
        ),
        secret=system.entropy(8).hex(),
        first_task=(int.from_bytes(system.entropy(4), "big") >> 1) << 31,
        checkpoint_every=config.checkpoint.every,
        task_s=STUCK_AFTER_S,
        stuck_after_s=STUCK_AFTER_S,
    )


def store_start(prepared: PreparedMixture, store: PayloadStore) -> MixtureStarted:
    """Put the start of all participants into the payload store.

    Raises:
        UserError: a shard's state is larger than a payload may be.
        ResourceError: the store fails.
    """
    state, plan = prepared.initial(), prepared.plan
    names = plan.fragments(prepared.dense, prepared.experts)
    held = {key: HeldFragment() for key in names}
    shards = tuple(store.put("shard", _no_larger(shard_bytes(c, 0, held, plan), plan)) for c in state.composers)
    surrogates: tuple[str, ...] = ()
    bank = state.surrogates
    if bank is not None:
        made = []
        for composer in state.composers:
            fits = []
            for layer, slots in enumerate(only_shards(composer, plan.owner_map, [composer.number]).slots):
                ids = slots[slots >= 0]
                fits.append(LayerFit(layer, ids, bank.a[layer][ids], bank.b[layer][ids], ids[:0].astype(float), 0))
            made.append(store.put("surrogate", surrogates_bytes(messages_of(fits, composer.number, 0))))
        surrogates = tuple(made)
    fragments = tuple(
        FragmentStart(tier, i, store.put("fragment", fragment_bytes(composer.named(mine))))
        for (tier, i), mine in names.items()
        for composer in [state.composers[i if tier is Tier.EXPERTS else 0]]
    )
    experts: tuple[tuple[str, ...], ...] = ()
    if streamed := plan.training.expert_optimizer.streamed_layers(plan.model.n_layer):
        experts = tuple(
            tuple(store.put("experts", _no_larger(experts_bytes(_held(one, layer)), plan)) for layer in streamed)
            for one in state.composers
        )
    return MixtureStarted(
        steps_per_round=prepared.plan.steps_per_round,
        owners=plan.owners,
        shards=shards,
        surrogates=surrogates,
        experts=experts,
        fragments=fragments,
    )


def _held(composer: ComposerState, layer: int) -> HeldExperts:
    fitted = composer.fitted[layer] if composer.fitted else {}
    return HeldExperts(composer.experts[layer], composer.expert_moments[layer], {}, fitted)


def _no_larger(state: memoryview, plan: MixturePlan) -> memoryview:
    if len(state) > MAX_PAYLOAD_BYTES:
        what = plan.training.expert_optimizer.largest_state
        raise UserError(
            f"the state {what} takes {len(state) / GIB:.1f} GiB with the optimizer's; no more than "
            f"{MAX_PAYLOAD_BYTES / GIB:g} GiB can be sent. Use more than moe.composers = {plan.training.composers}, or "
            "a smaller model"
        )
    return state
