"""Flags of `planetary serve` and `planetary export --serving`: which model, and the sizes of the functions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_FLAGS = {
    "--context": "serve.context",
    "--batch": "serve.batch",
    "--cache-mb": "serve.cache_mb",
    "--weights": "serve.weights",
    "--experts": "serve.experts",
    "--chat-template": "serve.chat_template",
}
"""Flags both commands have."""


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags both commands have."""
    from planetary.cli.key_flags import add_key_flags

    add_key_flags(parser.add_argument_group("served functions"), _FLAGS)


def serving_tables(model: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configuration's tables the flags stand for."""
    from planetary.cli.key_flags import given_keys

    given = {key.partition(".")[2]: value for key, value in given_keys(args, _FLAGS).items()}
    return {"serve": {"model": str(model.resolve()), **given}}


def given_model_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of `add_model_flags` that were given."""
    from planetary.cli.key_flags import given_keys

    return [key.partition(".")[2] for key in given_keys(args, _FLAGS)]


def model_settings(args: argparse.Namespace) -> list[str]:
    """Return the settings the flags of `add_model_flags` stand for, `section.key=value`."""
    from planetary.cli.key_flags import settings_of

    return settings_of(args, _FLAGS)
