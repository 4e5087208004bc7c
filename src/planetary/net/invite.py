"""Invite tokens: all that a worker needs to join, in one line.

`plt1.` and then base64url of a JSON object followed by 32 bytes of HMAC-SHA256 over `plt1.` and that JSON. The gateway
keeps no list of tokens: it recognises them by the MAC. The token names the gateway's certificate authority, so a worker
that was given nothing else can tell the gateway from an impostor before it shows the token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Collection, Container
from typing import Literal

import msgspec

from planetary.core import decoding
from planetary.core.errors import TrustError

_PREFIX = "plt1."
_MAC_BYTES = 32
ID_BYTES = 6
_MOST_CHARACTERS = 2048

Role = Literal["supervisor", "worker", "site"]
ROLES: tuple[Role, ...] = ("supervisor", "worker", "site")


class Invite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of a token. Only the gateway can verify it is genuine."""

    authority: str  # SHA-256 of the authority's certificate, hexadecimal
    id: str  # id for a revocation
    roles: tuple[Role, ...]  # roles of the invite's holder
    expires: int  # Unix time in seconds; 0: never
    node: str = ""  # the only node that may join with it; "": any

    @property
    def authority_fingerprint(self) -> bytes:
        """SHA-256 of the authority's certificate; 32 bytes."""
        return bytes.fromhex(self.authority)


def mint(
    secret: bytes,
    authority_fingerprint: bytes,
    *,
    expires: float = 0.0,
    roles: Collection[Role] = ROLES,
    node: str = "",
) -> str:
    """Return a new token. `expires` is Unix time in seconds, 0 for never; `node` the only one that may use it."""
    invite = Invite(
        authority=authority_fingerprint.hex(),
        id=secrets.token_hex(ID_BYTES),
        roles=tuple(roles),
        expires=int(expires),
        node=node,
    )
    body = msgspec.json.encode(invite)
    return _PREFIX + base64.urlsafe_b64encode(body + _mac(secret, body)).rstrip(b"=").decode()


def is_token(text: str) -> bool:
    """Return whether `text` is meant as a token, and not, for example, as the name of a file that holds one."""
    return text.startswith(_PREFIX)


def read(token: str) -> Invite:
    """Read a token without verifying it, for a client, which lacks the secret. Raises `TrustError`."""
    return _split(token)[0]


def verify(
    token: str,
    secret: bytes,
    authority_fingerprint: bytes,
    *,
    role: str,
    now: float | None,
    revoked: Container[str] = (),
) -> Invite:
    """Return the contents of a token after verifying it is genuine and valid now for `role`.

    `now` is Unix time in seconds, None where an expired invite is as good; `revoked` the revoked ids. Raises
    `TrustError` with the reason; the text does not contain the token.
    """
    invite, body, mac = _split(token)
    if not hmac.compare_digest(mac, _mac(secret, body)) or not hmac.compare_digest(
        invite.authority_fingerprint, authority_fingerprint
    ):
        raise TrustError("the invite token was not made by this gateway; make one there with `planetary invite`")
    if invite.id in revoked:
        raise TrustError(f"the invite token {invite.id} was revoked; ask for a new one")
    if now is not None and (why := lapsed(invite, now)):
        raise TrustError(why)
    if role not in invite.roles:
        raise TrustError(f"the invite token {invite.id} is for the role {' or '.join(invite.roles)}, not for {role!r}")
    return invite


def lapsed(invite: Invite, now: float) -> str:
    """Return an invite has expired at the Unix time `now` in seconds; "" while it has not."""
    if not invite.expires or now < invite.expires:
        return ""
    return f"the invite token {invite.id} expired {_ago(now - invite.expires)} ago; ask for a new one"


def _split(token: str) -> tuple[Invite, bytes, bytes]:
    malformed = f"the invite token is malformed: expected {_PREFIX!r} and then base64url"
    token = token.strip()
    if not token:
        raise TrustError("no invite token was given; make one on the gateway with `planetary invite`")
    if not token.startswith(_PREFIX) or len(token) > _MOST_CHARACTERS or not token.isascii():
        raise TrustError(f"{malformed}, found {len(token)} characters that start with {token[:5]!r}")
    text = token[len(_PREFIX) :]
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        invite = decoding.from_json(body, Invite)
        if len(invite.authority_fingerprint) != hashlib.sha256().digest_size:
            raise ValueError("wrong length of the fingerprint")
    except (binascii.Error, msgspec.MsgspecError, ValueError, RecursionError):
        raise TrustError(f"{malformed}; was it copied whole?") from None
    return invite, body, mac


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.new(secret, _PREFIX.encode() + body, hashlib.sha256).digest()


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"
