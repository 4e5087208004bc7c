"""Reading, overriding, writing and identifying a configuration.

`configuration.schema` lists the keys. A relative path in a file is relative to that file's folder; in an override it
is relative to the current folder. `run.dir`, where output goes, is always relative to the current folder.

PCP's `experiment.json` is read, too, by the key here for each of its keys. The format is that of PCP's own files
(github.com/deltawave-tech/pcp: `experiments/*.json`, `ExperimentConfig`), in both shapes: all keys side by side, or
grouped into blocks. A key without counterpart is named in a warning with the reason; nothing is dropped in silence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.bounded_text import json_value, toml_tables
from planetary.core.configuration.pcp_files import (
    is_reward_file,
    is_serving_file,
    refuse_gateway_file,
    reward_tables,
    serving_tables,
)
from planetary.core.configuration.pretrained import is_pretrained, pretrained_tables
from planetary.core.configuration.ranges import MOST_NAME, show_found
from planetary.core.configuration.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FabricConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    Timings,
    TrainConfig,
)
from planetary.core.configuration.sections import section_names, section_struct
from planetary.core.configuration.strict import (
    LISTS,
    SECTIONS,
    build_config,
    check_entries,
    check_known,
    check_value,
    expects_text,
    extension_keys,
    takes_table,
    text_value,
)
from planetary.core.configuration.toml import toml_document, toml_value
from planetary.core.errors import UserError, did_you_mean
from planetary.core.printable import command_line
from planetary.core.registry import file_of

log = logging.getLogger(__name__)

EXPERIMENT_KEYS: Mapping[str, str] = {
    "model_path": "model.source",
    "data_path": "data.source",
    "tokenizer": "data.tokenizer",
    "sampling": "data.sampling",
    "chunk_shuffle": "data.shuffle_leases",
    "max_epochs": "data.max_epochs",
    "learning_rate": "optimizer.learning_rate",
    "dtype": "train.precision",
    "batch_size": "train.batch_size",
    "effective_batch_size": "train.batch_size",
    "block_size": "train.sequence_length",
    "tau": "train.inner_steps",
    "outer_loop_steps": "train.rounds",
    "nesterov_momentum": "outer.momentum",
    "outer_learning_rate": "outer.learning_rate",
    "seed": "run.seed",
    "wandb_run_name": "run.name",
}
"""Key of PCP's `experiment.json` -> the key here that means the same."""

DEFAULTS: Mapping[str, Any] = {
    "tokenizer": "char",
    "chunk_shuffle": True,
    "max_epochs": 10,
    "learning_rate": 0.001,
    "tau": 10,
    "outer_loop_steps": 100,
    "nesterov_momentum": 0.9,
}
"""PCP's default of a key, where the default here is another."""

FIXED: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {
        "schedule": "constant",
        "warmup_steps": 0,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "decay_min_rank": 0,
    },
}
"""Fixed behaviour of PCP, without a key, that is not the default here: AdamW at a constant rate, which decays
every parameter (`src/optimizers/adam_mlir.zig`). `--set` changes it."""

BLOCKS: Mapping[str, Mapping[str, str]] = {
    "artifacts": {},
    "dataset": {"path": "data_path"},
    "distributed": {"local_steps_per_round": "tau", "outer_momentum": "nesterov_momentum"},
    "decoupled_diloco": {},
    "outputs": {},
}
"""Block of the grouped shape -> keys with another name in the flat shape."""

_LEASES = "a lease is always the sequences of one round of one worker (tau × batch_size); PCP calls that diloco_slices"
_NO_PROJECT = "without wandb_project nothing is sent to wandb"
_DECOUPLED = "training is plain DiLoCo, without fragments that are merged at different times"

WANDB_KEYS: Mapping[str, str] = {"wandb_project": "project", "wandb_entity": "entity"}
"""Key of PCP's `experiment.json` -> key of the sink for `wandb_project`."""

