"""Authorisation of requests by bearer tokens with a scope; only digests of tokens are stored.

A token has 32 random bytes, so one pass of SHA-256 keeps it secret. The file of tokens is read again when it has
changed; a revoked token is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

import msgspec
from starlette.requests import HTTPConnection, Request

from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.core.errors import PlanetaryError, UserError
from planetary.web.api_errors import ApiError
from planetary.web.rate_limit import RateLimit

TOKENS = "api-tokens.jsonl"
AUTHORITY = "@"
"""Separator between a token and the fingerprint of the gateway's authority, for clients."""


class Scope(IntEnum):
    """Permissions of a token; a larger scope includes the smaller ones."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """Lower-case name of the scope, as in commands and files."""
        return self.name.lower()


def scope_named(word: str) -> Scope:
    """Return the scope with this lower-case name. Raises `UserError` for an unknown one."""
    try:
        return Scope[word.upper()]
    except KeyError:
        raise UserError(f"expected a scope, one of {', '.join(s.word for s in Scope)}; found {word!r}") from None


class TokenGrant(msgspec.Struct, frozen=True):
    """Name and scope of the token of a request."""

    name: str
    scope: Scope


class TokenMade(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    """A token was made."""

    name: str
    scope: str
    digest: str  # SHA-256, hexadecimal
    at: float  # Unix time in seconds


class TokenRevoked(msgspec.Struct, frozen=True, kw_only=True, tag="revoked"):
    """The token of this name was revoked."""

    name: str
    at: float  # Unix time in seconds


Line: TypeAlias = TokenMade | TokenRevoked


def digest_of_token(token: str) -> str:
    """Return the SHA-256 of a token, hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """Return a new random token."""
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
        """Make a token and return it: the only time it can be seen. Raises `UserError` for a name in use."""
        self.refresh()
        if name in self.tokens:
            raise UserError(f"there is a token named {name!r} already; revoke it first, or take another name")
        token = new_token()
        self._append(TokenMade(name=name, scope=scope.word, digest=digest_of_token(token), at=now))
        return token

    def revoke(self, name: str, now: float) -> None:
        """Revoke a token. Raises `UserError` when there is none of this name."""
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
    """Grants requests the scope of their token."""

    def __init__(
        self,
        tokens: AccessTokens | None = None,
        *,
        anonymous: Scope | None = None,
        known: Mapping[str, tuple[Scope, str]] | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        """Accept the given tokens.

        Args:
            tokens: the gateway's token file; read again when it changes.
            anonymous: scope of a request without a token; None: refused.
            known: further tokens: name -> (scope, token).
            rate: of each token's requests, and without a token of each address; None: there is no limit.
        """
        self._tokens, self._anonymous, self._rate = tokens, anonymous, rate
        self._known = {name: (scope, digest_of_token(token)) for name, (scope, token) in (known or {}).items()}

    def grant(self, connection: HTTPConnection) -> TokenGrant | None:
        """Return the name and scope of a request's token; None: an unknown token, or no token and no anonymous scope.

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

    def admit(self, request: Request, scope: Scope, shown: str) -> str:
        """Return the name of the token of a request for an operation, `shown` to people, of a scope.

        Raises:
            ApiError: the token is missing or unknown (401), the scope too small (403), or it asks too often (429).
        """
        grant = self.grant(request)
        self._limit(grant, request)
        if grant is None or (grant.scope < scope and not grant.name):
            raise ApiError(
                401,
                f"{self.needs(scope)} is needed: Authorization: Bearer TOKEN (`planetary token` makes one)",
                code="token_needed",
                headers={"www-authenticate": "Bearer"},
            )
        if grant.scope < scope:
            message = f"the token {grant.name!r} has the scope {grant.scope.word}; {shown} needs {scope.word}"
            raise ApiError(403, message, code="scope")
        return grant.name

    def needs(self, scope: Scope) -> str:
        """Describe the token an operation with a scope needs."""
        return f"a token with the scope {scope.word}"

    def _limit(self, grant: TokenGrant | None, request: Request) -> None:
        """Raise `ApiError` for a request too soon after the others of the token, or of the address."""
        if self._rate is None:
            return
        address = request.client.host if request.client is not None else ""
        client = f"token {grant.name}" if grant is not None and grant.name else f"address {address}"
        wait = self._rate.wait(client, time.monotonic())
        if wait > 0:
            whose = (
                f"the token {grant.name!r}" if grant is not None and grant.name else "requests without a known token"
            )
            raise ApiError(
                429,
                f"{whose}: too many requests in a short time; ask again after {wait:.1f} s, or wait for events in "
                "place of asking for a state",
                code="too_many_requests",
                headers={"retry-after": str(math.ceil(wait))},
            )

    def _all(self) -> Iterable[tuple[TokenGrant, str]]:
        for name, (scope, digest) in self._known.items():
            yield TokenGrant(name, scope), digest
        if self._tokens is None:
            return
        try:
            self._tokens.refresh()
        except PlanetaryError:  # a damaged file grants nothing
            return
        for one in self._tokens.tokens.values():
            yield TokenGrant(one.name, Scope[one.scope.upper()]), one.digest


def _shown_token(connection: HTTPConnection) -> str:
    """Return the bearer token; read-only requests of a browser's pages have it in their query."""
    kind, _, token = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip().partition(AUTHORITY)[0]
    return connection.query_params.get("token", "") if connection.scope.get("method") in ("GET", "HEAD") else ""
