"""The cost model on models that exist (the report's two, a preset, or a configuration's): their shapes, and the numbers
for several composer counts as rows of text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.models.initial import count, flat_names
from planetary.models.latent_moe import PRESETS, dense_parameters, expert_parameters
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.models.model_options import configure
from planetary.runs.mixture.config import MixtureOptions, MoeConfig
from planetary.runs.mixture.cost import cost
from planetary.runs.mixture.cost.cost import SHAPES, MoeShape, active_expert_params
from planetary.runs.mixture.methods.sketch import Precision
from planetary.runs.mixture.methods.tiers import Cadence, Tier, tier_of
from planetary.runs.mixture.plan import cadence_of, model_of

Row = tuple[str, list[str]]
_Row = Callable[[str, Callable[[int], str]], Row]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


_KEYS = MixtureOptions()


class Workload(NamedTuple):
    """The parameters of costs beside the shape.

    Attributes:
        batch: sequences per step of all composers together.
        length: their tokens.
        delta_rank: of the change of each of a surrogate's matrices; 0: surrogates travel whole.
        replicas: owners of every expert.
        cadence: steps between two synchronisations of a tier, and between two refreshes of the surrogates.
        precision: of sketches.
        sketch_fraction: part of the tokens that sketches have.
    """

    batch: int = 1024
    length: int = 1024
    delta_rank: int = 8
    replicas: int = _KEYS.replicas
    cadence: Cadence = Cadence()
    precision: Precision = _KEYS.precision
    sketch_fraction: float = _KEYS.sketch_fraction


def table(shape: MoeShape, composers: Sequence[int], work: Workload) -> list[Row]:
    """Return (label, one cell per composer count). Labels name the report's table or section with the number.

    Expert workers and several owners of an expert do not go together: with `replicas` above 1 there are no rows about
    offload.
    """

    def row(label: str, cell: Callable[[int], str]) -> Row:
        return label, [cell(c) for c in composers]

    return [
        *_reductions(shape, work, row),
        *_arithmetic(shape, work, row),
        *_memory(shape, work, row),
        *_traffic(shape, work, row),
    ]


def _reductions(shape: MoeShape, work: Workload, row: _Row) -> list[Row]:
    """How many times less arithmetic than in ordinary training."""

    def times(value: float) -> str:
        return f"{value:.2f}×"

    def direct(composers: int) -> float:
        return cost.rho_direct(shape, composers / work.replicas)

    rows = []
    if shape.rank:
        calls = cost.expert_forward_flops(shape) / cost.surrogate_forward_flops(shape)
        rows.append(row("surrogate forward, per call (table 3)", lambda _: times(calls)))
    rows.append(row("expert compute, direct (table 3)", lambda c: times(1 / direct(c))))
    if work.replicas == 1:
        rows += [
            row("expert compute, offload (table 3)", lambda c: times(1 / cost.rho_offload(shape, c))),
            row(
                "expert compute, offload with dX",
                lambda c: times(1 / cost.rho_offload_with_input_gradient(shape, c)),
            ),
        ]
    if shape.rank:
        rows.append(
            row(
                "expert compute, direct, dense surrogate bank",
                lambda c: times(1 / (direct(c) + cost.dense_bank(shape, c / work.replicas))),
            )
        )
    rows.append(row("total compute, direct (table 3)", lambda c: times(cost.total_reduction(shape, direct(c)))))
    if work.replicas == 1:
        rows += [
            row(
                "total compute, offload (table 3)",
                lambda c: times(cost.total_reduction(shape, cost.rho_offload(shape, c))),
            ),
            row(
                "total compute, offload with dX",
                lambda c: times(cost.total_reduction(shape, cost.rho_offload_with_input_gradient(shape, c))),
            ),
        ]
    return rows


def _arithmetic(shape: MoeShape, work: Workload, row: _Row) -> list[Row]:
    """Operations of training: of a token, of a whole step in one place, and of one composer's step."""
    tokens = work.batch * work.length

    def direct(composers: int) -> float:
        return cost.train_flops(shape, cost.rho_direct(shape, composers / work.replicas))

    def offload(composers: int) -> float:
        return cost.train_flops(shape, cost.rho_offload_with_input_gradient(shape, composers))

    def stand_ins(composers: int) -> float:
        return cost.surrogate_flops(shape, composers / work.replicas)

    kinds = [("direct", direct)]
    kinds += [("offload with dX", offload)] if work.replicas == 1 else []
    kinds += [("surrogates alone", stand_ins)] if shape.rank else []
    rows = [row("training a token, end-to-end", lambda _: operations(cost.train_flops(shape)))]
    rows += [row(f"training a token, {name}", lambda c, of=of: operations(of(c))) for name, of in kinds]
    rows.append(row("a step, end-to-end, all tokens", lambda _: operations(tokens * cost.train_flops(shape))))
    rows += [row(f"a composer's step, {name}", lambda c, of=of: operations(tokens / c * of(c))) for name, of in kinds]
    return rows