NO_EFFECT: Mapping[str, str] = {
    "chunk_manifest_path": "leases are cut from the whole data file; to train on a part of it, give it as a file",
    "chunk_size": _LEASES,
    "chunk_size_bytes": _LEASES,
    "chunk_size_mode": _LEASES,
    "checkpoint_dir": "checkpoints are kept in the run's folder, runs/NAME/checkpoints",
    "should_resume": "a run is resumed with: planetary train --resume runs/NAME",
    "use_in_graph_accumulation": "a batch is split in the graph wherever train.micro_batches is above 1",
    "aggregation_strategy": _DECOUPLED,
    "num_fragments": _DECOUPLED,
    "sync_interval_h": _DECOUPLED,
    "overlap_tau": _DECOUPLED,
    "min_quorum": _DECOUPLED,
    "grace_window_ms": _DECOUPLED,
    "grace_gamma": _DECOUPLED,
    "max_grace_steps": _DECOUPLED,
    "adaptive_grace_enabled": _DECOUPLED,
    "merge_strategy": _DECOUPLED,
    "fragment_strategy": _DECOUPLED,
    "learner_alpha": _DECOUPLED,
    "outer_gradient_compression": _DECOUPLED,
    "max_recovery_syncer_steps": _DECOUPLED,
    "embedding_tensor_indices": _DECOUPLED,
}
"""Key that nothing here corresponds to -> why."""

SAME_HERE: Mapping[str, Any] = {
    "chunk_size_mode": "diloco_slices",
    "should_resume": False,
    "use_in_graph_accumulation": True,
    "aggregation_strategy": "diloco",
    "outer_gradient_compression": "none",
}
"""Value of a key in `NO_EFFECT` that equals the behaviour here, and needs no warning."""

_NOT_PRETRAINING = (
    "it belongs to reinforcement learning or inference; `planetary train` trains on the tokens of data_path"
)
REFUSED: Mapping[str, str] = {
    "wandb_api_key": (
        "a key in a file is copied, committed and logged with it. Remove it and set the environment variable "
        "WANDB_API_KEY instead"
    ),
    **dict.fromkeys(("rollout_config", "training_model_path", "weights_path"), _NOT_PRETRAINING),
}
"""Key that is an error when it has a value -> why."""


