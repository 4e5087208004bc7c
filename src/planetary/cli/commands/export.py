"""`planetary export`: a JAX model as StableHLO with its manifest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.errors import EXIT_OK


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "export",
        description="""
            Write a model as StableHLO: model.mlir (a portable artifact), manifest.json
            (name, shape, type, role and initial value of every argument) and
            init.safetensors. The function is called with the options and returns
            (loss_fn, params, example_batch): loss_fn(params, *example_batch) is a
            scalar, params any pytree.
        """,
        examples=[
            "planetary export planetary.models.nanochat:build -o nanochat",
            "planetary export my_model.py:build -o my_model --set n_layer=8 --role 'rope.*=buffer'",
        ],
    )
    parser.add_argument("source", metavar="SOURCE", help="module:function or path/to/file.py:function")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="option of the function")
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="param, buffer, input or target; NAME may be a pattern",
    )
    parser.add_argument("--text", action="store_true", help="also write model.stablehlo.txt, for reading")
    parser.add_argument("--force", action="store_true", help="replace a model that is in DIR")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.artifacts.store import write_atomically
    from planetary.cli.option_values import key_values
    from planetary.monitor.human_numbers import count
    from planetary.run.model.authoring import export

    options, roles = key_values(args.set, "--set"), key_values(args.role, "--role")
    model = export(args.source, args.output, options=options, roles=roles, force=args.force)
    if args.text:
        write_atomically(args.output / "model.stablehlo.txt", model.text.encode())
    size = f"{count(model.param_count)} parameters in {len(model.manifest.of_role('param'))} tensors"
    print(f"{args.output}: {size}, sha256 {model.digest[:12]}")
    return EXIT_OK
