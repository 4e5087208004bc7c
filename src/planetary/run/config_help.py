"""`planetary.Config` with `help`: docstrings list the sections, those of kinds of run included, and the keys."""

from __future__ import annotations

import inspect

import msgspec

from planetary.core.configuration.key_meanings import meanings
from planetary.core.configuration.keys import SECTIONS
from planetary.core.configuration.schema import Config

__all__ = ["Config"]

KEYS = "\n\nAttributes:\n"


def written_doc(struct: type) -> str:
    """Return the docstring of a section as it is in the source."""
    return inspect.cleandoc((struct.__doc__ or "").partition(KEYS)[0])


def _keys_of(struct: type[msgspec.Struct]) -> str:
    told = meanings(struct)
    return "\n".join(
        f"    {field.name} (default {_default(field)}): {told[field.name]}" for field in msgspec.structs.fields(struct)
    )


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return repr(field.default)
    return repr(field.default_factory()) if callable(field.default_factory) else "none"


def _line_of(section: str, struct: type[msgspec.Struct]) -> str:
    meaning = " ".join(written_doc(struct).split()).partition(": ")[2].partition(". ")[0].rstrip(".")
    return f"    {section}: {meaning}. Keys: {', '.join(struct.__struct_fields__)}"


def _complete() -> None:
    """Append the sections to the docstring of `Config`, and the keys to the docstrings of the sections."""
    sections = dict(SECTIONS)
    lines = [*(_line_of(name, struct) for name, struct in sections.items()), "    sinks: where events and metrics go"]
    Config.__doc__ = written_doc(Config) + KEYS + "\n".join(lines)
    for struct in sections.values():
        struct.__doc__ = written_doc(struct) + KEYS + _keys_of(struct)


_complete()
