"""`planetary moe cost`: the cost model's table of a named shape, or of a configuration's model and run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import HelpFormatter
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.models.latent_moe_config import LatentMoeConfig
    from planetary.moe.cost.cost import MoeShape
    from planetary.moe.cost.cost_table import Workload

_COMPOSERS = (4, 8, 16)


def add_cost(actions: Any) -> None:
    """Add the action's parser."""
    cost = actions.add_parser(
        "cost",
        help="print the cost model's table",
        description=(
            "Arithmetic, memory, the traffic that is removed, and the traffic that comes in its place. Nothing is\n"
            "built. With a configuration, its model, batch, ranks and horizons; flags go before what it says."
        ),
        epilog=(
            "example:\n"
            "  planetary moe cost --model 176b --composers 4,16 --batch 2048\n"
            "  planetary moe cost examples/parallax-tiny.toml --composers 2,4 --backbone-every 16"
        ),
        formatter_class=HelpFormatter,
    )
    cost.add_argument("config", nargs="?", type=Path, help="configuration of a mixture")
    cost.add_argument(
        "--model",
        metavar="NAME",
        help="20b or 176b of the report, or a preset of models/latent_moe.py such as moe-small (default: 20b)",
    )
    cost.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    cost.add_argument(
        "--composers", metavar="N,N", help="composer counts (default: the configuration's, or those of 4,8,16 that fit)"
    )
    for flag, metavar, text in (
        ("--batch", "N", "sequences per step of all composers (default: 1024)"),
        ("--length", "N", "tokens per sequence (default: 1024)"),
        ("--delta-rank", "Q", "of surrogate deltas (default: 8, or R if less)"),
        ("--rank", "R", "of the surrogates (default: the report's, of presets that of moe.rank)"),
        ("--replicas", "R", "owners of every expert (default: 1)"),
        ("--router-every", "H", "steps between two merges of the routers (default: 1)"),
        ("--latent-every", "H", "of the latent projections (default: 1)"),
        ("--backbone-every", "H", "of everything else that is no expert (default: 8)"),
        ("--refresh-every", "H", "steps between two refreshes of the surrogates (default: 5)"),
    ):
        cost.add_argument(flag, type=int, metavar=metavar, help=text)


def run_cost(args: argparse.Namespace) -> int:
    """Print the table."""
    from planetary.core.errors import UserError
    from planetary.moe.cost.cost_table import table

    if args.config is not None and args.model is not None:
        raise UserError(f"moe cost: give either the configuration {args.config} or --model {args.model}, not both")
    shape, model, work, composers = _asked(args)
    rows = table(shape, composers, work)
    surrogates = f"surrogates of rank {shape.rank}" if shape.rank else "no surrogates"
    print(
        f"{shape.name}: {shape.layers} MoE layers × {shape.experts} experts, {shape.active} active, "
        f"{shape.latent} → {shape.hidden} → {shape.latent}, {surrogates}; {work.batch} × {work.length} tokens a step"
    )
    width = max(len(label) for label, _ in rows)
    print(" " * width + "".join(f"{f'C = {c}':>14}" for c in composers))
    for label, cells in rows:
        print(f"{label:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    print("× is how many times less than ordinary training on one machine; GB are 10⁹ bytes")
    print("weights, surrogates and all-to-all in 2 bytes a number as in the report; tiers and copies in 4")
    if not model.capacity and model.n_active < model.n_expert:
        print(
            f"operations are of the {shape.active} chosen experts; with capacity = 0 every held one is computed for "
            f"every token: {shape.experts / shape.active:.4g} times the experts' part"
        )
    if shape.rank >= shape.hidden:
        print(f"rank {shape.rank} is not below the experts' width {shape.hidden}: surrogates save nothing")
    if unequal := [str(c) for c in composers if shape.experts % c]:
        print(f"{shape.experts} experts cannot be divided evenly by {', '.join(unequal)}: a mean composer is shown")
    return EXIT_OK


def _asked(args: argparse.Namespace) -> tuple[MoeShape, LatentMoeConfig, Workload, list[int]]:
    """Return what the flags and the configuration ask for, or raise `UserError` where that does not fit together."""
    from msgspec.structs import replace

    from planetary.core.config import load_config
    from planetary.core.configuration.schema import MoeConfig
    from planetary.core.errors import UserError
    from planetary.moe.cost.cost_table import Workload, configured, named_shape

    horizons = ("router_every", "latent_every", "backbone_every", "refresh_every")
    for flag in ("batch", "length", "rank", "delta_rank", "replicas", *horizons):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} must be at least 1, found {value}")
    defaults = _COMPOSERS
    if args.config is not None:
        config = load_config(args.config, args.set)
        shape, model, work = configured(config)
        if config.moe.composers:
            defaults = (config.moe.composers,)
    elif args.set:
        raise UserError("moe cost: --set changes a configuration: give one, or use the flags")
    else:
        shape, model = named_shape(args.model or "20b", rank=MoeConfig().rank)
        work = Workload()
    if args.rank is not None:
        shape = replace(shape, rank=args.rank)
    if args.composers is not None:
        composers = _counts(args.composers)
    else:
        composers = [c for c in defaults if c <= shape.experts] or [shape.experts]
    if max(composers) > shape.experts:
        raise UserError(
            f"--composers: {max(composers)} composers cannot share the {shape.experts} experts of a layer of "
            f"{shape.name}; give at most {shape.experts}, for every composer owns at least one"
        )
    given = {name: getattr(args, name) for name in ("batch", "length", "replicas") if getattr(args, name) is not None}
    work = work._replace(**given, delta_rank=_delta_rank(args.delta_rank, work.delta_rank, shape.rank))
    if work.replicas > min(composers):
        raise UserError(
            f"--replicas: an expert has between 1 and {min(composers)} owners among {min(composers)} composers, found "
            f"{work.replicas}"
        )
    tiers = {"router": args.router_every, "latent": args.latent_every, "backbone": args.backbone_every}
    horizons = {**tiers, "refresh": args.refresh_every}
    horizons = {name: value for name, value in horizons.items() if value is not None}
    return shape, model, work._replace(cadence=replace(work.cadence, **horizons)), composers


def _delta_rank(asked: int | None, otherwise: int, rank: int) -> int:
    from planetary.core.errors import UserError

    if asked is None:
        return min(otherwise, rank)
    if asked > rank:
        raise UserError(
            f"--delta-rank {asked} is above the rank {rank} of the surrogates: such a delta is larger "
            f"than the surrogate, which is then sent whole. Give at most {rank}"
        )
    return asked


def _counts(text: str) -> list[int]:
    from planetary.core.errors import UserError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--composers: expected numbers of at least 1 such as 4,8,16, found {text!r}")
    return counts
