"""Folders that outlive a run: the cache of this machine, and the gateway's certificate authority."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from planetary.core.configuration.ranges import check_path
from planetary.core.errors import UserError

log = logging.getLogger(__name__)


def cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """Return the folder of prepared data and compiled steps: `given`, else `$PLANETARY_CACHE`, else one in home.

    Raises:
        UserError: it is no path, or a file.
    """
    check_path("cache", given)
    named = os.environ.get("PLANETARY_CACHE") if given is None else given
    folder = Path(named).absolute() if named else _home(".cache") / "planetary"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"cache: expected a folder, found the file {folder}")
    return folder


def default_state_folder() -> Path:
    """Return the folder of a gateway's certificate authority: `$PLANETARY_STATE`, else `~/.planetary/gateway`."""
    named = os.environ.get("PLANETARY_STATE")
    return Path(named) if named else _home(".planetary") / "gateway"


def _home(name: str) -> Path:
    """Return a folder in this user's home, or one below the system's temporary folder where there is none to write in.

    Containers have users without a name and a home. Raises `UserError` for a temporary folder of another user.
    """
    with contextlib.suppress(RuntimeError):  # the user is not in the list of users
        home = Path.home()
        if os.access(home / name if (home / name).exists() else home, os.W_OK | os.X_OK):
            return home / name
    place = Path(tempfile.gettempdir()) / f"planetary-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    place.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and place.stat().st_uid != os.getuid():
        raise UserError(f"{place} is another user's: set HOME, or PLANETARY_CACHE and PLANETARY_STATE")
    log.warning(
        "this user has no home to write in: %s is used, which may be gone after a restart of the machine; set HOME, or "
        "PLANETARY_CACHE and PLANETARY_STATE",
        place,
    )
    return place / name.removeprefix(".")
