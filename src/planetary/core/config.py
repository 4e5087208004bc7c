"""Reading, overriding, writing and identifying a configuration.

`config_schema` lists the keys. A relative path in a file is relative to that file's folder; in an override it
is relative to the current folder. `run.dir`, where output goes, is always relative to the current folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.config_schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FabricConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    Timings,
    TrainConfig,
)
from planetary.core.config_strict import build_config, check_known, check_value, expects_text, nearest
from planetary.core.config_toml import toml_document
from planetary.core.errors import UserError

log = logging.getLogger(__name__)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FabricConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "OuterConfig",
    "RunConfig",
    "SyncConfig",
    "Timings",
    "TrainConfig",
    "apply_overrides",
    "config_hash",
    "load_config",
    "to_toml",
]

EXPERIMENT_KEYS: Mapping[str, str] = {
    "model_path": "model.source",
    "data_path": "data.source",
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "train.batch_size",
    "block_size": "train.sequence_length",
    "tau": "train.inner_steps",
    "outer_loop_steps": "train.rounds",
    "nesterov_momentum": "outer.momentum",
    "wandb_project": "run.name",
}
"""Key of PCP's `experiment.json` -> the key here that means the same."""


def load_config(path: str | Path) -> Config:
    """Read a TOML configuration, or PCP's `experiment.json`.

    Raises:
        UserError: the file cannot be read or parsed, or a key in it is unknown, of the wrong type or out of
            range.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the configuration {path} is not UTF-8 text: {error}") from None
    origin = str(path)
    tables = _experiment_tables(text, origin) if path.suffix == ".json" else _toml_tables(text, origin)
    config = build_config(tables, origin)
    if not config.run.name:
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=path.stem))
    return _with_absolute_paths(config, path.resolve().parent)


def _toml_tables(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin} is not valid TOML: {error}") from None


def _experiment_tables(text: str, origin: str) -> dict[str, dict[str, Any]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected one JSON object with PCP's experiment keys, found {type(values).__name__}")
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key not in EXPERIMENT_KEYS:
            raise UserError(
                f"{origin}: unknown key {key}; did you mean {nearest(key, list(EXPERIMENT_KEYS))}? "
                f"Keys of experiment.json: {', '.join(EXPERIMENT_KEYS)}. Anything else needs TOML"
            )
        section, name = EXPERIMENT_KEYS[key].split(".")
        tables.setdefault(section, {})[name] = value
    # That format has no key for the warm-up, and its runs may be shorter than the default one.
    lengths = {"train": tables.get("train", {}), "optimizer": {"warmup_steps": 0}}
    total = build_config(lengths, origin).total_inner_steps
    tables.setdefault("optimizer", {})["warmup_steps"] = min(Config().optimizer.warmup_steps, total - 1)
    return tables


def _absolute(source: str, folder: Path) -> str:
    if "://" in source:
        return source
    return str(folder / Path(source).expanduser())


def _with_absolute_paths(config: Config, folder: Path) -> Config:
    model, data = config.model, config.data
    if _names_a_path(model.source):
        model = msgspec.structs.replace(model, source=_absolute(model.source, folder))
    if model.weights:
        model = msgspec.structs.replace(model, weights=_absolute(model.weights, folder))
    if data.source != "stdlib":
        data = msgspec.structs.replace(data, source=_absolute(data.source, folder))
    if data.tokenizer != "byte":
        data = msgspec.structs.replace(data, tokenizer=_absolute(data.tokenizer, folder))
    return msgspec.structs.replace(config, model=model, data=data)


def _names_a_path(source: str) -> bool:
    """Whether a model source is a path (or `path.py:function`) and not `module:function`."""
    return not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", source) or ".py:" in source


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return `config` with `section.key=value` settings on top, as strictly checked as a file.

    A value is written as in TOML. Where a key takes a string its quotes may be left out, and so they may in
    the free table `model.options` for a value that looks like a word or a path.

    Where the overrides make the run so short that its warm-up does not fit, and do not name the warm-up, it
    stays the same part of the run; a warning says so.

    Raises:
        UserError: an override is malformed, or its key or value is wrong.
    """
    tables = msgspec.to_builtins(config)
    overrides = list(overrides)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise UserError(f"--set {override}: expected section.key=value, e.g. --set train.rounds=3")
        section, key, *inner = parts
        origin = f"--set {override}"
        check_known(section, key, origin)
        if inner and not isinstance(tables[section][key], dict):
            raise UserError(f"{origin}: {section}.{key} is a single value, not a table")
        table = tables[section]
        for step in parts[1:-1]:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise UserError(f"{origin}: {step} is a single value, not a table")
        table[parts[-1]] = _override_value(text.strip(), expects_text(section, key), bool(inner), origin)
        check_value(section, key, tables[section][key], origin)
    if not any(override.split("=")[0].strip() == "optimizer.warmup_steps" for override in overrides):
        _fit_warmup(config, tables)
    return _with_absolute_paths(build_config(tables, "--set"), Path.cwd())


