"""From plain tables to a typed `Config`: nothing unknown, nothing of the wrong type, nothing out of range.

The rules come from the types in `schema`; this file only words the errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from planetary.core.bounded_text import toml_tables
from planetary.core.configuration.derived import with_fitting_warmup, with_outer_rule
from planetary.core.configuration.keys import FIELDS, LISTS, OF_ALL, SECTIONS, extension_keys, named_objects
from planetary.core.configuration.needs import check_needs
from planetary.core.configuration.ranges import (
    ExtensionPoint,
    convert_value,
    describe,
    extension_of,
    field_infos,
    field_types,
    show_found,
)
from planetary.core.configuration.removed_keys import REMOVED
from planetary.core.configuration.schema import ALIASES, Config
from planetary.core.configuration.sections import KindSection
from planetary.core.configuration.sinks import OwnSink
from planetary.core.errors import UserError, did_you_mean
from planetary.core.extension_points import EXTENSION_POINTS
from planetary.core.registry import Registry

log = logging.getLogger(__name__)


def _meant_key(section: str, key: str) -> str:
    """The same word in another section beats a similar one in this section."""
    elsewhere = [f"{name}.{key}" for name, fields in FIELDS.items() if key in fields]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return did_you_mean(key, list(FIELDS[section]), f"{section}.{{}}")


def check_known(section: str, key: str | None, origin: str) -> None:
    """Raise `UserError` unless `section` (and `key` in it, when given) exists; `origin` says where it was
    written.
    """
    if section in LISTS and key is None:
        return
    if section in LISTS:
        raise UserError(f'{origin}: {section} is an array of tables: {section} = [{{ kind = "…", … }}]')
    if section not in SECTIONS:
        homes = [f"[{name}] {section}" for name, fields in FIELDS.items() if section in fields]
        meant = f"; did you mean {homes[0]}?" if homes else did_you_mean(section, list(SECTIONS), "[{}]")
        raise UserError(f"{origin}: unknown section {section!r}{meant} Sections: {', '.join(SECTIONS)}")
    if (why := REMOVED.get(f"{section}.{key}")) is not None:
        raise UserError(f"{origin}: the key {section}.{key} was removed: {why}")
    if key is not None and key not in FIELDS[section]:
        raise UserError(
            f"{origin}: unknown key {section}.{key}{_meant_key(section, key)} "
            f"Keys of [{section}]: {', '.join(FIELDS[section])}"
        )


def expects_text(section: str, key: str) -> bool:
    """Whether the value of a known key is a string."""
    kind = FIELDS[section][key].type
    return isinstance(kind.type if isinstance(kind, inspect.Metadata) else kind, inspect.StrType | inspect.LiteralType)


def takes_table(section: str, key: str) -> bool:
    """Whether the value of a known key is a table."""
    return isinstance(FIELDS[section][key].type, inspect.DictType)


def check_value(section: str, key: str, value: object, origin: str) -> Any:
    """Return `value` as the type the known key takes, or raise `UserError` with the expected type or range."""
    kind = FIELDS[section][key].type
    wanted = field_types(SECTIONS[section])[key]
    if isinstance(value, str):
        value = ALIASES.get((section, key), {}).get(value, value)
    try:
        found = convert_value(value, wanted)
    except ValueError:  # msgspec's own error is one
        raise UserError(f"{origin}: {section}.{key}: expected {describe(kind)}, found {show_found(value)}") from None
    if (point := extension_of(kind)) is not None:
        _check_object(point, found, f"{origin}: {section}.{key}")
    return found


def _check_object(point: ExtensionPoint, name: str, where: str) -> None:
    """Raise `UserError` for a name no object has. A file is not run: a configuration is only read here."""
    registry = EXTENSION_POINTS[point.kind]
    try:
        registry.check_name(name, point.also)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if name in point.also or not point.having:
        return
    declared = registry.declared(name)
    if declared is not None and not getattr(declared, point.having):
        able = [one for one, kind in registry.built_in.items() if getattr(kind, point.having)]
        known = ", ".join(f'"{one}"' for one in (*point.also, *able))
        raise UserError(
            f'{where}: expected {known}, or another {registry.kind} that declares {point.having}, found "{name}"'
        )


def value_from_text(section: str, key: str, text: str, origin: str) -> Any:
    """Return the value of a known key a text stands for, as `--set` and flags have it; quotes may be left out.

    Raises:
        UserError: it is of another type, or out of range; `origin` is where it was written.
    """
    return check_value(section, key, text_value(text.strip(), expects_text(section, key), False, origin), origin)


def text_value(text: str, wants_text: bool, free: bool, origin: str) -> object:
    """Return the TOML value a text stands for; quotes may be left out if `wants_text`, of a word if `free`."""
    quoted = text[:1] in {'"', "'"}
    if wants_text and not quoted:
        return text
    try:
        return toml_tables(f"value = {text}", origin)["value"]
    except UserError:
        if free and re.fullmatch(r"[A-Za-z_./~][\w./:~-]*", text):
            return text
        raise UserError(f"{origin}: {text!r} is no TOML value; strings need quotes: '\"{text}\"'") from None


def check_entries(name: str, value: object, origin: str) -> tuple[Any, ...]:
    """Return an array of tables as the structs that their kinds name, or raise `UserError`."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{origin}: {name}: expected tables [[{name}]], found {show_found(value)}")
    return tuple(_check_entry(name, LISTS[name], entry, origin) for entry in value)


