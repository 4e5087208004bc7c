"""Sections, keys and named objects of a configuration.

The caller that asks for a section of one kind of run imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from planetary.core.configuration.ranges import ExtensionPoint, extension_of, field_infos
from planetary.core.configuration.schema import Config
from planetary.core.configuration.sections import section_names, section_struct
from planetary.core.extension_points import SINKS
from planetary.core.registry import Registry


def _section_type(section: inspect.Field) -> type[msgspec.Struct]:
    assert isinstance(section.type, inspect.StructType)
    return section.type.cls


OF_ALL: Mapping[str, type[msgspec.Struct]] = {
    name: _section_type(field)
    for name, field in field_infos(Config).items()
    if isinstance(field.type, inspect.StructType)
}


class _Sections(Mapping[str, type[msgspec.Struct]]):
    """Those of every kind of run, and those of one kind, whose modules are imported when they are looked up."""

    def __getitem__(self, name: str) -> type[msgspec.Struct]:
        return OF_ALL[name] if name in OF_ALL else section_struct(name)

    def __iter__(self) -> Iterator[str]:
        yield from (*OF_ALL, *section_names())

    def __len__(self) -> int:
        return len(OF_ALL) + len(section_names())

    def __contains__(self, name: object) -> bool:
        return name in OF_ALL or name in section_names()


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


def all_keys() -> Iterator[str]:
    """Yield every key as "section.key", and every array of tables by name."""
    for section, fields in FIELDS.items():
        yield from (f"{section}.{key}" for key in fields)
    yield from LISTS


def extension_keys(sections: Iterable[str]) -> dict[tuple[str, str], ExtensionPoint]:
    """Return section and key -> the kind of object the key names; `sections`: of kinds of run, beside those of all."""
    return {
        (section, key): point
        for section in (*OF_ALL, *sections)
        for key, field in FIELDS[section].items()
        if (point := extension_of(field.type)) is not None
    }


def named_objects(config: Config) -> Iterator[tuple[str, ExtensionPoint, str]]:
    """Yield the key, the kind of object and the name of every object that a configuration names."""
    for (section, key), point in extension_keys(config.kinds).items():
        yield f"{section}.{key}", point, getattr(config.section(section), key)
    point = extension_keys(())["data", "format"]
    for at, one in enumerate(config.data.sources):
        yield f"data.sources[{at}].format", point, one.format
    for at, name in enumerate(config.eval.metrics):
        yield f"eval.metrics[{at}]", ExtensionPoint("metric"), name
