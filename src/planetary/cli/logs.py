"""Where a role's log goes: standard error, one line per message."""

from __future__ import annotations

import logging
import sys

from planetary.core.printable import one_line
from planetary.core.redaction import redacted


class _Lines(logging.Formatter):
    """One line per message, whatever other machines put into it, and no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line with control characters of terminals escaped; a traceback follows it as it is."""
        return one_line(super().formatMessage(record))


def log_to_stderr(role: str, *, verbose: bool) -> None:
    """Show this process's log: everything from INFO on, and DEBUG when `verbose`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.getLogger("planetary").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("planetary").addHandler(handler)
    logging.getLogger("asyncio").addHandler(handler)