def _memory(shape: MoeShape, work: Workload, row: _Row) -> list[Row]:
    rows = [
        row(
            "expert weights per composer (table 4)",
            lambda c: gigabytes(cost.expert_weight_bytes(shape, c / work.replicas)),
        ),
        row(
            "expert state per composer, direct (table 4)",
            lambda c: gigabytes(cost.expert_state_bytes(shape, c / work.replicas)),
        ),
    ]
    if cost.dense_params(shape):
        rows.append(row("state of all else per composer", lambda _: gigabytes(cost.dense_state_bytes(shape))))
    if work.replicas == 1:
        rows.append(row("state of one expert on a worker (5.2)", lambda _: megabytes(cost.worker_state_bytes(shape))))
    return rows


def _traffic(shape: MoeShape, work: Workload, row: _Row) -> list[Row]:
    """The removed traffic, and the traffic instead."""
    cadence, tokens = work.cadence, work.batch * work.length
    rows = [
        row(
            "all-to-all per step, removed (table 4)",
            lambda c: whole_gigabytes(cost.all_to_all_bytes(shape, c, work.batch, work.length)),
        )
    ]

    def changes(composers: int) -> float:
        return cost.surrogate_sync_bytes(shape, composers, work.delta_rank)

    def whole(composers: int) -> float:
        return cost.surrogate_full_bytes(shape, composers)

    def four_bits(composers: int) -> float:
        return cost.surrogate_four_bit_bytes(shape, composers)

    forms = [(f"surrogate deltas of rank {work.delta_rank}", " (table 4)", changes)] if work.delta_rank else []
    forms += [("whole surrogates", "", whole), ("surrogate changes in 4 bits", "", four_bits)]
    for name, source, size in forms if shape.rank else []:
        rows.append(row(f"{name}, all{source}", lambda c, of=size: megabytes(of(c))))
        every = f"{name} per step, refresh every {cadence.refresh}"
        rows.append(row(every, lambda c, of=size: megabytes(of(c) / cadence.refresh)))
    if work.replicas == 1:
        name = "4-bit" if work.precision == "4bit" else "float"
        rows.append(
            row(
                f"{name} sketches per composer and step",
                lambda c: gigabytes(
                    cost.sketch_bytes(shape, round(tokens / c * work.sketch_fraction), precision=work.precision)[1]
                ),
            )
        )
        wave = {
            "an update of all experts, to workers and back": cost.worker_traffic_bytes(shape),
            "and then to composers" + (", ternary" if shape.ternary else ""): cost.updated_weights_bytes(shape),
        }
        rows += [row(label, lambda _, size=size: gigabytes(size)) for label, size in wave.items()]
    else:
        copies = cost.copies_bytes(shape, work.replicas)
        rows.append(row("merge of all copies at the syncer", lambda _: gigabytes(copies)))
    return rows + _tier_traffic(shape, cadence, row)


def _tier_traffic(shape: MoeShape, cadence: Cadence, row: _Row) -> list[Row]:
    sizes = {
        Tier.ROUTER: shape.router_params,
        Tier.LATENT: shape.latent_params,
        Tier.BACKBONE: shape.backbone_params,
    }
    tiers = [(tier, params, cadence.horizon(tier)) for tier, params in sizes.items() if params]

    def moved(composers: int) -> float:
        return sum(cost.tier_bytes(params, composers, horizon) for _, params, horizon in tiers)

    rows = [
        row(
            f"{tier} tier per step at the syncer, H = {horizon}",
            lambda c, p=params, h=horizon: megabytes(cost.tier_bytes(p, c, h)),
        )
        for tier, params, horizon in tiers
    ]
    if tiers:
        rows.append(row("all tiers per step at the syncer", lambda c: megabytes(moved(c))))
        rows.append(row("all tiers per composer and step", lambda c: megabytes(moved(c) / c)))
    return rows


def operations(count: float) -> str:
    """Floating-point operations with four digits and a prefix, such as "11.73 GFLOP"."""
    power = 0
    while count >= 999.95 and power < len(_PREFIXES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.4g} {_PREFIXES[power]}FLOP"


def whole_gigabytes(size: float) -> str:
    """As the report prints all-to-all traffic: no decimal, 10⁹ bytes; smaller sizes as `gigabytes`."""
    return f"{size / 1e9:.0f} GB" if size >= 1e10 else gigabytes(size)


def gigabytes(size: float) -> str:
    """As the report prints memory: one decimal, 10⁹ bytes; smaller sizes as `megabytes`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else megabytes(size)


def megabytes(size: float) -> str:
    """As the report prints surrogate traffic: one decimal, 10⁶ bytes; smaller sizes in 10³."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


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
    """Return the shape a name stands for, and the model's sizes.

    "20b" and "176b" are the report's, with the report's rank: their routers and latent projections are those of the
    presets of these names, and the backbone is the rest of the active parameters the report counts.

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
    """Return the shape of a configuration's model, the model's sizes, and the run's workload.

    Raises:
        UserError: it is no mixture.
    """
    model, moe, train = model_of(config), config.of(MoeConfig), config.train
    work = Workload(
        batch=train.batch_size * max(1, moe.composers),
        length=train.sequence_length,
        delta_rank=moe.delta_rank,
        replicas=moe.replicas,
        cadence=cadence_of(moe, model),
        precision=moe.precision,
        sketch_fraction=moe.sketch_fraction,
    )
    return shape_of(config.run.name, model, rank=moe.rank, detach=moe.detach), model, work
