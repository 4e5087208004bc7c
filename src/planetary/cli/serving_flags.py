"""Flags of `planetary serve` and `planetary export --serving`: which model, and the sizes of its functions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_SIZES = ("context", "batch", "cache_mb", "experts", "weights")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that both commands have."""
    group = parser.add_argument_group("served functions")
    group.add_argument("--context", type=int, metavar="TOKENS", help="the longest text, prompt included")
    group.add_argument("--batch", type=int, metavar="N", help="texts that a worker continues at once (default: 8)")
    group.add_argument("--cache-mb", type=float, metavar="MB", help="memory for keys and values (default: 256)")
    group.add_argument("--weights", choices=("f32", "bf16", "int8", "int4"), help="bits of parameters (default: f32)")
    group.add_argument(
        "--experts", metavar="WHICH", help="of a mixture's run: real, surrogates, or composer:N (default: real)"
    )
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template of chats")


def serve_table(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the table `[serve]` that the flags stand for."""
    table: dict[str, Any] = {"model": str(model.resolve())}
    table |= {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    if args.chat_template is not None:
        table["chat_template"] = str(args.chat_template.resolve())
    return table


def given_model_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of `add_model_flags` that were given."""
    return [name for name in (*_SIZES, "chat_template") if getattr(args, name) is not None]
