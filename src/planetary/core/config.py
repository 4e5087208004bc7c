"""Reading, overriding, writing and identifying a configuration.

`configuration.schema` lists the keys. A relative path in a file is relative to that file's folder; in an override it
is relative to the current folder. `run.dir`, where output goes, is always relative to the current folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.configuration.experiment import experiment_tables
from planetary.core.configuration.pretrained import is_pretrained, pretrained_tables
from planetary.core.configuration.ranges import show_found
from planetary.core.configuration.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FabricConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    OuterConfig,
    RlConfig,
    RunConfig,
    SyncConfig,
    Timings,
    TrainConfig,
)
from planetary.core.configuration.strict import (
    LISTS,
    SECTIONS,
    build_config,
    check_entries,
    check_known,
    check_value,
    expects_text,
    takes_table,
)
from planetary.core.configuration.toml import toml_document, toml_value
from planetary.core.errors import UserError

__all__ = [
    "BUILT_IN_TOKENIZERS",
    "FILE_KEYS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FabricConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "OuterConfig",
    "RlConfig",
    "RunConfig",
    "SyncConfig",
    "Timings",
    "TrainConfig",
    "apply_overrides",
    "config_from_tables",
    "config_hash",
    "is_function",
    "load_config",
    "overrides_between",
    "to_toml",
]

BUILT_IN_TOKENIZERS = ("byte", "char", "u16", "qwen")
"""Values of `data.tokenizer` that are no path."""
FILE_KEYS = ("model.source", "model.weights", "data.source", "data.tokenizer")
"""Keys whose files can be sent along with a configuration."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML configuration, or PCP's `experiment.json`, with `overrides` in place of its values.

    What is checked is the result, so that an override can repair a file. See `apply_overrides` for their form. With a
    compiled model the shape of the batch is the model's own (0) unless the file says one. A folder with a pretrained
    model is the model that it describes (see `configuration.pretrained`).

    Raises:
        UserError: the file cannot be read or parsed, an override is malformed, or a key is unknown, of the wrong type
            or out of range.
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
    origin, folder = str(path), path.resolve().parent
    is_experiment = path.suffix == ".json"
    tables = experiment_tables(text, origin, folder) if is_experiment else _toml_tables(text, origin)
    return _config_of(tables, overrides, origin=origin, folder=folder, name=path.stem)


def config_from_tables(tables: Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Return the configuration that `tables` describe, as strictly checked as a file: `{"train": {"rounds": 3}}`.

    Relative paths are relative to the current folder; a run without a name is called "run".

    Raises:
        UserError: as `load_config` raises it.
    """
    copied: dict[str, Any] = {
        section: dict(table) if isinstance(table, Mapping) else table for section, table in tables.items()
    }
    if isinstance(options := copied.get("model", {}), dict) and isinstance(options.get("options"), Mapping):
        options["options"] = dict(options["options"])  # an override may change it
    return _config_of(copied, overrides, origin="the configuration", folder=Path.cwd(), name="run")


def _config_of(tables: dict[str, Any], overrides: Iterable[str], *, origin: str, folder: Path, name: str) -> Config:
    _make_paths_absolute(tables, folder)
    _override(tables, overrides, origin)
    source = tables["model"].get("source") if isinstance(tables.get("model"), dict) else None
    if isinstance(source, str) and not is_function(source) and is_pretrained(Path(source)):
        tables = pretrained_tables(tables, Path(source))
    model, train = tables.get("model"), tables.setdefault("train", {})
    if isinstance(model, dict) and isinstance(train, dict):
        source = model.get("source")
        if isinstance(source, str) and not is_function(source):
            train.setdefault("batch_size", 0)
            train.setdefault("sequence_length", 0)
    config = build_config(tables, origin)
    if not config.run.name:
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    return config


def _toml_tables(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin} is not valid TOML: {error}") from None


def _make_paths_absolute(tables: Mapping[str, Any], folder: Path) -> None:
    """Complete every relative path among the values; what is no path, or not even text, stays as it is."""

    def complete_in(table: dict[str, Any], key: str, names: Callable[[str], bool]) -> None:
        value = table.get(key)
        if isinstance(value, str) and value and "://" not in value and names(value):
            table[key] = str(folder / Path(value).expanduser())

    def complete(section: str, key: str, names: Callable[[str], bool]) -> None:
        if isinstance(table := tables.get(section), dict):
            complete_in(table, key, names)

    data = tables.get("data")
    if isinstance(data, dict) and isinstance(sources := data.get("sources"), list):
        data["sources"] = [dict(one) if isinstance(one, Mapping) else one for one in sources]
        for one in data["sources"]:
            if isinstance(one, dict):
                complete_in(one, "source", lambda value: value != "stdlib")
    complete("model", "source", _names_a_path)
    complete("model", "weights", lambda value: True)
    for key in ("model", "keys", "chat_template"):
        complete("serve", key, lambda value: True)
    complete("federation", "token_file", lambda value: True)
    for key in ("prompts", "start", "teacher"):
        complete("rl", key, lambda value: True)
    complete("rl", "task", lambda value: ".py:" in value)
    complete("data", "source", lambda value: value != "stdlib")
    complete("data", "tokenizer", lambda value: value not in BUILT_IN_TOKENIZERS)


def is_function(source: str) -> bool:
    """Whether a model source names a function that builds the model, and not a compiled model."""
    return ":" in source and "://" not in source


def _names_a_path(source: str) -> bool:
    """Whether a model source is a path (or `path.py:function`) and not `module:function`."""
    return not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", source) or ".py:" in source


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return `config` with `section.key=value` settings on top, as strictly checked as a file.

    A value is written as in TOML. Where a key takes a string its quotes may be left out, and so they may in
    the free table `model.options` for a value that looks like a word or a path.

    Raises:
        UserError: an override is malformed, or its key or value is wrong.
    """
    tables = msgspec.to_builtins(config)
    _override(tables, overrides, "--set")
    return build_config(tables, "--set")


def _override(tables: dict[str, Any], overrides: Iterable[str], place: str) -> None:
    """Put `section.key=value` settings, and whole arrays of tables (`sinks=[…]`), into tables of `place`.

    Each is checked, but not whether they fit together.
    """
    for override in overrides:
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if equals and dotted.strip() in LISTS:
            origin = f"--set {dotted.strip()}"
            tables[parts[0]] = _override_value(text.strip(), False, False, origin)
            check_entries(parts[0], tables[parts[0]], origin)
            continue
        if not equals or len(parts) < 2 or not all(parts):
            raise UserError(f"--set {override}: expected section.key=value, e.g. --set train.rounds=3")
        section, key, *inner = parts
        origin = f"--set {override}"
        check_known(section, key, origin)
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"{place}: {section}: expected a section [{section}], found {show_found(table)}")
        if inner and not takes_table(section, key):
            raise UserError(f"{origin}: {section}.{key} is a single value, not a table")
        for step in parts[1:-1]:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise UserError(f"{origin}: {step} is a single value, not a table")
        table[parts[-1]] = _override_value(text.strip(), expects_text(section, key), bool(inner), origin)
        check_value(section, key, tables[section][key], origin)
        _make_paths_absolute(tables, Path.cwd())  # those of the file are complete already


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


