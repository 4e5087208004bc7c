"""`planetary moe`: what a sparse mixture costs over several composers, and the ordinary model of a trained one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.commands import HelpFormatter, command_parser
from planetary.cli.errors import EXIT_OK

WEIGHTS = "merged.safetensors"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "moe",
        description="""
            Sparse mixtures of experts that are trained by composers which own a part of the
            experts each. `cost` prints what that costs, `export` puts the parts of a trained
            one together. docs/parallax.md has the method and the formulas.
        """,
        examples=[
            "planetary moe cost --model 176b --composers 4,16 --batch 2048",
            "planetary moe export runs/parallax/paper -o merged",
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
    cost.add_argument("--delta-rank", type=int, default=8, metavar="Q", help="of surrogate deltas (default: 8)")
    cost.add_argument("--rank", type=int, metavar="R", help="of the surrogates (default: the model's)")
    export = actions.add_parser(
        "export",
        help="write the ordinary model of a saved training",
        description=(
            "Write the model with all real experts and the mean of the composers' other parameters:\n"
            f"{WEIGHTS}, which the key model.weights takes, and config.toml, which trains and\n"
            "generates with it. Surrogates are left out."
        ),
        epilog=(
            "example:\n"
            "  python bench/parallax.py --preset moe-tiny --arm paper --save runs/parallax\n"
            "  planetary moe export runs/parallax/paper -o merged\n"
            f"  planetary generate merged --checkpoint merged/{WEIGHTS} --prompt 'def '\n"
            "  planetary train merged/config.toml"
        ),
        formatter_class=HelpFormatter,
    )
    export.add_argument("training", metavar="TRAINING", type=Path, help="folder of a saved training")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    export.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help='that it was trained with: "byte", or the path of a tokenizer.json (default: byte)',
    )
    export.add_argument("--force", action="store_true", help="replace a model that is in DIR")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return _export(args) if args.action == "export" else _cost(args)


def _export(args: argparse.Namespace) -> int:
    from planetary.core.errors import UserError

    if (args.output / WEIGHTS).exists() and not args.force:
        raise UserError(f"cannot export to {args.output}: it already holds a model; use --force to replace it")

    from planetary.moe.merged_export import export_merged
    from planetary.moe.saved_training import read_training
    from planetary.monitor.human_numbers import count

    saved = read_training(args.training)
    written = export_merged(saved, args.output, tokenizer=args.tokenizer)
    print(
        f"{args.output / WEIGHTS}: {count(written.parameters)} parameters of {len(saved.state.composers)} composers "
        f"after {saved.state.steps} steps, sha256 {written.sha256[:12]}"
    )
    return EXIT_OK


def _cost(args: argparse.Namespace) -> int:
    import msgspec

    from planetary.core.errors import UserError
    from planetary.moe.cost import SHAPES
    from planetary.moe.cost_table import Workload, table

    if args.model not in SHAPES:
        raise UserError(f"--model: there is no shape {args.model!r}; there are: {', '.join(SHAPES)}")
    composers = _counts(args.composers)
    for flag in ("batch", "length", "delta_rank"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} must be at least 1, found {getattr(args, flag)}")
    shape = SHAPES[args.model]
    if args.rank is not None:
        shape = msgspec.structs.replace(shape, rank=args.rank)
    rows = table(shape, composers, Workload(args.batch, args.length, args.delta_rank))
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