def _fit_warmup(before: Config, tables: dict[str, Any]) -> None:
    """Shorten the warm-up with a run that became shorter than it."""
    train, optimizer = tables["train"], tables["optimizer"]
    total, warmup = train["rounds"] * train["inner_steps"], before.optimizer.warmup_steps
    if total < before.total_inner_steps and warmup >= total:
        optimizer["warmup_steps"] = warmup * total // before.total_inner_steps
        log.warning(
            "the run has only %d inner steps now, so optimizer.warmup_steps is %d instead of %d: the same part of it",
            total,
            optimizer["warmup_steps"],
            warmup,
        )


def _override_value(text: str, wants_text: bool, free: bool, origin: str) -> object:
    quoted = text[:1] in {'"', "'"}
    if wants_text and not quoted:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if free and re.fullmatch(r"[A-Za-z_./~][\w./:~-]*", text):
            return text
        raise UserError(f"{origin}: {text!r} is no TOML value; strings need quotes: '\"{text}\"'") from None


def to_toml(config: Config) -> str:
    """Return every key of `config` as TOML; `load_config` of it gives an equal `Config`."""
    return toml_document(msgspec.to_builtins(config))


def config_hash(config: Config) -> str:
    """Return the sha256 (hex) of everything that decides the mathematics of a run.

    Two configurations with equal hashes train the same model on the same data in the same way, so a
    checkpoint of one may be resumed under the other. Left out are names, places, machines, time limits, how
    often something is written or measured, what only saves memory, and how long the run is: a finished run may
    be resumed with more rounds, and a cosine schedule is then stretched from there on. Of a local path only
    the last part counts, so that a folder may be moved; digests of the contents are kept in the checkpoint.
    """
    values = msgspec.to_builtins(config)
    kept: dict[str, Any] = {
        "seed": config.run.seed,
        "model": values["model"],
        "data": values["data"],
        "train": values["train"],
        "optimizer": values["optimizer"],
        "outer": values["outer"],
    }
    del kept["data"]["delivery"], kept["train"]["rounds"], kept["train"]["micro_batches"], kept["train"]["remat"]
    model, data = kept["model"], kept["data"]
    for table, key in ((model, "source"), (model, "weights"), (data, "source"), (data, "tokenizer")):
        if "://" not in table[key]:
            table[key] = re.split(r"[/\\]", table[key])[-1]
    if config.optimizer.schedule in {"constant", "inverse-sqrt"}:
        del kept["optimizer"]["final_fraction"]
    if config.sync.topology == "ring":  # its sums are rounded in another way
        kept["sync"] = {"topology": "ring", "precision": config.sync.precision}
        if config.sync.overlap != "none":
            kept["sync"]["overlap"] = config.sync.overlap
    if config.moe.composers:
        kept["moe"] = {key: value for key, value in values["moe"].items() if key not in {"store", "expert_workers"}}
        kept["moe"]["offload"] = config.moe.expert_workers > 0
        if config.moe.replicas == 1:
            del kept["moe"]["replicas"]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