def overrides_between(before: Config, after: Config) -> list[str]:
    """Return the `section.key=value` settings that make `before` `after`; see `apply_overrides`."""
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return [
        f"{section}.{key}={toml_value(value)}"
        for section in SECTIONS
        for key, value in new[section].items()
        if value != old[section][key]
    ] + [f"{name}={toml_value(new[name])}" for name in LISTS if new[name] != old[name]]


def to_toml(config: Config) -> str:
    """Return every key of `config` as TOML; `load_config` of it gives an equal `Config`."""
    tables = msgspec.to_builtins(config)
    for section, struct in SECTIONS.items():  # a section's own keys are those that are looked for first
        own = [key for key in struct.__annotations__ if key in tables[section]]
        tables[section] = {key: tables[section][key] for key in own} | tables[section]
    return toml_document(tables)


_RL_LEFT_OUT = {"goal", "judges", "judge_seconds", "judge_mb", "verified", "tolerance", "cache_mb", "held_out"}
"""Keys of `[rl]` that do not change what a run computes."""


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
    del (
        kept["data"]["delivery"],
        kept["data"]["max_epochs"],
        kept["train"]["rounds"],
        kept["train"]["target_minutes"],
        kept["model"]["smaller"],
        kept["train"]["micro_batches"],
        kept["train"]["remat"],
    )
    if config.data.sampling == "random":  # the keys' meaning before there were others
        del kept["data"]["sampling"]
    if config.data.sampling != "fifo" or not config.data.shuffle_leases:
        del kept["data"]["shuffle_leases"]
    if config.outer.weights == "tokens":
        del kept["outer"]["weights"]
    model, data = kept["model"], kept["data"]
    for table, key in ((model, "source"), (model, "weights"), (data, "source"), (data, "tokenizer")):
        if "://" not in table[key]:
            table[key] = re.split(r"[/\\]", table[key])[-1]
    if config.optimizer.schedule in {"constant", "inverse-sqrt"}:
        del kept["optimizer"]["final_fraction"]
    if config.sync.topology == "ring":  # its sums are rounded in another way
        kept["sync"] = {"topology": "ring", "precision": config.sync.precision}
        if config.sync.ring_compression != "none":
            kept["sync"]["ring_compression"] = config.sync.ring_compression
    if config.sync.overlap != "none":
        kept.setdefault("sync", {})["overlap"] = config.sync.overlap
    if config.sync.overlap == "streaming":
        kept["sync"] |= {key: values["sync"][key] for key in ("fragments", "delay", "mixing")}
    if config.fabric.leases != "equal":
        kept["leases"] = config.fabric.leases
    if config.federation.sites:
        kept["federation"] = {"every_rounds": config.federation.every_rounds, "parts": config.federation.parts}
    for key in ("compression", "broadcast_compression"):
        if (codec := getattr(config.sync, key)) != "none":
            kept.setdefault("sync", {})[key] = codec
    if config.moe.composers:
        kept["moe"] = {key: value for key, value in values["moe"].items() if key not in {"store", "expert_workers"}}
        kept["moe"]["offload"] = config.moe.expert_workers > 0
        if config.moe.replicas == 1:
            del kept["moe"]["replicas"]
    if config.rl.task:
        kept["rl"] = {key: value for key, value in values["rl"].items() if key not in _RL_LEFT_OUT}
        for key in ("task", "prompts", "start", "teacher"):
            kept["rl"][key] = re.split(r"[/\\]", kept["rl"][key])[-1]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
