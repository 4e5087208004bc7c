"""Keys of a configuration that a kind of run does not honour: given ones are refused, never accepted and ignored."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec

from planetary.core.config import Config
from planetary.core.errors import UserError


def refuse_ignored(config: Config, ignored: Mapping[str, str], kind: str) -> None:
    """Raise `UserError` that names every key with another value than its default which the kind does not honour.

    Args:
        config: of a run of this kind.
        ignored: "section.key", or a pattern such as "sync.*" -> why it has no effect.
        kind: name of the kind.
    """
    found = {key: why for key in _given(config) for pattern, why in ignored.items() if fnmatchcase(key, pattern)}
    if found:
        reasons = "; ".join(f"{key}: {why}" for key, why in found.items())
        raise UserError(f"a run of the kind {kind!r} does not honour keys that are set: {reasons}")


def _given(config: Config) -> list[str]:
    """Return the keys whose values are not the defaults."""
    values, defaults = msgspec.to_builtins(config), msgspec.to_builtins(Config())
    return [
        f"{section}.{key}"
        for section, table in values.items()
        if isinstance(table, dict)
        for key, value in table.items()
        if value != defaults[section][key]
    ]
