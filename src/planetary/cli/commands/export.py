"""`planetary export`: a model as StableHLO with a manifest, a run's for another library, or a served model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK
from planetary.cli.serving_flags import add_model_flags, given_model_flags
from planetary.core.errors import UserError


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
            scalar, params any pytree. With --format hf it is the model of a run, as
            a folder for from_pretrained of transformers: config.json, model.safetensors
            and the tokenizer, for the families in docs/models.md; adapters are merged. With
            --format peft it is the adapters of a run alone, for PeftModel.from_pretrained;
            with --format gguf it is one file for llama.cpp.
            With --serving it is the
            model that `planetary serve SOURCE` serves, as a folder that it serves without
            the model's code: functions that take a chunk of a prompt or continue texts by
            a token (program.mlir), serving.json with their signatures and the sizes of
            the cache, parameters, tokenizer, and a trial, with which the functions are
            compared here and on every worker.
        """,
        examples=[
            "planetary export planetary.models.nanochat:build -o nanochat",
            "planetary export my_model.py:build -o my_model --set n_layer=8 --role 'rope.*=buffer'",
            "planetary export runs/gpt2 --format hf -o my-gpt2",
            "planetary export runs/chat --format gguf --matrices q8_0 -o chat.gguf",
            "planetary export --serving runs/gpt2 -o served --context 1024 --batch 4",
        ],
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="module:function or path/to/file.py:function; with --format hf, gguf or peft a run's folder; with "
        "--serving any model that `planetary serve` takes",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write; with --format gguf the file"
    )
    parser.add_argument(
        "--format",
        choices=sorted(_WRITERS),
        default="stablehlo",
        help="stablehlo (default); hf: the model of a run, for transformers; gguf: the same in a file for llama.cpp; "
        "peft: the adapters of a run; serving: a served model",
    )
    parser.add_argument(
        "--serving", action="store_const", const="serving", dest="format", help="the same as --format serving"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the function; with --serving a config key",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="param, buffer, input, target, key or step; NAME may be a pattern",
    )
    parser.add_argument("--matrices", choices=("f16", "q8_0"), help="with --format gguf: numbers of the matrices (f16)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="with --format hf: type of the tensors (that of the folder the run started from, or float32)",
    )
    parser.add_argument("--text", action="store_true", help="also write model.stablehlo.txt, for reading")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="with --format hf, gguf or peft: one of the run's, instead of the newest",
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is in DIR")
    add_model_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    writer, own = _WRITERS[args.format]
    given = [name for name in ("set", "role", "text", "checkpoint", "matrices", "dtype") if getattr(args, name)]
    for name in (*given, *given_model_flags(args)):
        if name not in own:
            raise UserError(f"--{name.replace('_', '-')} has no meaning with --format {args.format}")
    writer(args)
    return EXIT_OK


def _stablehlo(args: argparse.Namespace) -> None:
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
    for note in model.notes:
        print(f"note: {note}")


def _transformers(args: argparse.Namespace) -> None:
    from planetary.monitor.human_numbers import count
    from planetary.run.model.pretrained_export import export_pretrained

    made = export_pretrained(
        Path(args.source), args.output, checkpoint=args.checkpoint, dtype=args.dtype or "", force=args.force
    )
    print(f"{args.output}: {made.architecture}, {count(made.param_count)} parameters of round {made.round}")
    if made.no_tokenizer:
        print(f"no tokenizer is in it: {made.no_tokenizer}")


def _gguf(args: argparse.Namespace) -> None:
    from planetary.monitor.human_numbers import count
    from planetary.run.model.gguf_export import export_gguf

    kind = args.matrices or "f16"
    made = export_gguf(Path(args.source), args.output, kind=kind, checkpoint=args.checkpoint, force=args.force)
    print(f"{args.output}: {made.architecture}, {count(made.param_count)} parameters of round {made.round} in {kind}")


def _adapter(args: argparse.Namespace) -> None:
    from planetary.monitor.human_numbers import count
    from planetary.run.model.adapter_export import export_adapter

    made = export_adapter(Path(args.source), args.output, checkpoint=args.checkpoint, force=args.force)
    size = f"{count(made.param_count)} parameters of round {made.round}"
    print(f"{args.output}: adapters of {made.matrices} matrices, {size}")


def _serving(args: argparse.Namespace) -> None:
    from planetary.cli.serving_flags import serving_tables
    from planetary.core.config import config_from_tables
    from planetary.monitor.human_numbers import count
    from planetary.run.model.serving_export import export_served

    source = Path(args.source)
    if not source.exists():
        raise UserError(f"export: there is no {source}: expected a run folder, a checkpoint or a model's folder")
    config = config_from_tables(serving_tables(source, args), args.set)
    made, report = export_served(config, args.output, force=args.force)
    if made.warning:
        print(made.warning)
    of = f", of round {made.version}" if made.version else ""
    size = f"{count(made.param_count)} parameters{of}, {len(made.manifest.functions)} functions"
    print(f"{args.output}: {made.name}, {size}")
    print(report)


_WRITERS = {
    "stablehlo": (_stablehlo, {"set", "role", "text"}),
    "hf": (_transformers, {"checkpoint", "dtype"}),
    "gguf": (_gguf, {"checkpoint", "matrices"}),
    "peft": (_adapter, {"checkpoint"}),
    "serving": (_serving, {"set", "context", "batch", "cache_mb", "experts", "weights", "chat_template"}),
}
"""Format -> the writing function, and the format's flags."""