def _check_entry(name: str, registry: Registry[Any], entry: object, origin: str) -> msgspec.Struct:
    if not isinstance(entry, Mapping):
        raise UserError(f"{origin}: {name}: expected a table [[{name}]], found {show_found(entry)}")
    kind = entry.get("kind")
    if not isinstance(kind, str):
        found = "none" if kind is None else show_found(kind)
        raise UserError(f"{origin}: {name}: expected a kind, one of {', '.join(registry.names())}; found {found}")
    try:
        registry.check_name(kind)
    except UserError as error:
        raise UserError(f"{origin}: {name}: kind: {error}") from None
    values = {key: value for key, value in entry.items() if key != "kind"}
    declared = registry.declared(kind)
    checked = None if declared is None else check_table(name, kind, declared.options, values, origin)
    return checked if checked is not None and kind in registry.built_in else OwnSink(kind, values)


def check_table(
    name: str, kind: str, struct: type[msgspec.Struct], table: Mapping[str, object], origin: str
) -> msgspec.Struct:
    """Return a table of the array `name` as a struct, or raise `UserError` naming its kind and key."""
    values, fields = {}, field_infos(struct)
    for key, value in table.items():
        if key not in fields:
            raise UserError(
                f'{origin}: {name} of kind "{kind}": unknown key {key}{did_you_mean(key, list(fields))} '
                f"Its keys: {', '.join(fields)}"
            )
        wanted = field_types(struct)[key]
        try:
            values[key] = convert_value(value, wanted)
        except ValueError:  # msgspec's own error is one
            raise UserError(
                f'{origin}: {name} of kind "{kind}": {key}: expected {describe(fields[key].type)}, '
                f"found {show_found(value)}"
            ) from None
    if missing := [key for key, field in fields.items() if field.required and key not in values]:
        raise UserError(f'{origin}: {name} of kind "{kind}": {missing[0]} has to be given')
    return struct(**values)


def build_config(tables: Mapping[str, object], origin: str) -> Config:
    """Turn plain tables into a `Config`; absent keys get their defaults, and the warm-up is fitted to the run.

    Args:
        tables: section -> key -> value, as `tomllib` returns it.
        origin: where the values were written (a file's name, `"--set"`), for error texts.

    Raises:
        UserError: naming the first key that is unknown (and the nearest known one), of the wrong type, out of
            range, or in contradiction with another.
    """
    sections: dict[str, Any] = {}
    kinds: dict[str, KindSection] = {}
    for section, table in tables.items():
        check_known(section, None, origin)
        if section in LISTS:
            sections[section] = check_entries(section, table, origin)
            continue
        if not isinstance(table, Mapping):
            raise UserError(f"{origin}: {section}: expected a section [{section}], found {show_found(table)}")
        values = {}
        for key, value in table.items():
            check_known(section, key, origin)
            values[key] = check_value(section, key, value, origin)
        made = SECTIONS[section](**values)
        if not isinstance(made, KindSection):
            sections[section] = made
        elif made != type(made)():
            kinds[section] = made
    config = with_outer_rule(Config(**sections, kinds=kinds), tables.get("outer", {}))
    _check_together(config, origin)
    return with_fitting_warmup(config, config.total_inner_steps)


def _check_together(config: Config, origin: str) -> None:
    """Check the rules that involve several keys: within a section, of what the parts need of each other, and ranges."""
    for part in (*(getattr(config, name) for name in OF_ALL), *config.kinds.values(), *config.sinks):
        if objection := getattr(part, "objection", ""):
            raise UserError(f"{origin}: {objection}")
    for key, point, name in named_objects(config):
        if key not in FIELDS[key.partition(".")[0]]:
            _check_object(point, name, f"{origin}: {key}")
    check_needs(config, origin, extension_keys(config.kinds))
