"""`planetary moe`: the cost of a sparse mixture over several composers; the ordinary model and the losses of a trained
one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.command_table import HelpFormatter, command_parser
from planetary.cli.commands.moe_cost import add_cost, run_cost
from planetary.cli.exit_codes import EXIT_OK
from planetary.moe.results.exported_files import SURROGATES, WEIGHTS


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
    from planetary.moe.results.inference import evaluate_run, losses_table
    from planetary.run.places import cache_folder

    _check_surrogates(args.run)
    for line in losses_table(evaluate_run(args.run, cache_folder(args.cache))):
        print(line)
    return EXIT_OK


def _check_surrogates(folder: Path) -> None:
    """Raise `UserError` for the folder of a run without composers; what is no run is for others to say."""
    from planetary.core.config import load_config
    from planetary.fabric.gateway.run_files import CONFIG
    from planetary.moe.results.run_state import is_run
    from planetary.run.kinds import kind_of

    if is_run(folder) and (folder / CONFIG).is_file():
        kind_of(load_config(folder / CONFIG)).check_surrogates(folder)


def _export(args: argparse.Namespace) -> int:
    from planetary.core.errors import UserError

    if (args.output / WEIGHTS).exists() and not args.force:
        raise UserError(f"cannot export to {args.output}: it already holds a model; use --force to replace it")

    from planetary.core.config import DataConfig, load_config
    from planetary.data.tokenizer import CHAR_TOKENIZER, CharTokenizer
    from planetary.fabric.gateway.run_files import CONFIG
    from planetary.moe.results.merged_export import export_merged
    from planetary.moe.results.run_state import is_run, read_mixture
    from planetary.monitor.human_numbers import count, size

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
