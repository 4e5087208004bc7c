"""The configuration and folder of a run: a new one with a folder of its own, or one that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.config import Config, config_from_tables, load_config
from planetary.core.errors import UserError
from planetary.fabric.gateway.run_files import CONFIG, EVENTS, METRICS, STARTING, gateway_of, has_run
from planetary.fabric.preparation.model_shapes import with_model_shapes

ConfigSource = str | Path | Config | Mapping[str, Any]
"""A file (TOML, or PCP's experiment.json), a `Config`, or its tables: `{"train": {"rounds": 3}}`."""


def read_config(source: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in `source` with `section.key=value` overrides. Raises `UserError`."""
    if isinstance(source, str | Path):
        return load_config(source, overrides)
    return config_from_tables(msgspec.to_builtins(source) if isinstance(source, Config) else source, overrides)


def new_run(source: ConfigSource, overrides: Sequence[str], folder: Path | None) -> tuple[Config, Path]:
    """Return the configuration and folder of a new run.

    Without a folder it is `<run.dir>/<run.name>`, with a number behind it when that is taken.
    """
    config = with_model_shapes(read_config(source, overrides))
    keys = {override.partition("=")[0].strip() for override in overrides}
    if "train.rounds" in keys:
        if config.train.target_minutes and "train.target_minutes" in keys:
            raise UserError(
                "train.rounds and train.target_minutes are both given: the one fixes how long the run is, the other "
                "the time that it may take; leave one of them out"
            )
        config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, target_minutes=0.0))
    if folder is not None:
        if has_run(folder):
            raise UserError(
                f"{folder} already holds a run: go on with it (planetary train --resume {folder}), or choose another "
                "--run-dir"
            )
        return _named(config, folder.absolute()), folder.absolute()
    base = (Path(config.run.dir) / config.run.name).absolute()
    folder, number = base, 2
    while _is_taken(folder):
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return _named(config, folder), folder


def _is_taken(folder: Path) -> bool:
    """Whether a folder holds more than leftovers of a start that failed before its run, or has a start under way."""
    if not folder.exists():
        return False
    left = STARTING if has_run(folder) else STARTING | {EVENTS, METRICS}
    return any(entry.name not in left for entry in folder.iterdir()) or gateway_of(folder) is not None


def resumed_run(folder: Path, overrides: Sequence[str]) -> tuple[Config, Path]:
    """Return the configuration and folder of a run that goes on. Raises `UserError` when there is none."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"cannot resume {folder}: it is no run folder, {CONFIG} is missing")
    return load_config(path, overrides), folder.absolute()


def _named(config: Config, folder: Path) -> Config:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=folder.name))
