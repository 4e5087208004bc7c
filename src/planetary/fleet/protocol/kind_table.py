"""The readers of kinds of run, by the kind's name.

The built-in part is `planetary.runs.READERS`. A package adds a kind with an entry point of the group
`planetary.readers`: name of the kind = "module:READER". A module is imported when something of its kind is read.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

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


def _places() -> Mapping[str, str]:
    built_in: Mapping[str, str] = importlib.import_module("planetary.runs").READERS
    return {**{entry.name: entry.value for entry in entry_points(group=GROUP)}, **built_in}
