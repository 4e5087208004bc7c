"""Folders that outlive a run: the cache of this machine, and the gateway's certificate authority."""

from __future__ import annotations

import os
from pathlib import Path

from planetary.core.configuration.ranges import check_path
from planetary.core.errors import UserError


def cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """Return the folder of prepared data and compiled steps: `given`, else `$PLANETARY_CACHE`, else one in home.

    Raises:
        UserError: it is no path, or a file.
    """
    check_path("cache", given)
    named = os.environ.get("PLANETARY_CACHE") if given is None else given
    folder = Path(named).absolute() if named else Path.home() / ".cache" / "planetary"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"cache: expected a folder, found the file {folder}")
    return folder


def default_state_folder() -> Path:
    """Return the folder of a gateway's certificate authority: `$PLANETARY_STATE`, else `~/.planetary/gateway`."""
    named = os.environ.get("PLANETARY_STATE")
    return Path(named) if named else Path.home() / ".planetary" / "gateway"
