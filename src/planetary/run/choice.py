"""The configuration and folder of a run: a new one with a separate folder, or one that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from planetary.artifacts.checkpoint import TENSOR_FILES, list_checkpoints
from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.identity import mathematical_changes
from planetary.core.configuration.ranges import check_instance, show_found
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import toml_value
from planetary.core.errors import UserError
from planetary.core.printable import command_line
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG, EVENTS, METRICS, STARTING, gateway_of, has_run
from planetary.monitor.run_folder import load_history
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.rounds.preparation.model_shapes import with_model_shapes

ConfigSource = str | Path | Config | Mapping[str, Any]
"""A file (TOML, or PCP's experiment.json), a `Config`, or tables: `{"train": {"rounds": 3}}`."""


def settings(
    overrides: Mapping[str, Any] | None = None, *, workers: int | None = None, rounds: int | None = None
) -> list[str]:
    """Return the arguments of the Python interface that set keys as `section.key=value` overrides."""
    wanted = 'a dictionary such as {"train.inner_steps": 20}'
    check_instance("overrides", overrides, (Mapping, NoneType), wanted)
    if (key := next((key for key, value in (overrides or {}).items() if value is None), None)) is not None:
        raise UserError(f"overrides: {key} is None: leave the key out for its default")
    own = {key: value for key, value in (("fabric.workers", workers), ("train.rounds", rounds)) if value is not None}
    return [f"{key}={toml_value(value)}" for key, value in {**(overrides or {}), **own}.items()]


def read_config(source: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in `source` with `section.key=value` overrides. Raises `UserError`."""
    if isinstance(source, str | Path):
        return load_config(source, overrides)
    if not isinstance(source, Config | Mapping):
        raise UserError(
            "a configuration is the path of a file, a planetary.Config, or its tables as a dictionary; found "
            f"{show_found(source)}"
        )
    return config_from_tables(source.tables() if isinstance(source, Config) else source, overrides)


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
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the run's folder {folder} is a file: choose another --run-dir (in Python run_dir)")
        if has_run(folder):
            raise UserError(
                f"{folder} already holds a run: go on with it ({command_line('train', '--resume', folder)}, in Python "
                f'planetary.Run.open("{folder}").resume()), or choose another --run-dir (run_dir)'
            )
        return _named(config, folder.absolute()), folder.absolute()
    base = (Path(config.run.dir) / config.run.name).absolute()
    folder, number = base, 2
    while _is_taken(folder):
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return _named(config, folder), folder


def _is_taken(folder: Path) -> bool:
    """Whether a folder holds more than leftovers of a failed start, or has a start under way."""
    if not folder.exists():
        return False
    left = STARTING if has_run(folder) else STARTING | {EVENTS, METRICS}
    return any(entry.name not in left for entry in folder.iterdir()) or gateway_of(folder) is not None


def resumed_run(folder: Path, overrides: Sequence[str], checkpoint: Path | None = None) -> tuple[Config, Path]:
    """Return the configuration and folder of a resumed run, from the newest checkpoint or from another.

    Raises:
        UserError: there is no run, or all rounds it is to have are trained.
    """
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"cannot resume {folder}: it is no run folder, {CONFIG} is missing")
    config = load_config(path, overrides)
    kept = list_checkpoints(folder / CHECKPOINTS)
    if checkpoint is None and kept:
        _check_rounds_are_left(config.train.rounds, kept[-1].round, folder)
    check_unchanged(load_config(path), config, folder)
    return config, folder.absolute()


def check_unchanged(before: Config, after: Config, folder: Path) -> None:
    """Raise `UserError` where a run in `folder` would go on with other mathematics than it has state of.

    The text names the keys with both values, and the way to train on with the new ones.
    """
    kept = list_checkpoints(folder / CHECKPOINTS)
    changes = mathematical_changes(before, after) if kept or (after.of(MoeConfig).composers and has_run(folder)) else []
    if not changes:
        return
    told = ", ".join(f"{key} = {_shown(new)} (it has {_shown(old)})" for key, old, new in changes)
    text = f"cannot resume {folder} with {told}: a run keeps its mathematics; more train.rounds are fine"
    if kept and (before.adapter.rank or before.model.freeze):  # its checkpoints are no whole model
        export = command_line("export", folder, "--format", "hf", "-o", "FOLDER")
        text += f'. A new run goes on from the whole model: {export}, then model.source = "FOLDER"'
    elif kept:
        weights = folder / CHECKPOINTS / kept[-1].path.name / TENSOR_FILES[0]
        changed = [one for key, _, new in changes for one in ("--set", f"{key}={_shown(new)}") if new is not None]
        again = command_line("train", folder / CONFIG, "--set", f"model.weights={weights}", *changed)
        text += f". A new run goes on from the newest weights with other values: {again}"
    raise UserError(text)


def _shown(value: Any) -> str:
    return "nothing" if value is None else toml_value(value)


def _check_rounds_are_left(rounds: int, trained: int, folder: Path) -> None:
    if rounds < trained:
        raise UserError(
            f"cannot resume {folder} with train.rounds = {rounds}: {trained} rounds are trained. Give more (--rounds "
            f"{2 * trained}, in Python resume(rounds={2 * trained})), or go back to a checkpoint "
            "(--checkpoint, in Python round=)"
        )
    if rounds == trained and load_history(folder).events[-1]["event"] == "run_finished":
        raise UserError(
            f"nothing to resume in {folder}: all its {trained} rounds are trained. Give more (--rounds {2 * trained}, "
            f"in Python resume(rounds={2 * trained}))"
        )


def _named(config: Config, folder: Path) -> Config:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=folder.name))
