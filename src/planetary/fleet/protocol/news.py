"""Notes on a run that outlast other news, made of the journal's records."""

from __future__ import annotations

from planetary.machine.journal import Record


class LastingNews:
    """News that stay important when others become old: notes of the run. A kind of run may derive from this."""

    def of(self, record: Record) -> str:
        """Return the lasting note of a record, or ""."""
        return record.lasting_news
