"""TLS between peers: each pins the certificate the master names."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import ssl
import tempfile
import time
from pathlib import Path

from planetary.core.errors import PeerError, TrustError
from planetary.net.certificates import looking_context, self_signed, serving_context

_PEER_DAYS = 3650


class PeerCertificate:
    """A certificate of one communicator's life, known to others by the fingerprint from the master.

    Attributes:
        fingerprint: SHA-256 of the certificate, hexadecimal.
        context: TLS context of the listening side, with the certificate.
    """

    def __init__(self) -> None:
        """Make a key and a certificate."""
        pair, fingerprint = self_signed("planetary peer", days=_PEER_DAYS, now=time.time())
        self.fingerprint = fingerprint.hex()
        descriptor, path = tempfile.mkstemp()  # mode 0600; the ssl module reads keys from files only
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pair)
            self.context = serving_context(Path(path))
        finally:
            os.unlink(path)


def wrap_to_peer(sock: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """Shake hands with a peer whose certificate must have this fingerprint. Raises `TrustError`, `PeerError`."""
    try:
        tls = looking_context().wrap_socket(sock)
        shown = tls.getpeercert(binary_form=True) or b""
    except (ssl.SSLError, OSError) as error:
        raise PeerError(f"TLS handshake: {error}") from None
    found = hashlib.sha256(shown).hexdigest()
    if not secrets.compare_digest(found, fingerprint):
        tls.close()
        raise TrustError(f"the peer shows another certificate than the master names: {fingerprint}, found {found}")
    return tls
