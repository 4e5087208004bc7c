"""Everything between a configuration and a mixture that composers can join: data, plan, program, initial values."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from planetary.artifacts.payload_store import PayloadStore
from planetary.artifacts.store import BlobStore
from planetary.core.config import Config
from planetary.core.errors import UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.core.token_slice import Slice
from planetary.data.fitting import STEP_LEASES, fit_to_data
from planetary.data.prepare import PreparedData, prepare
from planetary.data.slices import SliceOrder
from planetary.fabric.preparation.preparation import builder_options, given_weights, schedule_of, step_options
from planetary.fabric.preparation.prepared_steps import (
    PreparedRecord,
    environment,
    files_read,
    keep,
    put_whole,
    sources_of,
    usable_record,
)
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.controller.records import FragmentStart, MixtureStarted
from planetary.moe.methods.ownership import hashed, round_robin
from planetary.moe.methods.pace import PACES
from planetary.moe.methods.tiers import Tier
from planetary.moe.payloads.expert_payloads import experts_bytes
from planetary.moe.payloads.payloads import fragment_bytes
from planetary.moe.payloads.shard_payload import HeldFragment, shard_bytes
from planetary.moe.payloads.surrogate_payloads import messages_of, surrogates_bytes
from planetary.moe.plan.checked_config import check_mixture
from planetary.moe.plan.plan import MixturePlan, OwnerMap, model_of, training_of
from planetary.moe.program.part import part_of
from planetary.moe.program.signature import parameter_specs
from planetary.moe.training.composer import LayerFit
from planetary.moe.training.expert_work import HeldExperts
from planetary.moe.training.replicas import only_shards
from planetary.moe.training.states import ComposerState, TrainingState
from planetary.runtime.program_runner import Program
from planetary.wire.limits import GIB, MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)


class ProgramRecord(PreparedRecord, frozen=True):
    """What a mixture's program was made from, and what was made.

    Attributes:
        digest: of the portable module of all functions.
        functions: signatures by name.
    """

    digest: str
    functions: dict[str, FunctionSpec]

    @property
    def module(self) -> str:
        """See `PreparedRecord`."""
        return self.digest


@dataclass(frozen=True)
class PreparedMixture:
    """What a mixture's run is made of.

    Attributes:
        config: the run's configuration, fitted to the data.
        data: the prepared token files.
        plan: what every participant is told.
        program: all their functions in StableHLO.
        record: what the program was made from; the store has it.
        given: reads the ordinary model's parameters to start from; None: they are drawn from the seed.
    """

    config: Config
    data: PreparedData
    plan: MixturePlan
    program: Program
    record: ProgramRecord
    given: Callable[[], Tensors] | None = None

    @property
    def dense(self) -> tuple[TensorSpec, ...]:
        """The parameters that are no routed experts."""
        return parameter_specs(part_of(self.program, "composer"))

    @property
    def experts(self) -> tuple[TensorSpec, ...]:
        """The weights of one layer's experts on one composer."""
        return parameter_specs(part_of(self.program, "expert"))

    @property
    def model(self) -> tuple[TensorSpec, ...]:
        """The parameters of the ordinary model with all experts."""
        arguments = self.program.functions["whole_evaluate"].arguments
        return tuple(s for s in arguments if s.dtype == "f32" and ".surrogates." not in s.name)

    @property
    def param_count(self) -> int:
        """Number of trained scalars of the ordinary model."""
        return sum(spec.size for spec in self.model)

    def initial(self) -> TrainingState:
        """Return all participants' values before the first step."""
        from planetary.moe.training.initial import initial_training  # brings JAX

        composer, expert = part_of(self.program, "composer"), part_of(self.program, "expert")
        given = self.given() if self.given is not None else None
        plan = self.plan
        return initial_training(plan.model, plan.training, plan.owner_map, composer, expert, given=given)


def plan_of(config: Config, data: PreparedData, owners: OwnerMap | None = None) -> MixturePlan:
    """Return the plan that a configuration makes.

    `owners`: those that the run began with; None: what the configuration says.

    Raises:
        UserError: its parts do not fit together.
    """
    model = model_of(config)
    if data.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {data.vocab_size} tokens but the model was given model.options.vocab_size = "
            f"{model.vocab_size}"
        )
    per_step = config.moe.composers * config.tokens_per_batch
    order = data.order(config, per_step)
    held_out = tuple(piece for piece, _ in data.eval_chunks(config, 1))
    return plan_over(config, order, held_out, owners_of(config, model, order) if owners is None else owners)


