"""Reading and overriding a configuration.

`configuration.schema` lists the keys. A relative path in a file is relative to that file's folder; in an override it
is relative to the current folder. `run.dir`, where output goes, is always relative to the current folder.

PCP's files are read, too, by `planetary.compat.pcp`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.bounded_text import toml_tables
from planetary.core.configuration.adapter_folder import adapter_tables
from planetary.core.configuration.keys import LISTS, SECTIONS, extension_keys
from planetary.core.configuration.pretrained import is_pretrained, pretrained_tables
from planetary.core.configuration.ranges import MOST_NAME, show_found
from planetary.core.configuration.schema import BUILT_IN_TOKENIZERS, Config, is_function
from planetary.core.configuration.sections import section_names, section_struct
from planetary.core.configuration.strict import (
    build_config,
    check_entries,
    check_known,
    check_value,
    expects_text,
    takes_table,
    text_value,
)
from planetary.core.configuration.toml import toml_value
from planetary.core.configuration.weight_file import pretrained_folder
from planetary.core.errors import UserError
from planetary.core.printable import command_line
from planetary.core.registry import file_of

log = logging.getLogger(__name__)

OTHER_FORMATS: Mapping[str, str] = {".json": "planetary.compat.pcp.run_files:run_tables"}
"""Ending of a configuration file that is no TOML -> "module:function", which turns the text into tables."""
MOST_PATH = 4096  # characters; no system takes more


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
    if path.suffix in OTHER_FORMATS:
        module, _, function = OTHER_FORMATS[path.suffix].partition(":")
        tables = getattr(importlib.import_module(module), function)(text, path, overrides := list(overrides))
    else:
        tables = toml_tables(text, origin)
    refuse_gateway_file(tables, origin)
    return _config_of(tables, overrides, origin=origin, folder=folder, name=path.stem)


def is_gateway_file(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of a gateway with controllers."""
    return "gateway_id" in tables or "controllers" in tables


def refuse_gateway_file(tables: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for the tables of a gateway, which are no configuration of a run."""
    if is_gateway_file(tables):
        command = command_line("gateway", "--gateway-config", origin)
        raise UserError(f"{origin} is the file of a gateway with controllers, and of no run. It is taken by: {command}")


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
    if isinstance(source, str) and not is_function(source) and is_pretrained(folder := pretrained_folder(Path(source))):
        tables = pretrained_tables(tables, folder, source)
    elif isinstance(tables.get("model"), dict) and isinstance(weights := tables["model"].get("weights"), str):
        pretrained_folder(Path(weights))  # the tokenizer of a run that goes on is in the cache
    adapter = tables.get("adapter")
    if isinstance(adapter, dict) and isinstance(start := adapter.get("start"), str) and start:
        tables = adapter_tables(tables, Path(start))
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
    measures = tables.get("eval")
    if isinstance(measures, dict) and isinstance(sets := measures.get("sets"), Mapping):
        measures["sets"] = dict(sets)
        for name in sets:
            complete_in(measures["sets"], name, lambda value: value != "stdlib")
    if isinstance(measures, dict) and isinstance(names := measures.get("metrics"), list):
        own = [{"metric": name} for name in names]
        for one in own:
            complete_in(one, "metric", lambda value: file_of(value) is not None)
        measures["metrics"] = [one["metric"] for one in own]
    complete("model", "source", _names_a_path)
    complete("model", "weights", lambda value: True)
    complete("adapter", "start", lambda value: True)
    for name in section_names():
        if name in tables:
            kind = section_struct(name)
            for key in kind.paths:
                complete(name, key, lambda value: True)
                if isinstance(table := tables[name], dict) and isinstance(named := table.get(key), Mapping):
                    table[key] = dict(named)
                    for entry in named:
                        complete_in(table[key], entry, lambda value: True)
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
