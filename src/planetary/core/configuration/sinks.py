"""The tables of `[[sinks]]`: where metrics and events of a run are sent besides its folder."""

from __future__ import annotations

from typing import Any

import msgspec


class SinkConfig(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of the built-in tables. `kind` names a sink of `extension_points.SINKS`, whose `options` is the type."""


class OwnSink(SinkConfig, frozen=True, tag="own"):
    """The table of a user's sink. One in a file is not run to read a configuration; its keys are checked as it starts.

    Attributes:
        place: its kind.
        values: the rest of the table.
    """

    place: str
    values: dict[str, Any]


def sink_tables(sinks: tuple[SinkConfig, ...]) -> list[dict[str, Any]]:
    """Return the tables of sinks as a file has them."""
    return [
        {"kind": one.place, **one.values} if isinstance(one, OwnSink) else msgspec.to_builtins(one) for one in sinks
    ]
