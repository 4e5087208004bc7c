"""Who may use the endpoint: a file of keys, read again when it changes."""

from __future__ import annotations

import hmac
from pathlib import Path

from planetary.core.errors import UserError


class KeyFile:
    """Lines of a name and a key, apart by white space; `#` begins a comment.

    Removing a key ends the streams that use it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `UserError` if it cannot be read or has no keys."""
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._names: dict[str, str] = {}
        try:
            self._names = _read(path)
        except OSError as error:
            raise UserError(f"cannot read the keys {path}: {error.strerror or error}") from error
        if not self._names:
            raise UserError(f"the keys {path} are none: expected lines of a name and a key")

    def user(self, key: str) -> str | None:
        """Return the name of a key's owner; None: the key is unknown. Takes equally long for every key."""
        self._refresh()
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                found = name
        return found

    def _refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be read admits no key."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._names, self._stamp = _read(self._path), stamp
        except (OSError, UserError):
            self._names, self._stamp = {}, None


def _read(path: Path) -> dict[str, str]:
    names = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise UserError(f"{path}, line {number}: expected a name and a key, found {len(words)} words")
        names[words[1]] = words[0]
    return names
