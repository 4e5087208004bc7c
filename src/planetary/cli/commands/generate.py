"""`planetary generate`: continue a text with the newest checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.key_flags import add_key_flag, default_of
    from planetary.runs.serve.scheduling.sampling import USUAL, USUAL_TOKENS

    parser = command_parser(
        subparsers,
        "generate",
        description="""
            Continue a text with the newest checkpoint of a run. The text is printed as it is
            drawn. Equal arguments print equal text, which is that of `planetary serve` for the same
            prompt, options and seed.
        """,
        examples=[
            "planetary generate runs/stdlib --prompt 'def '",
            "planetary generate runs/stdlib --prompt 'import ' --tokens 500 --temperature 0.6 --seed 7",
            "planetary generate runs/parallax-tiny --experts composer:0 --prompt 'def '",
            "planetary generate merged --checkpoint merged/merged.safetensors --prompt 'def '",
        ],
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--prompt", required=True, help='text to continue; "-" reads it from standard input')
    parser.add_argument(
        "--tokens", type=int, default=USUAL_TOKENS, metavar="N", help="most tokens to draw (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=USUAL.temperature,
        metavar="T",
        help="lower is more predictable, 0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=USUAL.top_k,
        metavar="K",
        help="draw from the K likeliest tokens only (default: all)",
    )
    parser.add_argument("--seed", type=int, default=USUAL.seed, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="not the newest one: its folder, or a safetensors file"
    )
    add_key_flag(parser, "--experts", "serve.experts", default=default_of("serve.experts"))
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt

    from planetary.run.model.served import load_trained
    from planetary.run.model.text_continuation import TextContinuation
    from planetary.runs.serve.scheduling.sampling import SamplingOptions

    options = SamplingOptions(temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    model = TextContinuation(load_trained(args.run, args.checkpoint, args.experts))
    pieces = model.continue_text(prompt, options, args.tokens)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return EXIT_OK
