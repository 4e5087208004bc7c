"""Folders that outlive a run: the cache of this machine, and the gateway's certificate authority."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(given: Path | None) -> Path:
    """Return the folder of prepared data and compiled steps: `given`, else `$PLANETARY_CACHE`, else one in home."""
    if given is not None:
        return given.absolute()
    named = os.environ.get("PLANETARY_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache" / "planetary"


def default_state_folder() -> Path:
    """Return the folder of a gateway's certificate authority: `$PLANETARY_STATE`, else `~/.planetary/gateway`."""
    named = os.environ.get("PLANETARY_STATE")
    return Path(named) if named else Path.home() / ".planetary" / "gateway"
