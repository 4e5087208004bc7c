"""The invites a gateway's operator made and revoked: `invites.jsonl` beside the certificate authority.

A gateway recognises invites by MAC, whether they are listed or not. The list is for people, and it says which ones
count no more: a gateway that runs reads it again when it has changed.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TypeAlias

import msgspec

from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.core.errors import PlanetaryError, UserError
from planetary.net import invite
from planetary.net.authority import Authority
from planetary.net.connection import Connection

log = logging.getLogger(__name__)

INVITES = "invites.jsonl"
WATCH_S = 2.0  # seconds between two looks at the file


class Issued(msgspec.Struct, frozen=True, kw_only=True, tag="issued"):
    """An invite was made."""

    id: str
    made: float  # Unix time in seconds
    expires: int  # Unix time in seconds; 0: never
    node: str  # the only one that may use it; "": any


class Revoked(msgspec.Struct, frozen=True, kw_only=True, tag="revoked"):
    """An invite counts no more."""

    id: str
    at: float  # Unix time in seconds


Line: TypeAlias = Issued | Revoked


class InviteList:
    """The list of one authority. As a container it holds the ids of the invites that were revoked."""

    def __init__(self, authority: Authority) -> None:
        """Read the list beside `authority`. Raises `UserError` when it is damaged."""
        self._authority = authority
        self._path = authority.folder / INVITES
        self._seen: tuple[int, int] | None = None
        self.issued: dict[str, Issued] = {}
        self.revoked: dict[str, float] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return
        if self._seen == (found.st_mtime_ns, found.st_size):
            return
        self._seen = (found.st_mtime_ns, found.st_size)
        lines = list(read_json_lines(self._path, Line))
        self.issued = {line.id: line for line in lines if isinstance(line, Issued)}
        self.revoked = {line.id: line.at for line in lines if isinstance(line, Revoked)}

    def issue(self, now: float, *, expires: float = 0.0, node: str = "") -> str:
        """Make an invite and note it; return the token. Times are Unix times in seconds; `expires` 0 is never."""
        token = invite.mint(self._authority.invite_secret, self._authority.fingerprint, expires=expires, node=node)
        self._append(Issued(id=invite.read(token).id, made=now, expires=int(expires), node=node))
        return token

    def revoke(self, beginning: str, now: float) -> str:
        """Revoke the invite whose id begins so; return the id.

        Raises:
            UserError: no invite on the list begins so, or several do. A whole id need not be on the list.
        """
        ids = [name for name in self.issued if name.startswith(beginning)] if beginning else []
        if len(ids) != 1 and _is_id(beginning):
            ids = [beginning]
        if len(ids) != 1:
            found = f"{len(ids)} invites" if ids else "no invite"
            raise UserError(
                f"{found} of the list in {self._path} begins with {beginning!r}; see planetary invite --list"
            )
        if ids[0] not in self.revoked:
            self._append(Revoked(id=ids[0], at=now))
        return ids[0]

    def __contains__(self, name: object) -> bool:
        self.refresh()
        return name in self.revoked

    def _append(self, line: Line) -> None:
        self._path.touch(mode=0o600)
        writer = JsonLinesWriter(self._path)
        try:
            writer.append(line, durable=True)
        finally:
            writer.close()
        self.refresh()


class Guests:
    """Connections by the invite they were made with, so they end with it."""

    def __init__(self, invites: InviteList) -> None:
        self._invites = invites
        self._connections: dict[Connection, str] = {}

    def came(self, connection: Connection, name: str) -> None:
        """A connection was made with the invite whose id is `name`."""
        self._connections[connection] = name

    def left(self, connection: Connection) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)

    async def watch(self) -> None:
        """Exclude keys made with revoked invites, for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._invites.refresh()
            except PlanetaryError as error:  # a person may be at it with an editor
                log.warning("the list of invites cannot be read, and counts as it was: %s", error)
                continue
            revoked = self._invites.revoked
            for connection in [one for one, name in self._connections.items() if name in revoked]:
                await connection.close(f"the invite token {self._connections.get(connection, '')} was revoked")


def read_invites(folder: Path, now: float) -> InviteList:
    """Open the authority in `folder` and the list. `now` is Unix time in seconds. Raises as `Authority.open`."""
    return InviteList(Authority.open(folder, now))


def _is_id(text: str) -> bool:
    return len(text) == 2 * invite.ID_BYTES and all(digit in "0123456789abcdef" for digit in text)
