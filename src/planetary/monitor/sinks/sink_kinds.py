"""The sinks of a run, by the kinds of `[[sinks]]`."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from planetary.artifacts.store import write_atomically
from planetary.core.configuration.schema import Config
from planetary.core.configuration.sinks import OwnSink, SinkConfig
from planetary.core.configuration.strict import check_table
from planetary.core.extension_points import SINKS
from planetary.monitor.sinks.followers import Followers
from planetary.monitor.sinks.sink import Sink, SinkRun

IDENTITY = "sink-identity.txt"
_one_at_a_time = threading.Lock()


def sink_of(options: SinkConfig) -> tuple[str, Sink]:
    """Return the name of a sink, for people, and the sink; nothing is opened, and no library imported.

    Raises `UserError` for a sink in a user's file that cannot be loaded, or has other keys.
    """
    if isinstance(options, OwnSink):
        found = SINKS.find(options.place)
        return options.place, found(check_table("sinks", options.place, found.options, options.values, "the sink"))
    name = str(type(options).__struct_config__.tag)
    return name, SINKS.find(name)(options)


def follow(
    sinks: Sequence[SinkConfig], name: str, folder: Path, config: Callable[[], Config], report: Callable[[str], None]
) -> Followers:
    """Start the sinks of the run in `folder`; see `Followers`. `config` is asked when the run has begun."""

    def run() -> SinkRun:
        return SinkRun(name, folder, config(), identity_of(folder))

    return Followers([sink_of(options) for options in sinks], run, report)


def identity_of(folder: Path) -> str:
    """Return the run's own random name, which stays in the folder."""
    path = folder / IDENTITY
    with _one_at_a_time:
        if not path.exists():
            write_atomically(path, f"{secrets.token_hex(8)}\n".encode())
        return path.read_text().strip()
