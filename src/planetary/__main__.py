"""`python -m planetary` is the `planetary` command."""

from __future__ import annotations

from planetary.cli.main import entry

if __name__ == "__main__":
    entry()
