"""Where the status of a run comes from: the folder, or the gateway's dashboard."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.errors import PeerError, UserError
from planetary.fleet.protocol.status import RunStatus, read_status
from planetary.monitor.folder_status import status_of
from planetary.monitor.run_folder import EVENTS, METRICS, load_history
from planetary.net.http_opener import opener_for

_TIMEOUT_S = 5.0
_MOST_BYTES = 16 << 20  # size of a status; far more than any real one


def status_source(place: str) -> Callable[[], RunStatus]:
    """Return a function that reads the newest status of `place`: a run folder, or an http(s) URL.

    The function raises `UserError` when the folder is no run or files are damaged, and `PeerError` when the URL does
    not answer with a status.
    """
    if place.startswith(("http://", "https://")):
        return lambda: _fetch(place)
    return _FolderSource(Path(place))


class _FolderSource:
    """Reads the folder again only when files have grown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, ...] | None = None
        self._status: RunStatus | None = None

    def __call__(self) -> RunStatus:
        sizes = tuple(
            path.stat().st_size if path.exists() else -1 for path in (self._folder / EVENTS, self._folder / METRICS)
        )
        if self._status is None or sizes != self._seen:
            self._status = status_of(load_history(self._folder))
            self._seen = sizes
        return self._status


def _fetch(place: str) -> RunStatus:
    page = urllib.parse.urlsplit(place)
    url = page._replace(path=page.path.rstrip("/") + "/status.json", fragment="").geturl()
    try:
        with opener_for(url).open(url, timeout=_TIMEOUT_S) as answer:
            body = answer.read(_MOST_BYTES)
            promised = int(answer.headers.get("Content-Length") or len(body))
    except urllib.error.HTTPError as error:
        raise PeerError(
            f"{url} answered {error.code} {error.reason}; expected the status of a run. "
            "Is this the address that the gateway or `planetary dashboard` printed?"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PeerError(
            f"cannot read {url}: {reason}; is the run still going, and can this machine reach it?"
        ) from error
    if len(body) < promised:
        raise PeerError(f"cannot read {url}: the answer ended early; the run probably ended while it was sent")
    try:
        return status_in(msgspec.json.decode(body), url)
    except msgspec.DecodeError as error:
        raise UserError(f"{url} is not the status of a run: {error}") from error


def status_in(answer: Any, url: str) -> RunStatus:
    """Return the status a page or gateway answered with, parsed. Raises `UserError`; `url` is for the error's text."""
    try:
        return read_status(answer)
    except msgspec.ValidationError as error:
        raise UserError(f"{url} is not the status of a run: {error}") from error
