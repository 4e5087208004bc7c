"""`planetary moe`: what a sparse mixture costs over several composers; the ordinary model and the losses of a trained
one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.commands import HelpFormatter, command_parser
from planetary.cli.errors import EXIT_OK
from planetary.moe.exported_files import SURROGATES, WEIGHTS


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
    cost = actions.add_parser(
        "cost",
        help="print the cost model's table",
        description=(
            "Arithmetic, memory, and the traffic that is removed and the traffic that is added. Nothing is built."
        ),
        epilog="example:\n  planetary moe cost --model 176b --composers 4,16 --batch 2048",
        formatter_class=HelpFormatter,
    )
    cost.add_argument("--model", default="20b", metavar="NAME", help="20b or 176b of the report (default: 20b)")
    cost.add_argument("--composers", default="4,8,16", metavar="N,N", help="composer counts (default: 4,8,16)")
    cost.add_argument("--batch", type=int, default=1024, metavar="N", help="sequences per step (default: 1024)")
    cost.add_argument("--length", type=int, default=1024, metavar="N", help="tokens per sequence (default: 1024)")
    cost.add_argument("--delta-rank", type=int, metavar="Q", help="of surrogate deltas (default: 8, or R if less)")
    cost.add_argument("--rank", type=int, metavar="R", help="of the surrogates (default: the model's)")
    cost.add_argument("--replicas", type=int, default=1, metavar="R", help="owners of every expert (default: 1)")
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
    export.add_argument("--force", action="store_true", help="replace a model that is in DIR")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return {"cost": _cost, "evaluate": _evaluate, "export": _export}[args.action](args)


def _evaluate(args: argparse.Namespace) -> int:
    from planetary.cli.node_flags import cache_folder
    from planetary.moe.evaluation import evaluate_run, losses_table

    for line in losses_table(evaluate_run(args.run, cache_folder(args.cache))):
        print(line)
    return EXIT_OK


def _export(args: argparse.Namespace) -> int:
    from planetary.core.errors import UserError

    if (args.output / WEIGHTS).exists() and not args.force:
        raise UserError(f"cannot export to {args.output}: it already holds a model; use --force to replace it")

    from planetary.core.config import DataConfig, load_config
    from planetary.fabric.run_files import CONFIG
    from planetary.moe.merged_export import export_merged
    from planetary.moe.run_state import is_run, read_mixture
    from planetary.monitor.human_numbers import count

    saved = read_mixture(args.training)
    if not is_run(args.training):
        name = args.tokenizer or "byte"
        data = DataConfig(tokenizer=name if name == "byte" else str(Path(name).absolute()))
    elif args.tokenizer is None:
        data = load_config(args.training / CONFIG).data
    else:
        raise UserError(f"--tokenizer is for saved trainings; the run in {args.training} has its own: leave it out")
    written = export_merged(saved, args.output, data=data)
    print(
        f"{args.output / WEIGHTS}: {count(written.parameters)} parameters of {len(saved.state.composers)} composers "
        f"after {saved.state.steps} steps, sha256 {written.sha256[:12]}"
    )
    if written.surrogates:
        print(f"{args.output / SURROGATES}: {count(written.surrogates)} numbers that stand in for experts")
    return EXIT_OK


def _cost(args: argparse.Namespace) -> int:
    import msgspec

    from planetary.core.errors import UserError
    from planetary.moe.cost import SHAPES
    from planetary.moe.cost_table import Workload, table

    if args.model not in SHAPES:
        raise UserError(f"--model: there is no shape {args.model!r}; there are: {', '.join(SHAPES)}")
    composers = _counts(args.composers)
    shape = SHAPES[args.model]
    if args.rank is None:
        args.rank = shape.rank
    if args.delta_rank is None:
        args.delta_rank = min(8, args.rank)
    for flag in ("batch", "length", "rank", "delta_rank"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} must be at least 1, found {getattr(args, flag)}")
    if max(composers) > shape.experts:
        raise UserError(
            f"--composers: {max(composers)} composers cannot share the {shape.experts} experts of a layer of "
            f"{args.model}; give at most {shape.experts}, for every composer owns at least one"
        )
    if args.delta_rank > args.rank:
        raise UserError(
            f"--delta-rank {args.delta_rank} is above the rank {args.rank} of the surrogates: such a delta is larger "
            f"than the surrogate, which is then sent whole. Give at most {args.rank}"
        )
    if not 1 <= args.replicas <= min(composers):
        raise UserError(
            f"--replicas: an expert has between 1 and {min(composers)} owners among {min(composers)} composers, found "
            f"{args.replicas}"
        )
    shape = msgspec.structs.replace(shape, rank=args.rank)
    rows = table(shape, composers, Workload(args.batch, args.length, args.delta_rank, args.replicas))
    print(
        f"{shape.name}: {shape.layers} MoE layers × {shape.experts} experts, {shape.active} active, "
        f"{shape.latent} → {shape.hidden} → {shape.latent}, surrogates of rank {shape.rank}; "
        f"{args.batch} × {args.length} tokens a step"
    )
    width = max(len(label) for label, _ in rows)
    print(" " * width + "".join(f"{f'C = {c}':>14}" for c in composers))
    for label, cells in rows:
        print(f"{label:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    print("× is how many times less than ordinary training on one machine; GB are 10⁹ bytes")
    if shape.rank >= shape.hidden:
        print(f"rank {shape.rank} is not below the experts' width {shape.hidden}: surrogates save nothing")
    if unequal := [str(c) for c in composers if shape.experts % c]:
        print(f"{shape.experts} experts cannot be divided evenly by {', '.join(unequal)}: a mean composer is shown")
    return EXIT_OK


def _counts(text: str) -> list[int]:
    from planetary.core.errors import UserError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--composers: expected numbers of at least 1 such as 4,8,16, found {text!r}")
    return counts