def experiment_tables(text: str, origin: str, folder: Path) -> dict[str, Any]:
    """Return the tables an `experiment.json` stands for; `null` and an empty string count as an absent key.

    Warns once of the keys without effect. A path is taken from `folder` or, as PCP takes it, from the current folder:
    whichever has the file.

    Raises:
        UserError: the text is no JSON object, or a key in it is unknown or refused.
    """
    values = json_value(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected one JSON object with PCP's experiment keys, found {type(values).__name__}")
    refuse_gateway_file(values, origin)
    for is_such, tables_of in ((is_reward_file, reward_tables), (is_serving_file, serving_tables)):
        if is_such(values):
            return tables_of(values, origin, lambda path: _found(path, folder))
    given = {key: value for key, value in _flat(values, origin).items() if value not in (None, "", {})}
    for key in given:
        _check_key(key, origin)
    _warn(given, origin)
    return _tables({**_defaults(given), **given}, folder)


def _flat(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key not in BLOCKS:
            flat[key] = value
            continue
        if not isinstance(value, dict):
            raise UserError(f"{origin}: {key}: expected a JSON object, found {type(value).__name__}")
        flat |= {BLOCKS[key].get(name, name): inner for name, inner in value.items()}
    return flat


def _check_key(key: str, origin: str) -> None:
    if key in REFUSED:
        raise UserError(f"{origin}: {key}: {REFUSED[key]}")
    known = [*EXPERIMENT_KEYS, *WANDB_KEYS, *NO_EFFECT]
    if key not in known:
        raise UserError(
            f"{origin}: unknown key {key}{did_you_mean(key, known)} "
            f"Keys of experiment.json: {', '.join([*EXPERIMENT_KEYS, *WANDB_KEYS])}. Anything else needs TOML"
        )


def _warn(given: Mapping[str, Any], origin: str) -> None:
    reasons: dict[str, list[str]] = {}
    for key, value in given.items():
        if key in NO_EFFECT and not (key in SAME_HERE and value == SAME_HERE[key]):
            reasons.setdefault(NO_EFFECT[key], []).append(key)
    if "chunk_shuffle" in given and given.get("sampling", "random") != "fifo":
        why = 'it orders the chunks of sampling = "fifo"; sequences are drawn from the whole file otherwise'
        reasons.setdefault(why, []).append("chunk_shuffle")
    if "wandb_entity" in given and "wandb_project" not in given:
        reasons.setdefault(_NO_PROJECT, []).append("wandb_entity")
    for reason, keys in reasons.items():
        log.warning("%s: %s: no effect: %s", origin, ", ".join(keys), reason)


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = dict(DEFAULTS)
    if given.get("sampling") != "fifo":
        del defaults["chunk_shuffle"]
    if re.search(r"\.u\d+$", str(given.get("data_path", ""))):
        del defaults["tokenizer"]  # the file holds tokens already
    return defaults


def _tables(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = {section: dict(fixed) for section, fixed in FIXED.items()}
    for key, dotted in EXPERIMENT_KEYS.items():  # in this order: an effective batch is the one that counts
        if key not in values:
            continue
        value = values[key]
        if key in {"model_path", "data_path"} and isinstance(value, str):
            value = _found(value, folder)
        if key == "wandb_run_name" and isinstance(value, str):
            value = re.sub(r"[\\/]+", "-", value)  # it names a folder here
        section, name = dotted.split(".")
        tables.setdefault(section, {})[name] = value
    if "wandb_project" in values:
        sink = {name: values[key] for key, name in WANDB_KEYS.items() if key in values}
        tables["sinks"] = [{"kind": "wandb", **sink}]
    return tables


def _found(path: str, folder: Path) -> str:
    """Return a path that holds from `folder` and is left as it is when neither place has the file."""
    if "://" not in path and not (folder / path).exists() and Path(path).exists():
        return str(Path(path).absolute())
    return path


__all__ = [
    "BUILT_IN_TOKENIZERS",
    "FILE_KEYS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FabricConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OuterConfig",
    "RunConfig",
    "SyncConfig",
    "Timings",
    "TrainConfig",
    "apply_overrides",
    "config_from_tables",
    "config_hash",
    "is_function",
    "load_config",
    "mathematical_changes",
    "overrides_between",
    "to_toml",
]

MOST_PATH = 4096  # characters; no system takes more
BUILT_IN_TOKENIZERS = ("byte", "char", "u16", "qwen")
"""Values of `data.tokenizer` that are no path."""
FILE_KEYS = ("model.source", "model.weights", "data.source", "data.tokenizer")
"""Keys whose files can be sent along with a configuration."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML configuration, or PCP's `experiment.json`, with `overrides` in place of values.

    Checks apply to the result, so an override can repair a file. See `apply_overrides` for their form. With a compiled
    model the shape of the batch is the model's own (0) unless the file says one. A folder with a pretrained model is
    the model it describes (see `configuration.pretrained`).

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
    tables = experiment_tables(text, origin, folder) if is_experiment else toml_tables(text, origin)
    refuse_gateway_file(tables, origin)
    of_rewards = is_experiment and "objective" in tables.get("rl", {})
    config = _config_of(tables, overrides, origin=origin, folder=folder, name=path.stem)
    if of_rewards and not config.tables().get("rl", {}).get("task"):
        again = command_line("rl", path, "--set", "rl.task=FILE.py:FUNCTION")
        raise UserError(
            f"{origin} is PCP's file of reinforcement learning, whose reward is in PCP's code: name a reward. It is "
            f"taken by: {again}"
        )
    return config


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


def _make_paths_absolute(tables: Mapping[str, Any], folder: Path) -> None:
    """Complete every relative path among the values; other values, text or not, stay as they are."""

    def complete_in(table: dict[str, Any], key: str, names: Callable[[str], bool]) -> None:
        value = table.get(key)
        if isinstance(value, str) and value and "://" not in value and names(value):
            if max(len(part) for part in os.fsencode(value).split(b"/")) > MOST_NAME or len(value) > MOST_PATH:
                raise UserError(f"{key}: expected a path, found a text of {len(value)} characters: {value[:40]!r}…")
            table[key] = str(folder / _expanded(key, value))

    def complete(section: str, key: str, names: Callable[[str], bool]) -> None:
        if isinstance(table := tables.get(section), dict):
            complete_in(table, key, names)

    data = tables.get("data")
    if isinstance(data, dict) and isinstance(sources := data.get("sources"), list):
        data["sources"] = [dict(one) if isinstance(one, Mapping) else one for one in sources]
        for one in data["sources"]:
            if isinstance(one, dict):
                complete_in(one, "source", lambda value: value != "stdlib")
                complete_in(one, "format", lambda value: file_of(value) is not None)
    complete("model", "source", _names_a_path)
    complete("model", "weights", lambda value: True)
    for name in section_names():
        if name in tables:
            kind = section_struct(name)
            for key in kind.paths:
                complete(name, key, lambda value: True)
    for section, key in extension_keys(name for name in section_names() if name in tables):
        complete(section, key, lambda value: file_of(value) is not None)
    if isinstance(sinks := tables.get("sinks"), list):
        for one in (one for one in sinks if isinstance(one, dict)):
            complete_in(one, "kind", lambda value: file_of(value) is not None)
    complete("data", "source", lambda value: value != "stdlib")
    complete("data", "tokenizer", lambda value: value not in BUILT_IN_TOKENIZERS)


def _expanded(key: str, value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise UserError(
            f"{key}: {value[:80]!r} begins with ~, and this user has no home: write the whole path"
        ) from None


def is_function(source: str) -> bool:
    """Whether a model source names a function that builds the model, and not a compiled model."""
    return ":" in source and "://" not in source


def _names_a_path(source: str) -> bool:
    """Whether a model source is a path (or `path.py:function`) and not `module:function`."""
    return not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", source) or ".py:" in source


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return `config` with `section.key=value` settings on top, as strictly checked as a file.

    A value is written as in TOML. Quotes may be left out for a string key, and in the free table `model.options` for a
    word or a path.

    Raises:
        UserError: an override is malformed, or key or value is wrong.
    """
    tables = config.tables()
    _override(tables, overrides, "--set")
    return build_config(tables, "--set")


def _override(tables: dict[str, Any], overrides: Iterable[str], place: str) -> None:
    """Put `section.key=value` settings, and whole arrays of tables (`sinks=[…]`), into tables of `place`.

    `section={}` leaves out what they have of a section.

    Each is checked, but not whether they fit together.
    """
    for override in overrides:
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if equals and dotted.strip() in LISTS:
            origin = f"setting {dotted.strip()}"
            tables[parts[0]] = text_value(text.strip(), False, False, origin)
            check_entries(parts[0], tables[parts[0]], origin)
            continue
        if equals and dotted.strip() in SECTIONS:
            if text.strip() != "{}":
                raise UserError(
                    f"setting {override}: expected {dotted.strip()}={{}}, which leaves the section out, or "
                    f"{dotted.strip()}.KEY=VALUE"
                )
            tables.pop(dotted.strip(), None)
            continue
        if not equals or len(parts) < 2 or not all(parts):
            raise UserError(f"setting {override}: expected section.key=value, e.g. --set train.rounds=3")
        section, key, *inner = parts
        origin = f"setting {override}"
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
        table[parts[-1]] = text_value(text.strip(), expects_text(section, key), bool(inner), origin)
        check_value(section, key, tables[section][key], origin)
        _make_paths_absolute(tables, Path.cwd())  # those of the file are complete already


def overrides_between(before: Config, after: Config) -> list[str]:
    """Return the `section.key=value` settings that make `before` `after`; see `apply_overrides`."""
    old, new = (_with_defaults(config.tables(), (before, after)) for config in (before, after))
    return [
        f"{section}.{key}={toml_value(value)}"
        for section in SECTIONS
        if section in new
        for key, value in new[section].items()
        if value != old[section][key]
    ] + [f"{name}={toml_value(new[name])}" for name in LISTS if new[name] != old[name]]


def _with_defaults(tables: dict[str, Any], configs: Iterable[Config]) -> dict[str, Any]:
    """Return tables with those of every kind's section that one of the configurations has."""
    return {name: msgspec.to_builtins(SECTIONS[name]()) for config in configs for name in config.kinds} | tables


def to_toml(config: Config) -> str:
    """Return every key of `config` as TOML; `load_config` of it gives an equal `Config`.

    A section of a kind of run is there where a key of it has another value than its default.
    """
    tables = config.tables()
    for section in (name for name in SECTIONS if name in tables):
        struct = SECTIONS[section]  # a section's own keys are those that are looked for first
        own = [key for key in struct.__annotations__ if key in tables[section]]
        tables[section] = {key: tables[section][key] for key in own} | tables[section]
    return toml_document(tables)


def config_hash(config: Config) -> str:
    """Return the sha256 (hex) of everything that decides the mathematics of a run.

    Two configurations with equal hashes train the same model on the same data in the same way, so a checkpoint of one
    may be resumed under the other. Left out are names, places, machines, time limits, how often something is written or
    measured, options that only save memory, and how long the run is: a finished run may be resumed with more rounds,
    and a cosine schedule is then stretched from there on. Of a local path only the last part counts, so a folder may be
    moved; digests of the contents are kept in the checkpoint.
    """
    text = json.dumps(_mathematics(config), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def mathematical_changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Return key, old and new value of all that makes the `config_hash` of two configurations differ."""
    old, new = (_flat_keys(_mathematics(config)) for config in (before, after))
    return [(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def _flat_keys(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        named = {"seed": "run.seed", "leases": "fabric.leases"}.get(key, key) if not prefix else f"{prefix}.{key}"
        flat |= _flat_keys(value, named) if isinstance(value, Mapping) else {named: value}
    return flat


def _mathematics(config: Config) -> dict[str, Any]:
    """Return the keys that `config_hash` is of."""
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
    for one in (kept["data"], *kept["data"]["sources"]):
        if not one["format"]:  # decided by the files, as before there was this key
            del one["format"]
        else:
            one["format"] = re.split(r"[/\\]", one["format"])[-1]
    if config.outer.weights == "tokens":
        del kept["outer"]["weights"]
    if config.outer.optimizer == "nesterov":
        for key in ("optimizer", "beta2", "epsilon"):
            del kept["outer"][key]
    model, data = kept["model"], kept["data"]
    for table, key in ((model, "source"), (model, "weights"), (data, "source"), (data, "tokenizer")):
        if "://" not in table[key]:
            table[key] = re.split(r"[/\\]", table[key])[-1]
    if config.sync.topology == "ring":  # the ring's sums are rounded in another way
        kept["sync"] = {"topology": "ring", "precision": config.sync.precision}
        if config.sync.ring_compression != "none":
            kept["sync"]["ring_compression"] = config.sync.ring_compression
    if config.sync.overlap != "none":
        kept.setdefault("sync", {})["overlap"] = config.sync.overlap
    if config.sync.overlap in ("streaming", "decoupled"):
        kept["sync"] |= {key: values["sync"][key] for key in ("fragments", "delay", "mixing")}
    elif file_of(config.sync.overlap) is not None:
        kept["sync"] |= {key: values["sync"][key] for key in ("fragments", "delay", "mixing", "grace_factor")}
    if config.fabric.leases != "equal":
        kept["leases"] = config.fabric.leases
    for key in ("compression", "broadcast_compression", "start_compression"):
        if (codec := getattr(config.sync, key)) != "none":
            kept.setdefault("sync", {})[key] = codec
    for name, kind in config.kinds.items():
        if mathematics := kind.mathematics():
            kept[name] = mathematics
    for section, key in extension_keys(config.kinds):  # file name without folders; a resume compares the text
        if key in kept.get(section, {}):
            kept[section][key] = re.split(r"[/\\]", kept[section][key])[-1]
    return kept
