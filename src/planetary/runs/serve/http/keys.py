"""Who may use the endpoint: a file of keys, read again when it changes."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request

from planetary.core.errors import UserError
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError


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

    @property
    def first(self) -> str:
        """The first key of the file."""
        return next(iter(self._names))

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


class KeyAccess:
    """Admits requests with a known key; without a file of keys, every request."""

    def __init__(self, keys: KeyFile | None) -> None:
        self._keys = keys

    def admit(self, request: Request, scope: Scope, shown: str) -> str:
        """Return whose request it is, "" without keys. Raises `ApiError` (401) for an unknown key."""
        if self._keys is None:
            return ""
        user = self._keys.user(_key_of(request))
        if user is None:
            raise ApiError(
                401,
                "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return user

    def still_allows(self, request: Request) -> Callable[[], bool]:
        """Return whether a request's key is still known, as a function."""
        keys, key = self._keys, _key_of(request)
        return lambda: keys is None or keys.user(key) is not None

    def needs(self, scope: Scope) -> str:
        """Describe the key an operation needs."""
        return "one of the server's keys, where it has any"


def _key_of(request: Request) -> str:
    """Return the key of a request, as OpenAI's clients send it or as Anthropic's do."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "").strip()
