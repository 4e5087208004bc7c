"""Where a role's log goes: standard error, one line per message."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(role: str, *, verbose: bool) -> None:
    """Show this process's log: everything from INFO on, and DEBUG when `verbose`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.getLogger("planetary").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("planetary").addHandler(handler)
    logging.getLogger("asyncio").addHandler(handler)
