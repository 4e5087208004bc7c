"""Writing a configuration, or plain tables, as TOML (the standard library only reads it)."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence

from planetary.core.configuration.keys import SECTIONS
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


def _string(text: str) -> str:
    out = []
    for char in text:
        code = ord(char)
        if char in _ESCAPES:
            out.append(_ESCAPES[char])
        elif code < 0x20 or code == 0x7F:
            out.append(f"\\u{code:04x}")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _float(number: float) -> str:
    if math.isnan(number):
        return "nan"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return repr(number)  # the shortest text that reads back as the same float64


def toml_value(value: object) -> str:
    """Return `value` (of a type that `tomllib` returns) as TOML; tables become inline tables.

    Raises:
        UserError: the value has no TOML form.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    raise UserError(f"a value of type {type(value).__name__} cannot be written to a TOML file: {value!r}")


def toml_document(tables: Mapping[str, Mapping[str, object] | Sequence[Mapping[str, object]]]) -> str:
    """Return sections of keys, and arrays of such, as one TOML document that reads back as the same tables.

    An empty array is left out.
    """
    blocks = []
    for section, content in tables.items():
        head = f"[{_key(section)}]"
        entries = [content] if isinstance(content, Mapping) else list(content)
        for table in entries:
            lines = [f"{_key(key)} = {toml_value(value)}" for key, value in table.items()]
            blocks.append("\n".join([head if content is table else f"[{head}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def to_toml(config: Config) -> str:
    """Return every key of `config` as TOML; `load_config` of it gives an equal `Config`.

    A section of a kind of run is there where a key of it has another value than its default.
    """
    tables = config.tables()
    for section in (name for name in SECTIONS if name in tables):
        struct = SECTIONS[section]  # its own keys come first
        own = [key for key in struct.__annotations__ if key in tables[section]]
        tables[section] = {key: tables[section][key] for key in own} | tables[section]
    return toml_document(tables)