def owners_of(config: Config, model: LatentMoeConfig, order: SliceOrder) -> OwnerMap:
    """Return which composer owns which expert, as `moe.methods.ownership` says."""
    composers = config.moe.composers
    match config.moe.ownership:
        case "round-robin":
            found = round_robin(model.n_layer, model.n_expert, composers)
        case "hashed":
            found = hashed(model.n_layer, model.n_expert, composers)
        case "load-aware":
            from planetary.moe.gateway.mixture_program import owners_by_load  # these bring JAX
            from planetary.moe.training.initial import drawn_model

            start = model_values(config) if config.model.weights else drawn_model(model)
            found = owners_by_load(start, model, order, composers)
    return tuple(tuple(int(owner) for owner in row) for row in found)


def plan_over(config: Config, order: SliceOrder, held_out: tuple[Slice, ...], owners: OwnerMap) -> MixturePlan:
    """Return the plan over these tokens. Raises `UserError` where the keys do not fit together."""
    model = model_of(config)
    return MixturePlan(
        model=model,
        training=training_of(config, model, step_options(config), schedule_of(config, config.total_inner_steps)),
        owners=owners,
        order=order,
        held_out=held_out,
        steps=config.total_inner_steps,
        steps_per_round=config.train.inner_steps,
        pace=PACES[config.moe.pace],
        delivery=config.data.delivery,
        view_every=config.eval.every,
    )


def prepare_mixture(
    config: Config,
    cache: Path,
    stage: Callable[[str], None],
    owners: OwnerMap | None = None,
    own: ProgramRecord | None = None,
) -> PreparedMixture:
    """Prepare data and program; `stage` is told what is being done. `owners`: as in `plan_of`.

    A program that was made before from the same plan, files and packages is read back. `own`: the record of the run
    that goes on, which counts whatever became of these.

    Raises whatever is wrong with the user's data or model: `UserError`, `CompileError`, `ResourceError`.
    """
    for warning in check_mixture(config):
        log.warning("%s", warning)
    stage("preparing the data")
    data = prepare(config, cache / "data")
    config = fit_to_data(config, data, STEP_LEASES)
    if owners is None and config.moe.ownership == "load-aware":
        stage("measuring how often each expert is chosen")
    plan = plan_of(config, data, owners)
    store = BlobStore(cache / "blobs")
    record = usable_record(store, _program_parts(plan), ProgramRecord, own)
    if record is None:
        record = _make_program(config, plan, store, stage)
    else:
        stage("reading the mixture's program that was prepared before")
    program = Program(store.get(record.digest), record.functions)
    given = (lambda: model_values(config)) if config.model.weights else None
    return PreparedMixture(config, data, plan, program, record, given)


def _program_parts(plan: MixturePlan) -> str:
    """Return what of a plan decides its program, as JSON: no length of a run, no rate, and not who owns what."""
    schedules = {"dense_schedule": None, "expert_schedule": None}
    parts = {
        "mixture": msgspec.to_builtins(plan.model),
        "training": msgspec.to_builtins(plan.training) | schedules,
        "slots": plan.slots,
    }
    return json.dumps(parts, sort_keys=True)


def _make_program(config: Config, plan: MixturePlan, store: BlobStore, stage: Callable[[str], None]) -> ProgramRecord:
    from planetary.moe.gateway.mixture_program import mixture_program  # brings JAX

    stage("exporting the mixture to StableHLO and differentiating it")
    with files_read() as read:
        program = mixture_program(plan)
    record = ProgramRecord(
        made_from=_program_parts(plan),
        environment=environment(),
        sources=sources_of(config, read),
        digest=put_whole(store, program.portable),
        functions=dict(program.functions),
    )
    keep(store, record)
    return record


def model_values(config: Config) -> Tensors:
    """Return the parameters of the file that `model.weights` names.

    Raises:
        UserError: it cannot be read, or is of another model.
    """
    from planetary.compiler.frontend.export import export_model

    source = config.model.source
    return given_weights(export_model(source, builder_options(config, source)), config.model).initial("param")


def store_start(prepared: PreparedMixture, store: PayloadStore) -> MixtureStarted:
    """Put what everybody starts from into the payload store.

    Raises:
        UserError: a shard's state is larger than what travels.
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
        owners=plan.owners, shards=shards, surrogates=surrogates, experts=experts, fragments=fragments
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
