"""Who may do what: bearer tokens with a scope, of which only digests are kept.

A token has 32 random bytes, so that one pass of SHA-256 keeps it secret. The file of tokens is read again when it has
changed; a token that is revoked counts no more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

import msgspec
from starlette.requests import HTTPConnection

from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.core.errors import PlanetaryError, UserError

TOKENS = "api-tokens.jsonl"
AUTHORITY = "@"
"""Between a token and the fingerprint of its gateway's certificate authority, which only clients need."""


class Scope(IntEnum):
    """What a token allows; a larger one allows what the smaller ones do."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """As people write it."""
        return self.name.lower()


def scope_named(word: str) -> Scope:
    """Return the scope that people write so. Raises `UserError`."""
    try:
        return Scope[word.upper()]
    except KeyError:
        raise UserError(f"expected a scope, one of {', '.join(s.word for s in Scope)}; found {word!r}") from None


class TokenGrant(msgspec.Struct, frozen=True):
    """Whose token was shown, and what it allows."""

    name: str
    scope: Scope


class TokenMade(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    """A token was made."""

    name: str
    scope: str
    digest: str  # SHA-256, hexadecimal
    at: float  # Unix time in seconds


class TokenRevoked(msgspec.Struct, frozen=True, kw_only=True, tag="revoked"):
    """The token of this name counts no more."""

    name: str
    at: float  # Unix time in seconds


Line: TypeAlias = TokenMade | TokenRevoked


def digest_of_token(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """Return a token that nobody has."""
    return f"pl-{secrets.token_urlsafe(32)}"


class AccessTokens:
    """The tokens of a gateway, in one file of JSON lines."""

    def __init__(self, folder: Path) -> None:
        """Read the file in `folder`; absent, there are no tokens. Raises `UserError` when it is damaged."""
        self._path = folder / TOKENS
        self._stamp: tuple[int, int] | None = None
        self.tokens: dict[str, TokenMade] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp == self._stamp:
            return
        tokens: dict[str, TokenMade] = {}
        for line in read_json_lines(self._path, Line):
            if isinstance(line, TokenMade):
                tokens[line.name] = line
            else:
                tokens.pop(line.name, None)
        self.tokens, self._stamp = tokens, stamp

    def make(self, name: str, scope: Scope, now: float) -> str:
        """Make a token and return it: the only time that it can be seen. Raises `UserError` for a name in use."""
        self.refresh()
        if name in self.tokens:
            raise UserError(f"there is a token named {name!r} already; revoke it first, or take another name")
        token = new_token()
        self._append(TokenMade(name=name, scope=scope.word, digest=digest_of_token(token), at=now))
        return token

    def revoke(self, name: str, now: float) -> None:
        """Let a token count no more. Raises `UserError` when there is none of this name."""
        self.refresh()
        if name not in self.tokens:
            raise UserError(f"there is no token named {name!r}; there are: {', '.join(self.tokens) or 'none'}")
        self._append(TokenRevoked(name=name, at=now))

    def _append(self, line: Line) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        with JsonLinesWriter(self._path) as writer:
            writer.append(line, durable=True)
        self.refresh()


class Access:
    """Decides what a request may do."""

    def __init__(
        self,
        tokens: AccessTokens | None = None,
        *,
        anonymous: Scope | None = None,
        known: Mapping[str, tuple[Scope, str]] | None = None,
    ) -> None:
        """Begin.

        Args:
            tokens: that count while their file has them.
            anonymous: what a request without a token may do; None: nothing.
            known: further tokens by name: what each allows, and the token.
        """
        self._tokens, self._anonymous = tokens, anonymous
        self._known = {name: (scope, digest_of_token(token)) for name, (scope, token) in (known or {}).items()}

    def grant(self, connection: HTTPConnection) -> TokenGrant | None:
        """Return what a request's token, or none, allows; None for a token that is not known, and for no scope at all.

        Every known token is compared, in constant time.
        """
        shown = _shown_token(connection)
        if not shown:
            return None if self._anonymous is None else TokenGrant("", self._anonymous)
        digest, found = digest_of_token(shown).encode(), None
        for grant, known in self._all():
            if hmac.compare_digest(known.encode(), digest):
                found = grant
        return found

    def _all(self) -> Iterable[tuple[TokenGrant, str]]:
        for name, (scope, digest) in self._known.items():
            yield TokenGrant(name, scope), digest
        if self._tokens is None:
            return
        try:
            self._tokens.refresh()
        except PlanetaryError:  # a damaged file lets nobody in
            return
        for one in self._tokens.tokens.values():
            yield TokenGrant(one.name, Scope[one.scope.upper()]), one.digest


def _shown_token(connection: HTTPConnection) -> str:
    """Return the bearer token; pages in a browser, which only read, have it in their address."""
    kind, _, token = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip().partition(AUTHORITY)[0]
    return connection.query_params.get("token", "") if connection.scope.get("method") in ("GET", "HEAD") else ""
