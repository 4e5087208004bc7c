"""`planetary serve`: a trained model behind an endpoint that speaks OpenAI's interface, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.serving_flags import add_model_flags

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config

_FLAGS = {
    "--host": "serve.host",
    "--port": "serve.port",
    "--name": "serve.name",
    "--follow": "serve.follow",
    "--keys": "serve.keys",
    "--origins": "serve.origins",
    "--tool-format": "serve.tool_format",
    "--backend": "fabric.backend",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.key_flags import add_key_flag, add_key_flags, required_key

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
            "planetary serve downloads/Llama-3.2-1B small=downloads/SmolLM2-135M-Instruct",
            "planetary serve downloads/Llama-3.2-1B --adapter style=adapters/style --adapter tuned=runs/tuned",
            "planetary export --serving runs/stdlib -o stdlib-served && planetary serve stdlib-served",
        ],
    )
    parser.add_argument("model", metavar="[NAME=]MODEL", help=required_key("serve.model"))
    meaning = "further models at the same endpoint [serve.models]"
    parser.add_argument("beside", metavar="[NAME=]MODEL", nargs="*", default=[], help=meaning)
    add_key_flags(parser, _FLAGS)
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="an adapter of the model beside it, for requests with this name [serve.adapters]",
    )
    meaning = "worker processes, one for each model at least"
    add_key_flag(parser, "--workers", "fabric.workers", default=1, meaning=meaning)
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
    from planetary.core.configuration.schema import RunConfig
    from planetary.core.places import cache_folder
    from planetary.run.processes.local_run import LocalRun, LocalRunOptions
    from planetary.runs.serve.config import ServeConfig

    config = _config(args)
    with tempfile.TemporaryDirectory(prefix="planetary-serve-") as scratch:
        place = Path(scratch) if config.run.dir == RunConfig().dir else Path(config.run.dir)
        folder = args.run_dir or place / config.run.name
        options = LocalRunOptions(folder=folder, cache=cache_folder(args.cache), keeps_gateway=True)
        stopped = asyncio.run(run_until_signal(LocalRun(config, options, ServingLines(config.of(ServeConfig).keys))))
        print(stopped.replace("SIGINT", "Ctrl+C"), flush=True)
    return EXIT_OK


def _config(args: argparse.Namespace) -> Config:
    """Return the configuration the flags stand for. Raises `UserError`."""
    from planetary.cli.key_flags import settings_of
    from planetary.cli.serving_flags import model_settings
    from planetary.core.configuration.toml import toml_value
    from planetary.run.serve import served_config

    given = [*settings_of(args, _FLAGS), *model_settings(args), *args.set]
    name, model = _named(args.model)
    further = [_named(one) for one in args.beside]
    names = [one or path.resolve().name.removesuffix(".gguf") for one, path in further]
    workers = max(args.workers, 1 + len(further))
    own = [
        f"fabric.workers={workers}",
        *([f"serve.name={toml_value(name)}"] if name else []),
        *_table("serve.models", "models", zip(names, (path for _, path in further), strict=True)),
        *_table("serve.adapters", "adapters", _adapters(args.adapter)),
    ]
    return served_config(model, [*own, *given])


def _named(text: str) -> tuple[str, Path]:
    """Return name and path of `[NAME=]MODEL`; "": it has no name."""
    name, mark, path = text.partition("=")
    return (name, Path(path)) if mark and name and path and not Path(text).exists() else ("", Path(text))


def _adapters(given: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield names and folders of `--adapter`. Raises `UserError`."""
    from planetary.core.errors import UserError

    for one in given:
        name, mark, folder = one.partition("=")
        if not (name and mark and folder):
            raise UserError(f"--adapter {one}: expected NAME=FOLDER, such as style=adapters/style")
        yield name, Path(folder)


def _table(key: str, kind: str, entries: Iterable[tuple[str, Path]]) -> list[str]:
    """Return the setting of a table of paths; [] without entries. Raises `UserError` for a name that is there twice."""
    from planetary.core.configuration.toml import toml_value
    from planetary.core.errors import UserError

    folders: dict[str, str] = {}
    for name, path in entries:
        if name in folders:
            raise UserError(f"serve: there are two {kind} {name!r}: give each a name of its own, NAME={path}")
        folders[name] = str(path.absolute())
    return [f"{key}={toml_value(folders)}"] if folders else []
