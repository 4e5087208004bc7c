"""`planetary serve`: a trained model behind an endpoint that speaks OpenAI's interface, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.option_values import port
from planetary.cli.serving_flags import add_model_flags, serve_table

if TYPE_CHECKING:
    from planetary.core.config import Config


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "serve",
        description="""
            Serve a trained model: a gateway with an HTTP endpoint (completions, chat completions, streams), and workers
            on this machine. A worker may be killed at any time; texts go on with another. Ctrl+C ends it.
        """,
        examples=[
            "planetary serve runs/stdlib",
            "planetary serve runs/stdlib --follow --workers 2 --port 8001",
            "planetary serve downloads/Llama-3.2-1B --context 4096 --cache-mb 1024",
            "planetary export --serving runs/stdlib -o stdlib-served && planetary serve stdlib-served",
        ],
    )
    parser.add_argument(
        "model",
        type=Path,
        help="run folder, checkpoint folder of one, folder of a pretrained GPT-2, Llama or Qwen or of `planetary "
        "export --serving`, or a StableHLO model",
    )
    parser.add_argument("--host", help="address of the endpoint (default: 127.0.0.1); others need --keys")
    parser.add_argument("--port", type=port, metavar="P", help="port of the endpoint (default: 8000; 0: any)")
    parser.add_argument("--name", help="by which clients ask for the model (default: the folder's name)")
    parser.add_argument("--workers", type=int, metavar="N", default=1, help="number of workers (default: 1)")
    parser.add_argument("--backend", help="cpu, cuda, vulkan, pjrt:cpu, … (default: cpu)")
    parser.add_argument("--follow", action="store_true", help="serve every newer checkpoint of the run")
    parser.add_argument("--keys", type=Path, metavar="FILE", help='file of lines "NAME KEY" that requests need')
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of logs and journal (default: temporary)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="compiled functions")
    add_model_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import tempfile

    from planetary.cli.exit_codes import EXIT_OK
    from planetary.cli.live_display import run_until_signal
    from planetary.cli.serving_lines import ServingLines
    from planetary.run.places import cache_folder
    from planetary.run.processes.local_run import LocalRun, LocalRunOptions

    config = _config(args)
    with tempfile.TemporaryDirectory(prefix="planetary-serve-") as scratch:
        folder = args.run_dir or Path(scratch) / config.run.name
        options = LocalRunOptions(folder=folder, cache=cache_folder(args.cache))
        stopped = asyncio.run(run_until_signal(LocalRun(config, options, ServingLines())))
        print(stopped.replace("SIGINT", "Ctrl+C"), flush=True)
    return EXIT_OK


def _config(args: argparse.Namespace) -> Config:
    """Return the configuration that the flags stand for. Raises `UserError`."""
    from planetary.core.config import config_from_tables
    from planetary.core.errors import UserError

    if not args.model.exists():
        raise UserError(f"serve: there is no {args.model}: expected a run folder, a checkpoint or a model's folder")
    serve = {**serve_table(args.model, args), "follow": args.follow}
    serve |= {name: getattr(args, name) for name in ("host", "port", "name") if getattr(args, name) is not None}
    if args.keys is not None:
        serve["keys"] = str(args.keys.resolve())
    fabric: dict[str, Any] = {"workers": args.workers}
    if args.backend is not None:
        fabric["backend"] = args.backend
    tables = {"run": {"name": f"serve-{args.model.resolve().name}"}, "serve": serve, "fabric": fabric}
    return config_from_tables(tables, args.set)
