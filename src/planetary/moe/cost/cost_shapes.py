"""What the cost model needs to know of a model that exists: the report's two, a preset, or a configuration's."""

from __future__ import annotations

import msgspec

from planetary.core.config import Config
from planetary.core.errors import UserError
from planetary.models.initial import count, flat_names
from planetary.models.latent_moe import PRESETS, dense_parameters, expert_parameters
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.models.model_options import configure
from planetary.moe.cost.cost import SHAPES, MoeShape, active_expert_params
from planetary.moe.cost.cost_table import Workload
from planetary.moe.methods.tiers import Tier, tier_of
from planetary.moe.plan.plan import cadence_of, model_of


def tier_parameters(config: LatentMoeConfig) -> dict[Tier, int]:
    """Return how many parameters each tier has. They are counted as they are described; none is drawn."""
    found = {Tier.ROUTER: 0, Tier.LATENT: 0, Tier.BACKBONE: 0}
    for name, leaf in flat_names(dense_parameters(config)).items():
        found[tier_of(name)] += count({name: leaf})
    return found


def shape_of(name: str, config: LatentMoeConfig, *, rank: int, detach: bool = True) -> MoeShape:
    """Return the shape of a model of these sizes with surrogates of a rank."""
    tiers, expert = tier_parameters(config), expert_parameters(config, 1)
    return MoeShape(
        name,
        config.n_layer,
        config.n_expert,
        config.n_active,
        config.n_latent,
        config.n_hidden,
        rank,
        active_params=sum(tiers.values()) + config.n_layer * config.n_active * count(expert),
        router_params=tiers[Tier.ROUTER],
        latent_params=tiers[Tier.LATENT],
        backbone_params=tiers[Tier.BACKBONE],
        matrices=len(expert),
        detach=detach,
        ternary=config.ternary,
    )


def named_shape(name: str, *, rank: int) -> tuple[MoeShape, LatentMoeConfig]:
    """Return the shape that a name stands for, and the model's sizes.

    "20b" and "176b" are the report's, with its own rank: their routers and latent projections are those of the presets
    of these names, and the backbone is the rest of the active parameters that the report counts.

    Raises:
        UserError: there is no such name.
    """
    if name not in PRESETS:
        known = ", ".join([*SHAPES, *(preset for preset in PRESETS if preset not in SHAPES)])
        raise UserError(
            f"--model: there is no shape {name!r}; there are: {known}. Or give a configuration in place of --model"
        )
    config = configure(name, LatentMoeConfig, PRESETS[name])
    if name not in SHAPES:
        return shape_of(name, config, rank=rank), config
    report, tiers = SHAPES[name], tier_parameters(config)
    small = tiers[Tier.ROUTER] + tiers[Tier.LATENT]
    completed = msgspec.structs.replace(
        report,
        router_params=tiers[Tier.ROUTER],
        latent_params=tiers[Tier.LATENT],
        backbone_params=report.active_params - active_expert_params(report) - small,
    )
    return completed, config


def configured(config: Config) -> tuple[MoeShape, LatentMoeConfig, Workload]:
    """Return the shape of a configuration's model, the model's sizes, and what a step of its run costs.

    Raises:
        UserError: it is no mixture.
    """
    model, moe, train = model_of(config), config.moe, config.train
    work = Workload(
        batch=train.batch_size * max(1, moe.composers),
        length=train.sequence_length,
        delta_rank=moe.delta_rank,
        replicas=moe.replicas,
        cadence=cadence_of(moe),
        precision=moe.precision,
        sketch_fraction=moe.sketch_fraction,
    )
    return shape_of(config.run.name, model, rank=moe.rank, detach=moe.detach), model, work
