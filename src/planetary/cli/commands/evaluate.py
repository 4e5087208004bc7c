"""`planetary evaluate`: losses and other metrics of a model on named sets of held-out data."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK, EXIT_USAGE

LOOK_EVERY_S = 1.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.key_flags import add_key_flag

    parser = command_parser(
        subparsers,
        "evaluate",
        description="""
            Evaluate a run's newest checkpoint, or a pretrained folder, on named sets of data: loss, perplexity,
            bits per byte and accuracy, or other metrics, with standard errors. Every token of a set is used; in
            chats what the assistant says counts. Without --data: the held-out part that the run evaluates itself.
        """,
        examples=[
            "planetary evaluate runs/stdlib",
            "planetary evaluate runs/stdlib --data notes=notes.txt --data code='src/*.py'",
            "planetary evaluate SmolLM2-135M-Instruct --data chats=chats.jsonl --format chat --json",
            "planetary evaluate runs/stdlib --follow --json > evaluations.jsonl",
            "planetary evaluate runs/stdlib --metric bits_per_byte --metric my_metric.py:TopFive",
        ],
    )
    parser.add_argument("model", metavar="RUN|FOLDER", type=Path, help="run folder, checkpoint or pretrained folder")
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=PATH", help="a set, from a source as of data.source"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help='name, or "file.py:Name" of your own (default: loss, perplexity, bits_per_byte, accuracy)',
    )
    add_key_flag(parser, "--format", "data.format", default="", meaning="kind of the files of all sets")
    add_key_flag(parser, "--text-key", "data.text_key", default="text", meaning="field of a record with the text")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a row (default: the run's; 1024 at most)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="not the newest one: its folder, or a file")
    parser.add_argument(
        "--follow", action="store_true", help="evaluate each later checkpoint, while a gateway of this machine trains"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="prepared data")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import msgspec

    from planetary.core.configuration.schema import DataSource
    from planetary.core.errors import UserError
    from planetary.core.places import cache_folder
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.run.model.evaluation import evaluate_folder, evaluation_table

    sources: dict[str, DataSource] = {}
    for given in args.data:
        name, mark, source = given.partition("=")
        if not (name and mark and source):
            raise UserError(f"--data {given}: expected NAME=PATH, such as wiki=wiki.txt")
        if name in sources:
            raise UserError(f"--data {given}: there are two sets {name}; give each a name of its own")
        sources[name] = DataSource(source, text_key=args.text_key, format=args.format)
    if args.context is not None and args.context < 1:
        raise UserError(f"--context: expected a whole number >= 1, found {args.context}")
    if args.follow and (args.checkpoint is not None or not (args.model / CONFIG).is_file()):
        raise UserError("--follow: expected the folder of a run, and no --checkpoint: nothing else has later versions")
    status = EXIT_OK
    for found in evaluate_folder(
        args.model,
        sources,
        args.metric,
        cache=cache_folder(args.cache),
        length=args.context,
        checkpoint=args.checkpoint,
        is_over=partial(_waited, args.model) if args.follow else lambda: True,
    ):
        lines = [msgspec.json.encode(found).decode()] if args.json else evaluation_table(found)
        print("\n".join(lines), flush=True)
        status = EXIT_USAGE if any(one.failed for one in found.sets) else status
    return status


def _waited(run: Path) -> bool:
    """Return whether no gateway of this machine is at a run, after a while if one is."""
    from planetary.fleet.gateway.run_files import holder_of

    if holder_of(run) is None:
        return True
    time.sleep(LOOK_EVERY_S)
    return False
