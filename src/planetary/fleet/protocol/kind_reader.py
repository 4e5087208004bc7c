"""How the files of one kind of run are read: records, fold and status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.errors import UserError
from planetary.fleet.protocol.kind_table import view_of
from planetary.fleet.protocol.progress import status_of_journal
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import KindView, RunStatus
from planetary.machine.journal import Record

FORMAT = 2
"""Version of the files of a run folder that a gateway writes: `events.jsonl` and `metrics.jsonl`."""

FoldT_co = TypeVar("FoldT_co", bound=RunFold, covariant=True)


@dataclass(frozen=True, kw_only=True)
class KindReader(KindView, Generic[FoldT_co]):
    """Knowledge of a kind of run that readers of a run's files need.

    Attributes:
        records: union of the journal's records.
        fold: class of the state that the records fold to; made without arguments, it is the empty one.
        status_of_files: returns the status that the fold of the journal and the metrics tell.
    """

    records: Any
    fold: type[FoldT_co]
    status_of_files: Callable[[Any, Sequence[Any]], RunStatus] = lambda fold, _: status_of_journal(fold)


def journal_kind(path: Path) -> str | None:
    """Return the kind of run whose journal is at `path`, known here or not; None while there is no whole record.

    Raises:
        UserError: another version of planetary wrote it, or it begins with no run.
    """
    if not path.exists():
        return None
    first = next(iter(read_json_lines(path, dict[str, Any])), None)
    if first is None:
        return None
    found = first.get("format", 0)
    if found != FORMAT:
        which = "an older" if isinstance(found, int) and found < FORMAT else "a newer"
        raise UserError(
            f"{path} was written by {which} planetary (format {found}, this one reads {FORMAT}): read and resume "
            "the run with the version it was begun with, or begin another run"
        )
    return str(first.get("kind", ""))


def journal_reader(path: Path) -> KindReader[Any] | None:
    """Return the reader of the journal at `path`; None while there is no whole record.

    Raises:
        UserError: another version of planetary wrote it, it begins with no run, or its kind is not known here.
    """
    kind = journal_kind(path)
    return None if kind is None else kind_reader(kind)


def kind_reader(kind: str) -> KindReader[Any]:
    """Return the reader of a kind of run.

    Raises:
        UserError: nothing installed here reads this kind, or it is no kind of run.
    """
    reader = view_of(kind)
    if not isinstance(reader, KindReader):
        raise UserError(f"{kind!r} is no kind of run, and has no journal")
    return reader


def read_journal(path: Path, reader: KindReader[Any]) -> list[Record]:
    """Return the records of a gateway's own journal, with checked checksums; none where there is no file.

    Raises:
        UserError: it is damaged, of another version, or the journal of another kind of run.
    """
    found = journal_reader(path)
    if found is None:
        return []
    if found.name != reader.name:
        raise UserError(
            f"{path.parent} has a run of the kind {found.name!r}, and the configuration asks for {reader.name!r}: "
            "choose another folder"
        )
    return list(read_json_lines(path, reader.records, checksums=True))
