"""A journal as the durable half of a machine: the records, in order, fold to the machine's state.

A machine changes durable state only by applying a record, and the shell appends the same record to a file before it
carries out any later instruction. Reading the file again therefore gives the same state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol, TypeVar

import msgspec

from planetary.core.errors import LocalProtocolError, UserError

RecordT_contra = TypeVar("RecordT_contra", contravariant=True)


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of the records of a run's journal.

    Attributes:
        t: Unix time in seconds, stamped when the line is written; 0 before. No decision depends on it.
    """

    t: float = 0.0

    outdates_news: ClassVar[bool] = False  # news before this record is no longer shown, and neither is its own

    @property
    def news(self) -> str:
        """The record as a sentence, for logs and displays; "": it is not news."""
        return ""

    @property
    def lasting_news(self) -> str:
        """The same, of a record that stays important when others become old; ""."""
        return ""


class Fold(Protocol[RecordT_contra]):
    """State a journal determines."""

    def apply(self, record: RecordT_contra, /) -> None:
        """Apply `record` to the state; the only code that changes it.

        Raises:
            LocalProtocolError: the record cannot follow the ones before it.
        """
        ...


RecordT = TypeVar("RecordT", bound=msgspec.Struct)
FoldT = TypeVar("FoldT", bound=Fold)


def replay(records: Iterable[RecordT], state: FoldT, journal: object = "the journal") -> FoldT:
    """Fold `records` into `state`, in order, and return it. `journal` is the file they come from, one a line.

    Raises:
        UserError: a line repeats the one before it, or cannot follow those before it; with its number and the repair.
    """
    before: RecordT | None = None
    for number, record in enumerate(records, start=1):
        if record == before and getattr(record, "t", 0.0):
            raise UserError(_repeated(journal, number, record))
        try:
            state.apply(record)
        except (LocalProtocolError, LookupError) as error:
            if record == before:
                raise UserError(_repeated(journal, number, record)) from error
            why = str(error) if isinstance(error, LocalProtocolError) else f"nothing is known of {error}"
            raise UserError(
                f"{journal}, line {number}: the record {_name(record)} cannot follow the lines before it: {why}. The "
                "file was changed, or lines of it were lost. Restore it from a copy; without one, keep the lines "
                f"before this one (head -n {number - 1}) and resume: what they do not tell is trained again"
            ) from error
        before = record
    return state


def _repeated(journal: object, number: int, record: msgspec.Struct) -> str:
    return (
        f"{journal}, line {number} repeats line {number - 1}, the record {_name(record)}; every record is written "
        f"once, so the file was changed. Remove the line (sed -i {number}d {journal}) and try again"
    )


def _name(record: msgspec.Struct) -> str:
    tag = type(record).__struct_config__.tag
    return str(tag or type(record).__name__)
