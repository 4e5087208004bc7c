"""What a mixture is made of: data, plan, program and initial values."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planetary.artifacts.store import BlobStore
from planetary.core.configuration.derived import with_fitting_warmup
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.core.token_slice import Slice
from planetary.data.fitting import fit_to_data, warn_of_fitting
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.slices import SliceOrder
from planetary.fleet.preparation.environment import environment
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.checks import check_mixture
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.methods.ownership import hashed, round_robin
from planetary.runs.mixture.methods.pace import PACES
from planetary.runs.mixture.plan import MixturePlan, OwnerMap, model_of, training_of
from planetary.runs.mixture.program.part import part_of
from planetary.runs.mixture.program.signature import ComposerShape, parameter_specs
from planetary.runs.mixture.training.participant_states import TrainingState
from planetary.runs.rounds.preparation.options import builder_options, given_weights
from planetary.runs.rounds.preparation.prepared_steps import (
    PreparedRecord,
    files_read,
    keep,
    put_whole,
    sources_of,
    usable_record,
)
from planetary.runs.rounds.preparation.training_options import schedule_of, step_options
from planetary.runtime.device_program import Program

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)


class ProgramRecord(PreparedRecord, frozen=True):
    """The sources of a mixture's program, and the functions.

    Attributes:
        digest: of the portable module of all functions.
        functions: signatures by name.
    """

    digest: str
    functions: dict[str, FunctionSpec]

    @property
    def module(self) -> str:
        return self.digest


@dataclass(frozen=True)
class PreparedMixture:
    """The parts of a mixture's run.

    Attributes:
        config: the run's configuration, fitted to the data.
        data: the prepared token files.
        plan: of all participants.
        program: all their functions in StableHLO.
        record: of the program's sources; the store has it.
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
        from planetary.runs.mixture.training.initial import first_rows, initial_training  # bring JAX

        composer, expert = part_of(self.program, "composer"), part_of(self.program, "expert")
        plan, given, rows = self.plan, None, []
        if self.given is not None:
            given = self.given()
            if plan.has_surrogates:
                rows = first_rows(given, plan.model, plan.order, plan.training.fit.capacity)
        return initial_training(plan.model, plan.training, plan.owner_map, composer, expert, given=given, rows=rows)


def plan_of(config: Config, data: PreparedData, owners: OwnerMap | None = None) -> MixturePlan:
    """Return the plan a configuration makes.

    `owners`: those the run began with; None: those of the configuration.

    Raises:
        UserError: the parts do not fit together.
    """
    model = model_of(config)
    if data.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {data.vocab_size} tokens but the model was given model.options.vocab_size = "
            f"{model.vocab_size}"
        )
    per_step = config.of(MoeConfig).composers * config.tokens_per_batch
    order = data.order(config, per_step)
    held_out = tuple(piece for piece, _ in data.eval_chunks(config, 1))
    return plan_over(config, order, held_out, owners_of(config, model, order) if owners is None else owners)


def owners_of(config: Config, model: LatentMoeConfig, order: SliceOrder) -> OwnerMap:
    """Return which composer owns which expert; see `runs.mixture.methods.ownership`."""
    composers = config.of(MoeConfig).composers
    match config.of(MoeConfig).ownership:
        case "round-robin":
            found = round_robin(model.n_layer, model.n_expert, composers)
        case "hashed":
            found = hashed(model.n_layer, model.n_expert, composers)
        case "load-aware":
            from planetary.runs.mixture.training.initial import drawn_model, owners_by_load  # brings JAX

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
        pace=PACES[config.of(MoeConfig).pace],
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
    """Prepare data and program; `stage` is called with each stage in words. `owners`: as in `plan_of`.

    A program made before from the same plan, files and packages is read back. `own`: the record of the run that goes
    on, which counts whatever became of these.

    Raises whatever is wrong with the user's data or model: `UserError`, `CompileError`, `ResourceError`.
    """
    for warning in check_mixture(config):
        log.warning("%s", warning)
    stage("preparing the data")
    if config.data.has_pairs:
        raise UserError('data.format = "preference": a composer trains on tokens, and not on pairs of answers')
    data = prepare(config, cache / "data")
    if data.layout is not None:
        raise UserError(
            f"{config.data.source} is examples of several arrays, and a mixture of composers trains on tokens: leave "
            "the section [moe] out, or give texts without data.packing"
        )
    if data.train.is_marked:
        raise UserError(
            f"{config.data.source} is chats, of which only what the assistant says is trained, and a mixture of "
            "composers trains every token: leave the section [moe] out, or give texts"
        )
    config = fit_to_data(config, data, STEP_LEASES)
    if owners is None and config.of(MoeConfig).ownership == "load-aware":
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
    """Return the part of a plan that decides the program, as JSON: no length of a run, no rate, no ownership."""
    schedules = {"dense_schedule": None, "expert_schedule": None}
    parts = {
        "mixture": msgspec.to_builtins(plan.model),
        "training": msgspec.to_builtins(plan.training) | schedules,
        "slots": plan.slots,
    }
    return json.dumps(parts, sort_keys=True)


def _make_program(config: Config, plan: MixturePlan, store: BlobStore, stage: Callable[[str], None]) -> ProgramRecord:
    from planetary.runs.mixture.program.programs import mixture_program  # brings JAX

    stage("exporting the mixture to StableHLO and differentiating it")
    with files_read() as read:
        training, optimizer = plan.training, plan.training.expert_optimizer
        rank = training.rank if training.composers > 1 else 0
        program = mixture_program(
            plan.model,
            ComposerShape(plan.slots, rank, plan.model.batch_size, training.detach, optimizer.in_step),
            plan.tokens_per_step,
            dense=training.dense,
            experts=training.experts,
            functions=optimizer.functions,
        )
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


class StepLeases:
    """A lease is one step of all composers of a mixture."""

    def most_inner_steps(self, config: Config, batches: int) -> int:
        """A round is no lease, and may be longer than an epoch."""
        return config.train.inner_steps

    def within_epochs(self, config: Config, tokens: int) -> Config:
        """Every step is that of all composers, so that passes are a number of rounds.

        Raises:
            UserError: not one round is possible.
        """
        epochs, composers = config.data.max_epochs, config.of(MoeConfig).composers
        if not epochs:
            return config
        rounds = epochs * (tokens // (composers * config.tokens_per_batch)) // config.train.inner_steps
        if rounds >= config.train.rounds:
            return config
        reason = (
            f"data.max_epochs = {epochs} allows {epochs * tokens} tokens, and a round of {composers} takes "
            f"{composers * config.tokens_per_slice}"
        )
        if not rounds:
            raise UserError(
                f"{reason}: not one round is possible. Raise data.max_epochs, give more data, or lower "
                "train.inner_steps, train.batch_size or moe.composers"
            )
        warn_of_fitting("train.rounds", rounds, config.train.rounds, reason)
        shorter = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, rounds=rounds))
        return with_fitting_warmup(shorter, shorter.total_inner_steps)


STEP_LEASES = StepLeases()
