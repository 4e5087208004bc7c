"""`planetary moe`: the cost of a sparse mixture over several composers; the ordinary model and the losses of a trained
one. `planetary moe cost` prints the cost model's table of a named shape, or of a configuration's model and run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import HelpFormatter, LazyHelp, command_parser
from planetary.cli.exit_codes import EXIT_OK
from planetary.runs.mixture.results.exported_files import SURROGATES, WEIGHTS

if TYPE_CHECKING:
    from planetary.models.latent_moe_config import LatentMoeConfig
    from planetary.runs.mixture.cost.cost import MoeShape
    from planetary.runs.mixture.cost.table import Workload


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "moe",
        description="""
            Sparse mixtures of experts that are trained by composers which own a part of the
            experts each. `cost` prints what that costs, `evaluate` a run's held-out losses with
            real experts and with surrogates, and `export` puts the parts of a trained one
            together. docs/parallax.md has the method and the formulas.
        """,
        examples=[
            "planetary moe cost --model 176b --composers 4,16 --batch 2048",
            "planetary moe evaluate runs/parallax-tiny",
            "planetary moe export runs/parallax-tiny -o merged",
        ],
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_cost(actions)
    evaluate = actions.add_parser(
        "evaluate",
        help="print a run's held-out losses with real experts and with surrogates",
        description=(
            "Evaluate the newest state that a run's composers have saved, on the run's held-out tokens: the\n"
            "model with all real experts, with surrogates in place of all of them, and as each composer\n"
            "executes it. Beside it stands what the run itself reported for that round. Composers judge with\n"
            "the surrogates that they have at that moment, which may be one refresh older."
        ),
        epilog="example:\n  planetary moe evaluate runs/parallax-tiny",
        formatter_class=HelpFormatter,
    )
    evaluate.add_argument("run", metavar="RUN", type=Path, help="run folder")
    evaluate.add_argument("--cache", type=Path, metavar="DIR", help="prepared data")
    export = actions.add_parser(
        "export",
        help="write the ordinary model of a run or of a saved training",
        description=(
            "Write the model with all real experts and the mean of the composers' other parameters:\n"
            f"{WEIGHTS}, which the key model.weights takes, {SURROGATES} with what\n"
            "stands in for experts elsewhere, and config.toml, which trains and generates with them. Of a run\n"
            "it is the newest state that its composers have saved."
        ),
        epilog=(
            "example:\n"
            "  planetary moe export runs/parallax-tiny -o merged\n"
            f"  planetary generate merged --checkpoint merged/{WEIGHTS} --prompt 'def '\n"
            f"  planetary generate merged --checkpoint merged/{WEIGHTS} --experts surrogates --prompt 'def '\n"
            "  planetary train merged/config.toml"
        ),
        formatter_class=HelpFormatter,
    )
    export.add_argument("training", metavar="TRAINING", type=Path, help="run folder, or folder of a saved training")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    export.add_argument(
        "--tokenizer",
        metavar="NAME",
        help='that a saved training was trained with: "byte", or the path of a tokenizer.json (default: byte); a run '
        "says it itself",
    )
    export.add_argument(
        "--packed",
        action="store_true",
        help="ternary experts in two bits a weight: to generate with, where training goes on from float weights",
    )
    export.add_argument("--force", action="store_true", help="replace a model that is in DIR")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return {"cost": run_cost, "evaluate": _evaluate, "export": _export}[args.action](args)


def _evaluate(args: argparse.Namespace) -> int:
    from planetary.core.places import cache_folder
    from planetary.runs.mixture.results.inference import evaluate_run, losses_table

    _check_surrogates(args.run)
    for line in losses_table(evaluate_run(args.run, cache_folder(args.cache))):
        print(line)
    return EXIT_OK


def _check_surrogates(folder: Path) -> None:
    """Raise `UserError` for the folder of a run without composers; other checks refuse a folder without a run."""
    from planetary.core.config import load_config
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.run.kinds import kind_of
    from planetary.runs.mixture.results.run_state import is_run

    if is_run(folder) and (folder / CONFIG).is_file():
        kind_of(load_config(folder / CONFIG)).check_surrogates(folder)


def _export(args: argparse.Namespace) -> int:
    from planetary.core.errors import UserError

    if (args.output / WEIGHTS).exists() and not args.force:
        raise UserError(f"cannot export to {args.output}: it already holds a model; use --force to replace it")

    from planetary.core.config import load_config
    from planetary.core.configuration.schema import DataConfig
    from planetary.data.tokenizer import CHAR_TOKENIZER, CharTokenizer
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.monitor.human_numbers import count, size
    from planetary.runs.mixture.results.merged_export import export_merged
    from planetary.runs.mixture.results.run_state import is_run, read_mixture

    _check_surrogates(args.training)
    saved = read_mixture(args.training)
    if not is_run(args.training):
        name = args.tokenizer or "byte"
        data = DataConfig(tokenizer=name if name == "byte" else str(Path(name).absolute()))
    elif args.tokenizer is None:
        data = load_config(args.training / CONFIG).data
    else:
        raise UserError(f"--tokenizer is for saved trainings; the run in {args.training} has its own: leave it out")
    written = export_merged(saved, args.output, data=data, packed=args.packed)
    if data.tokenizer == CHAR_TOKENIZER:
        CharTokenizer.load(args.training).save(args.output)
    print(
        f"{args.output / WEIGHTS}: {count(written.parameters)} parameters in {size(written.nbytes)}, of "
        f"{len(saved.state.composers)} composers after {saved.state.steps} steps, sha256 {written.sha256[:12]}"
    )
    if written.surrogates:
        print(f"{args.output / SURROGATES}: {count(written.surrogates)} numbers that stand in for experts")
    return EXIT_OK


_COMPOSERS = (4, 8, 16)


def add_cost(actions: Any) -> None:
    """Add the action's parser."""
    cost = actions.add_parser(
        "cost",
        help="print the cost model's table",
        description=(
            "Arithmetic, memory, the traffic that is removed, and the traffic that comes in its place. Nothing is\n"
            "built. With a configuration, its model, batch, ranks and horizons; flags override it."
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
        ("--batch", "N", "sequences per step of all composers (default: {0.batch})"),
        ("--length", "N", "tokens per sequence (default: {0.length})"),
        ("--delta-rank", "Q", "of surrogate deltas (default: {0.delta_rank}, or R if less)"),
        ("--rank", "R", "of the surrogates (default: the report's, of presets that of moe.rank)"),
        ("--replicas", "R", "owners of every expert (default: {0.replicas})"),
        ("--router-every", "H", "steps between two merges of the routers (default: {0.cadence.router})"),
        ("--latent-every", "H", "of the latent projections (default: {0.cadence.latent})"),
        ("--backbone-every", "H", "of everything else that is no expert (default: {0.cadence.backbone})"),
        ("--refresh-every", "H", "steps between two refreshes of the surrogates (default: {0.cadence.refresh})"),
    ):
        cost.add_argument(flag, type=int, metavar=metavar, help=_CostHelp(text))


class _CostHelp(LazyHelp):
    """Has the defaults of a `Workload` in it."""

    def text(self) -> str:
        from planetary.runs.mixture.cost.table import Workload

        return self.format(Workload())


def run_cost(args: argparse.Namespace) -> int:
    """Print the table."""
    from planetary.core.errors import UserError
    from planetary.models.expert_blocks import blocks_to_save, capacity_of
    from planetary.runs.mixture.cost.table import table

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
    first = composers[0]
    tokens, held = max(1, work.batch * work.length // first), max(1, shape.experts * work.replicas // first)
    capacity = capacity_of(tokens, shape.active, shape.experts, model.capacity)
    sizes = {"weights": (model.read + 1) * shape.latent * shape.hidden, "width": shape.latent}
    blocks = blocks_to_save(tokens, shape.active, held, capacity, **sizes)
    rows = tokens * held if blocks is None else blocks.rows
    print(
        f"operations are of the {shape.active} chosen experts; a composer of C = {first} computes rows for any choice: "
        f"{rows * shape.experts / (tokens * shape.active * held):.3g} times an even share"
    )
    if shape.rank >= shape.hidden:
        print(f"rank {shape.rank} is not below the experts' width {shape.hidden}: surrogates save nothing")
    if unequal := [str(c) for c in composers if shape.experts % c]:
        print(f"{shape.experts} experts cannot be divided evenly by {', '.join(unequal)}: a mean composer is shown")
    return EXIT_OK


def _asked(args: argparse.Namespace) -> tuple[MoeShape, LatentMoeConfig, Workload, list[int]]:
    """Return the settings of the flags and the configuration; raises `UserError` if they contradict each other."""
    from msgspec.structs import replace

    from planetary.core.config import load_config
    from planetary.core.errors import UserError
    from planetary.runs.mixture.config import MoeConfig
    from planetary.runs.mixture.cost.table import Workload, configured, named_shape

    horizons = ("router_every", "latent_every", "backbone_every", "refresh_every")
    for flag in ("batch", "length", "rank", "delta_rank", "replicas", *horizons):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} must be at least 1, found {value}")
    defaults = _COMPOSERS
    if args.config is not None:
        config = load_config(args.config, args.set)
        shape, model, work = configured(config)
        if config.of(MoeConfig).composers:
            defaults = (config.of(MoeConfig).composers,)
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
