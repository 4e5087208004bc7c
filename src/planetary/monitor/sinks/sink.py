"""The interface of sinks: places outside the run folder for metrics and events."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec

from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.redaction import redacted
from planetary.machine.journal import Record
from planetary.runs.rounds.metrics import RoundMetrics


class SinkRun(msgspec.Struct, frozen=True):
    """The run a sink gets."""

    name: str
    folder: Path
    config: Config
    identity: str  # identity of the run, hexadecimal; the same when the run is resumed

    @property
    def parameters(self) -> dict[str, Any]:
        """The configuration as `section.key` -> value, without passwords in URLs and without the sinks."""
        tables = self.config.tables()
        return {
            f"{section}.{key}": redacted(value) if isinstance(value, str) else value
            for section, table in tables.items()
            if isinstance(table, dict)
            for key, value in table.items()
        }


class NoOptions(msgspec.Struct, frozen=True):
    """The table of a sink without options."""


class Sink(ABC):
    """One place. All methods are called on one separate thread; they may block, and raise any exception.

    `load` comes first, when the gateway starts, and `open` when the run begins; it comes again before the next call if
    it raised. Other calls that raise are not repeated.

    Attributes:
        options: type of the table of `[[sinks]]`; its fields are the keys beside `kind`.
    """

    options: ClassVar[type[msgspec.Struct]] = NoOptions

    def __init__(self, options: Any) -> None:
        """`options`: the table."""

    def load(self) -> None:
        """Import the sink's library. Raises `UserError` when it is not installed, or not configured."""

    @abstractmethod
    def open(self, run: SinkRun) -> None:
        """Begin, or continue the record an earlier gateway of the same run folder began."""

    def wants(self, item: RoundMetrics | Record) -> bool:
        """Whether the sink uses the input."""
        return True

    def write_round(self, line: RoundMetrics) -> None:
        """Take the metrics of a round. A run that went back trains a round again, under the old number."""

    def write_event(self, record: Record) -> None:
        """Take a record of the journal, with the time."""

    def close(self, ok: bool) -> None:
        """Flush and end; `ok`: the run finished."""


def extra_module(module: str, extra: str) -> ModuleType:
    """Import a module an extra brings. Raises `UserError` with the extra's name when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{error}; install it with: pip install 'planetary-compute[{extra}]'") from None
