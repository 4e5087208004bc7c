"""Who a machine is: an Ed25519 key made at the first join (RFC 8032).

A machine proves possession of the key by signing the greeting together with the fingerprint of the server's authority.
The greeting travels inside TLS to a server recognised before, so no third party sees the signature; and a server could
use it with its own authority only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from planetary.core.errors import ResourceError, TrustError
from planetary.net.private_files import create_once, read_private
from planetary.net.session import Greeting

G = TypeVar("G", bound=Greeting)

_KEY_BYTES, _SIGNATURE_BYTES = 32, 64
_PURPOSE = b"planetary greeting 1\0"  # no signature for one purpose is good for another
_SHOWN = 12  # digits of a key that people are shown


class Identity:
    """A machine's private key."""

    def __init__(self, seed: bytes) -> None:
        """Use the key derived from `seed`, 32 random bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def open(cls, path: Path) -> Identity:
        """Read the key in `path`; make it if there is none.

        Raises `TrustError` when the file is damaged or readable by others, `ResourceError` when it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            seed = read_private(create_once(path, _new_seed))
        except OSError as error:
            raise ResourceError(f"cannot keep this machine's key in {path}: {error.strerror or error}") from None
        if len(seed) != _KEY_BYTES:
            raise TrustError(
                f"{path} must have {_KEY_BYTES} bytes, it has {len(seed)}; delete it, and this machine gets a new key: "
                "in runs that know it, it needs another --node-name then"
            )
        return cls(seed)

    def sign(self, hello: G, authority_fingerprint: bytes) -> G:
        """Return the greeting with this identity and the proof."""
        hello = msgspec.structs.replace(hello, identity=self.public, proof="")
        return msgspec.structs.replace(hello, proof=self._key.sign(_statement(hello, authority_fingerprint)).hex())

    def __repr__(self) -> str:
        """Name the identity without the private key."""
        return f"Identity({shown(self.public)})"


def check_proof(hello: Greeting, authority_fingerprint: bytes) -> None:
    """Raise `TrustError` unless a greeting proves possession of the named key."""
    try:
        key, signature = bytes.fromhex(hello.identity), bytes.fromhex(hello.proof)
        if (len(key), len(signature)) != (_KEY_BYTES, _SIGNATURE_BYTES) or key.hex() != hello.identity:
            raise ValueError
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _statement(hello, authority_fingerprint))
    except (ValueError, InvalidSignature):
        who = f"{hello.sender()} does not prove that it has the key {shown(hello.identity)!r}"
        raise TrustError(f"{who}: its signature is not of that key") from None


def shown(identity: str) -> str:
    """Return an identity as people see it: the beginning of the public key; "" for none."""
    return identity[:_SHOWN]


def _new_seed() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )


def _statement(hello: Greeting, authority_fingerprint: bytes) -> bytes:
    """Return the signed bytes: everything in a greeting, and the addressee."""
    return _PURPOSE + authority_fingerprint + msgspec.json.encode(msgspec.structs.replace(hello, proof="", id=0))
