"""The plan of a mixture, for all participants: model, training, ownership, and the place of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.core.configuration.ranges import Delivery
from planetary.core.configuration.schema import Config
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.registry import file_of
from planetary.core.schedules import Schedule
from planetary.core.tensors import TensorSpec
from planetary.core.token_slice import Slice
from planetary.data.slices import SliceOrder
from planetary.models.latent_moe_config import LatentMoeConfig, MoeModelConfig
from planetary.models.model_options import configure
from planetary.runs.mixture.config import MixtureOptions, MoeConfig
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.averaging import FragmentMergeRule
from planetary.runs.mixture.methods.delta import rank_is_smaller
from planetary.runs.mixture.methods.pace import PACES, AnyPace, Free
from planetary.runs.mixture.methods.surrogate import FitOptions, are_copies
from planetary.runs.mixture.methods.tiers import Cadence, Tier, tier_fragments
from planetary.runs.mixture.training.replicas import expert_fragments, held_shards, replicated_slots
from planetary.runs.mixture.training.settings import MoeTraining

OF_EXPERT_WORKERS = (
    "sketches",
    "precision",
    "sketch_fraction",
    "inner_steps",
    "trust",
    "window",
    "norm_ratio",
    "spectral_ratio",
    "redundant",
    "audited",
    "update_form",
    "update_keep",
)
"""Keys of `[moe]` that have no effect without expert workers."""

AHEAD_BYTES = 1 << 20  # size of tokens; at half a millisecond a step this is a second of a small model, else minutes
MODEL = "planetary.models.latent_moe:build"
PRETRAINED_MODEL = "planetary.models.moe:build"
"""The model that folders of pretrained mixtures stand for."""


OwnerMap = tuple[tuple[int, ...], ...]
"""Which composer owns which expert, [layers][experts]."""


class MixturePlan(msgspec.Struct, frozen=True):
    """The plan of a mixture. It is the same for all participants and never changes during a run.

    Attributes:
        model: sizes; `batch_size` is one composer's.
        training: how it is trained; `batch_size` is that of all composers together.
        owners: ownership map.
        order: of the training tokens: a lease is one step of all composers.
        held_out: batches the assembled model is evaluated on.
        steps: of the whole run: so many of each composer, or as many in all where some are faster than others.
        steps_per_round: of the run, after which losses are reported and the model may be evaluated.
        pace: whether participants wait for each other.
        delivery: whether composers read their tokens, or get them from the gateway.
        view_every: rounds between two evaluations, of the assembled model and of the composers' own views; 0: the
            model is evaluated after the last round only.
    """

    model: LatentMoeConfig
    training: MoeTraining
    owners: OwnerMap
    order: SliceOrder
    held_out: tuple[Slice, ...]
    steps: int
    steps_per_round: int
    pace: AnyPace = Free()
    delivery: Delivery = "path"
    view_every: int = 0

    def tokens_of(self, shard: int, step: int) -> Slice:
        """Return which tokens a shard's composer trains on in a step (from 0)."""
        whole, parts = self.order.locate(step), self.training.composers
        count = whole.count // parts
        return msgspec.structs.replace(whole, offset=whole.offset + shard * count, count=count)

    @property
    def steps_ahead(self) -> int:
        """Most steps for which a composer has tokens from the gateway."""
        return max(8, min(self.steps, AHEAD_BYTES // (4 * self.order.slice_tokens // self.training.composers)))

    @property
    def most_steps(self) -> int:
        """That one composer can take: all of them, if the others take none."""
        return self.steps * self.training.composers

    def views_due(self, round_: int) -> bool:
        """Whether composers report at the end of a round how they see the model, with surrogates in it."""
        if not (self.held_out and self.view_every and self.has_surrogates):
            return False
        return round_ * self.steps_per_round >= self.steps or self.evaluates_at(round_)

    def evaluates_at(self, round_: int) -> bool:
        """Whether the interval between two evaluations ends with a round."""
        return self.view_every > 0 and round_ % self.view_every == 0

    @property
    def window(self) -> int:
        """Sketches of a layer a composer may have unanswered: versions an update may lag behind, but one."""
        return max(1, (self.training.acceptance or Policy()).window)

    @property
    def owner_map(self) -> np.ndarray:
        """i32 [layers, experts]."""
        return np.asarray(self.owners, np.int32)

    @property
    def slots(self) -> int:
        """Places for experts on each composer, per layer."""
        return self.held_slots[0].shape[1]

    @property
    def held_slots(self) -> list[np.ndarray]:
        """Which expert is in each slot of each composer, i32 [layers, slots]."""
        return replicated_slots(self.owner_map, self.training.composers, self.training.replicas)

    def fragments(
        self, dense: Sequence[TensorSpec], experts: Sequence[TensorSpec]
    ) -> dict[tuple[Tier, int], tuple[str, ...]]:
        """Return the names of everything that is merged, by fragment.

        Args:
            dense: parameters that are no routed experts.
            experts: of one layer's experts.
        """
        found = tier_fragments(dense, self.training.cadence)
        if self.training.replicas > 1:
            names = [spec.name for spec in experts]
            found |= expert_fragments(self.owner_map, self.training.composers, names)
        return found

    def takes_part(self, number: int, key: tuple[Tier, int]) -> bool:
        """Whether a composer has a fragment: all but those of experts it does not own."""
        tier, fragment = key
        held = held_shards(number, self.training.composers, self.training.replicas)
        return tier is not Tier.EXPERTS or fragment in held

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one composer's step."""
        return self.model.batch_size * self.model.sequence_length

    @property
    def has_surrogates(self) -> bool:
        """Whether composers hold surrogates of each other's experts."""
        return self.training.rank > 0 and self.training.composers > 1


def model_of(config: Config) -> LatentMoeConfig:
    """Return the model's sizes a configuration gives. Raises `UserError` for another model or a wrong size."""
    source, folder = config.model.source, config.model.weights
    if source not in (MODEL, PRETRAINED_MODEL):
        given = f", the model of {folder}" if folder and Path(folder).exists() and not Path(folder).is_file() else ""
        raise UserError(
            f'a run with moe.composers trains model.source = "{MODEL}" or "{PRETRAINED_MODEL}", whose experts can be '
            f'divided; found "{source}"{given}'
        )
    known = {
        "batch_size": config.train.batch_size,
        "sequence_length": config.train.sequence_length,
        "seed": config.run.seed,
    }
    options = {**known, **config.model.options}
    if source == MODEL:
        return configure("model.options", LatentMoeConfig, options)
    return msgspec.structs.replace(configure("model.options", MoeModelConfig, options).mixture, select="topk")


def keys_of(moe: MoeConfig, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the keys of `[moe]` that are fields of a struct, by their common names."""
    return {name: getattr(moe, name) for name in struct.__struct_fields__ if name in MoeConfig.__struct_fields__}


def cadence_of(moe: MoeConfig, model: LatentMoeConfig) -> Cadence:
    """Return the horizons a configuration gives. Raises `UserError` where they are not in order."""
    latent = moe.latent_every if model.projected else moe.router_every
    return Cadence(moe.router_every, latent, moe.backbone_every, moe.refresh_every, moe.backbone_fragments)


def training_of(config: Config, model: LatentMoeConfig, options: StepOptions, schedule: Schedule) -> MoeTraining:
    """Return how a configuration trains the mixture.

    Raises:
        UserError: keys do not fit together; they are named.
    """
    moe, train, outer = config.of(MoeConfig), config.train, config.outer
    if outer.merge not in ("mean", "rda") or outer.optimizer != "nesterov":
        raise UserError(
            f'a mixture merges with outer.merge = "rda" or "mean" and steps with outer.optimizer = "nesterov"; found '
            f'"{outer.merge}" and "{outer.optimizer}"'
        )
    for key, name in (("name", config.optimizer.name), ("schedule", config.optimizer.schedule)):
        if file_of(name) is not None:
            raise UserError(
                f"optimizer.{key} = {name}: a mixture sends no code to workers, and checks the states of "
                "optimizers that it knows. Take a built-in one, or an installed package's (docs/extending.md)"
            )
    if moe.composers == 1:
        raise UserError(
            "moe.composers = 1 leaves nothing to divide: set moe.composers to at least 2, or to 0 for an ordinary run "
            "of the whole model"
        )
    needed = moe.composers + moe.expert_workers
    if config.fabric.workers < needed:
        raise UserError(
            f"{moe.composers} composers and {moe.expert_workers} expert workers are {needed} workers: set "
            f"fabric.workers to at least {needed}, found {config.fabric.workers}"
        )
    if moe.composers > model.n_expert:
        raise UserError(
            f"moe.composers = {moe.composers}, but the model has {model.n_expert} experts per layer and every composer "
            f"owns at least one: set moe.composers to at most {model.n_expert}, or model.options.n_expert higher"
        )
    if moe.replicas > moe.composers:
        raise UserError(
            f"moe.replicas = {moe.replicas} owners of every expert need as many composers: set moe.replicas to at most "
            f"moe.composers = {moe.composers}"
        )
    if config.fabric.quorum > moe.composers:
        raise UserError(
            f"fabric.quorum = {config.fabric.quorum} publications never come from {moe.composers} composers: set "
            f"fabric.quorum to at most moe.composers = {moe.composers}"
        )
    if moe.pace == "lockstep" and config.fabric.quorum != 1:
        raise UserError(
            f'fabric.quorum = {config.fabric.quorum}: moe.pace = "lockstep" waits for all composers; leave it out'
        )
    if moe.replicas > 1 and moe.expert_workers:
        raise UserError(
            f"moe.replicas = {moe.replicas} and moe.expert_workers = {moe.expert_workers}: expert workers improve one "
            "stream of an expert's weights, and several owners train a copy each. Set moe.replicas = 1 (experts then "
            "survive a composer in the payload store), or moe.expert_workers = 0"
        )
    if train.precision == "f16":
        raise UserError(
            'a mixture takes train.precision = "f32" or "bf16": f16 needs a scale of the loss that composers would '
            "have to share"
        )
    if moe.redundant and moe.expert_workers == 1:
        raise UserError(
            f"moe.redundant = {moe.redundant} lets two expert workers make some updates, and there is one: set "
            "moe.expert_workers to at least 2, or moe.redundant = 0"
        )
    if moe.fitted_by == "expert-workers" and not (moe.expert_workers and moe.rank):
        raise UserError(
            'moe.fitted_by = "expert-workers" needs expert workers, and surrogates that they fit: set '
            'moe.expert_workers and moe.rank to at least 1, or moe.fitted_by = "composers"'
        )
    if moe.fitted_by == "expert-workers" and are_copies(moe.rank, model):
        raise UserError(
            f"moe.rank = {moe.rank} makes surrogates copies of experts of width {model.n_hidden}, which are not "
            'fitted: set moe.fitted_by = "composers", or moe.rank lower'
        )
    cadence = cadence_of(moe, model)
    PACES[moe.pace].check_cadence(cadence)
    keys = keys_of(moe, MixtureOptions)
    if not moe.expert_workers:
        keys |= {name: getattr(MixtureOptions(), name) for name in OF_EXPERT_WORKERS if name in keys}
    return MoeTraining(
        **keys,
        batch_size=train.batch_size * moe.composers,
        cadence=cadence,
        fit=FitOptions(steps=moe.fit_steps),
        merge=FragmentMergeRule(radial=outer.merge == "rda", rate=outer.learning_rate, momentum=outer.momentum),
        sketches=moe.sketches if moe.expert_workers else "none",
        acceptance=Policy(**keys_of(moe, Policy)) if moe.expert_workers else None,
        dense=options,
        experts=options,
        dense_schedule=schedule,
        expert_schedule=schedule,
    )


def warnings_of(config: Config, model: LatentMoeConfig) -> list[str]:
    """Return warnings about choices that are allowed and perhaps not meant."""
    moe, found = config.of(MoeConfig), []
    if model.n_expert > moe.composers and model.n_expert % moe.composers:
        few = model.n_expert // moe.composers
        found.append(
            f"{model.n_expert} experts on {moe.composers} composers: shards are not equal, they have {few} or "
            f"{few + 1} experts of a layer"
        )
    if moe.rank >= model.n_hidden:
        found.append(f"moe.rank = {moe.rank} is not below the experts' width {model.n_hidden}: surrogates save nothing")
    if moe.ownership == "load-aware" and not config.model.weights:
        found.append(
            'moe.ownership = "load-aware" without model.weights: the model whose choices of experts are counted '
            "has not learned anything yet"
        )
    if moe.rank and moe.delta_rank and not rank_is_smaller(moe.delta_rank, model.n_latent, moe.rank):
        found.append(
            f"moe.delta_rank = {moe.delta_rank}: changes of that rank are no smaller than surrogates of rank "
            f"{moe.rank}, which are sent whole"
        )
    return found
