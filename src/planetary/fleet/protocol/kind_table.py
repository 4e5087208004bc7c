"""The readers of kinds of run, by the kind's name.

The built-in part is `planetary.runs.READERS`. A package adds a kind with an entry point of the group
`planetary.readers`: name of the kind = "module:READER". A module is imported when something of its kind is read.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Literal

import msgspec

from planetary.core.errors import UserError

GROUP = "planetary.readers"
"""Of entry points."""


@functools.cache
def view_of(kind: str) -> Any:
    """Return the `KindView` or `KindReader` of a kind of run.

    Raises:
        UserError: nothing installed here reads this kind.
    """
    places = _places()
    if kind not in places:
        raise UserError(
            f"the kind of run {kind!r} is not known here; known are {', '.join(sorted(places))}: install the package "
            "that the run was made with"
        )
    module, _, attribute = places[kind].partition(":")
    return getattr(importlib.import_module(module), attribute)


def read_part(part: dict[str, Any], slot: Literal["metrics", "status"]) -> Any:
    """Return a kind's part of metrics or of a status, which was read as a plain mapping.

    Raises:
        UserError: the kind is not known here.
        ValueError: the kind has no such part, or it does not fit.
    """
    struct = getattr(view_of(str(part.get("kind", ""))), slot)
    if struct is None:
        raise ValueError(f"the kind of run {part.get('kind')!r} has no {slot} of its own")
    return msgspec.convert(part, struct, str_keys=True)


def _places() -> Mapping[str, str]:
    built_in: Mapping[str, str] = importlib.import_module("planetary.runs").READERS
    return {**{entry.name: entry.value for entry in entry_points(group=GROUP)}, **built_in}
