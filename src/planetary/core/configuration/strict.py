"""From plain tables to a typed `Config`: nothing unknown, nothing of the wrong type, nothing out of range.

The rules come from the types in `schema`; this file only words the errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from planetary.core.bounded_text import toml_tables
from planetary.core.configuration.needs import check_needs
from planetary.core.configuration.outer_rule import FEW_OUTER_STEPS, RULE_KEYS, chosen_rule
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
from planetary.core.configuration.schema import ALIASES, Config, OuterConfig
from planetary.core.configuration.sections import KindSection, section_names, section_struct
from planetary.core.configuration.sinks import OwnSink
from planetary.core.errors import UserError, did_you_mean
from planetary.core.extension_points import EXTENSION_POINTS, OUTER_OPTIMIZERS, SINKS
from planetary.core.registry import PinnedFile, Registry, file_of, files_of

log = logging.getLogger(__name__)


def _section_type(section: inspect.Field) -> type[msgspec.Struct]:
    assert isinstance(section.type, inspect.StructType)
    return section.type.cls


WARMUP_SHARE = 5
"""A warm-up too long for the run becomes one part in so many of the run."""

_OF_ALL: Mapping[str, type[msgspec.Struct]] = {
    name: _section_type(field)
    for name, field in field_infos(Config).items()
    if isinstance(field.type, inspect.StructType)
}


class _Sections(Mapping[str, type[msgspec.Struct]]):
    """Those of every kind of run, and those of one kind, whose modules are imported when they are looked up."""

    def __getitem__(self, name: str) -> type[msgspec.Struct]:
        return _OF_ALL[name] if name in _OF_ALL else section_struct(name)

    def __iter__(self) -> Iterator[str]:
        yield from (*_OF_ALL, *section_names())

    def __len__(self) -> int:
        return len(_OF_ALL) + len(section_names())

    def __contains__(self, name: object) -> bool:
        return name in _OF_ALL or name in section_names()


class _Fields(Mapping[str, Mapping[str, inspect.Field]]):
    def __getitem__(self, name: str) -> Mapping[str, inspect.Field]:
        return field_infos(SECTIONS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(SECTIONS)

    def __len__(self) -> int:
        return len(SECTIONS)


SECTIONS: Mapping[str, type[msgspec.Struct]] = _Sections()
"""Section name -> its type; sections of one kind of run come last."""


LISTS: Mapping[str, Registry[Any]] = {"sinks": SINKS}
"""Name of an array of tables -> the objects that their kinds name; each class has the table's type, `options`."""

FIELDS: Mapping[str, Mapping[str, inspect.Field]] = _Fields()
"""Section name -> key -> type and default of the key."""


def extension_keys(sections: Iterable[str]) -> dict[tuple[str, str], ExtensionPoint]:
    """Return section and key -> the kind of object the key names; `sections`: of kinds of run, beside those of all."""
    return {
        (section, key): point
        for section in (*_OF_ALL, *sections)
        for key, field in FIELDS[section].items()
        if (point := extension_of(field.type)) is not None
    }


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
    config = _with_outer_rule(Config(**sections, kinds=kinds), tables.get("outer", {}))
    _check_together(config, origin)
    return with_fitting_warmup(config, config.total_inner_steps)


def _check_together(config: Config, origin: str) -> None:
    """Check the rules that involve several keys: within a section, of what the parts need of each other, and ranges."""
    for part in (*(getattr(config, name) for name in _OF_ALL), *config.kinds.values(), *config.sinks):
        if objection := getattr(part, "objection", ""):
            raise UserError(f"{origin}: {objection}")
    for key, point, name in named_objects(config):
        if key not in FIELDS[key.partition(".")[0]]:
            _check_object(point, name, f"{origin}: {key}")
    check_needs(config, origin, extension_keys(config.kinds))


def named_objects(config: Config) -> Iterator[tuple[str, ExtensionPoint, str]]:
    """Yield the key, the kind of object and the name of every object that a configuration names."""
    for (section, key), point in extension_keys(config.kinds).items():
        yield f"{section}.{key}", point, getattr(config.section(section), key)
    point = extension_keys(())["data", "format"]
    for at, one in enumerate(config.data.sources):
        yield f"data.sources[{at}].format", point, one.format
    for at, name in enumerate(config.eval.metrics):
        yield f"eval.metrics[{at}]", ExtensionPoint("metric"), name


def own_files(config: Config, origin: str) -> tuple[PinnedFile, ...]:
    """Return the user's files that a run uses. They are run, and what they declare is checked with the rest.

    Raises:
        UserError: a file cannot be loaded, or its class does not go with the rest of the configuration.
    """
    pinned = []
    for key, point, name in named_objects(config):
        if file_of(name) is None:
            continue
        registry = EXTENSION_POINTS[point.kind]
        pinned.append(registry.pin(name))
        if registry.apart:
            continue
        if point.having and not getattr(registry.find(name), point.having):
            raise UserError(f"{origin}: {key} = {name}: expected a {point.kind} that declares {point.having}")
    check_needs(config, origin, extension_keys(config.kinds), own=bool(pinned))
    return files_of(pinned)


def chosen_values(config: Config) -> dict[str, Any]:
    """Return the keys whose absent values were derived from others: "section.key" -> the value that reading gave it."""
    outer = _with_outer_rule(msgspec.structs.replace(config, outer=OuterConfig()), {}).outer
    chosen = {f"outer.{key}": getattr(outer, key) for key in RULE_KEYS}
    chosen["optimizer.warmup_steps"] = config.total_inner_steps // WARMUP_SHARE
    if ":" not in config.model.source:  # a compiled model has its own shape
        chosen |= {"train.batch_size": 0, "train.sequence_length": 0}
    return chosen


def _with_outer_rule(config: Config, given: object) -> Config:
    """Return `config` with the outer step for the run's length, unless the given table `[outer]` fixes one."""
    summed_ends = config.sync.precision != "f32"  # only of a ring
    replace, keys = msgspec.structs.replace, given.keys() if isinstance(given, Mapping) else set()
    steps_itself = any(section.steps_itself for section in config.kinds.values())
    rounds = config.train.rounds // config.sync.fragments
    if config.outer.optimizer != OuterConfig().optimizer:
        declared = OUTER_OPTIMIZERS.declared(config.outer.optimizer)
        chosen = {} if declared is None else declared.defaults(rounds < FEW_OUTER_STEPS)
        return replace(
            config, outer=replace(config.outer, **{key: one for key, one in chosen.items() if key not in keys})
        )
    if steps_itself:
        chosen = {key: value for key, value in chosen_rule(0).items() if key not in keys}
        return replace(config, outer=replace(config.outer, **chosen))
    if RULE_KEYS & keys or summed_ends or config.sync.overlap == "async":
        return config
    chosen = chosen_rule(rounds)
    if chosen and config.sync.overlap == "eager":  # a worker's own part of a mean is known, of a mean direction not
        chosen["merge"] = "mean"
    return replace(config, outer=replace(config.outer, **chosen))


def with_fitting_warmup(config: Config, total: int) -> Config:
    """Return `config` with a shorter warm-up where the run, of `total` inner steps, would end within it; warns."""
    warmup = config.optimizer.warmup_steps
    if warmup < total:
        return config
    fitting = total // WARMUP_SHARE
    log.warning(
        "optimizer.warmup_steps: %d instead of %d, because the run has only %d inner steps and the learning rate would "
        "never reach its peak",
        fitting,
        warmup,
        total,
    )
    replace = msgspec.structs.replace
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=fitting))
