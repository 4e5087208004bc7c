"""TLS for both planes: over memory for the control connection, pinned certificates between peers."""

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
from planetary.net.authority import SERVER_NAME
from planetary.net.certificates import looking_context, self_signed, serving_context
from planetary.net.client import Trust, no_handshake

_PEER_DAYS = 3650
_READ = 64 << 10


class TlsLayer:
    """A TLS connection without its socket: bytes of the network in, bytes of the program out, and back."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        """Begin a handshake; it goes on with every `receive`."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if server else SERVER_NAME
        self._tls = context.wrap_bio(self._in, self._out, server_side=server, server_hostname=name)
        self.ready = False

    def receive(self, data: bytes | memoryview) -> bytes:
        """Take bytes of the network; return what they say. Raises `TrustError` or `PeerError`."""
        self._in.write(data)
        parts = []
        try:
            if not self.ready:
                self._tls.do_handshake()
                self.ready = True
            while part := self._tls.read(_READ):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise TrustError(
                f"expected a master certified by the authority of the invite token, found one that fails: "
                f"{error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            raise PeerError(f"TLS: {error.reason or error}") from None
        return b"".join(parts)

    def send(self, data: bytes) -> None:
        """Encrypt; `outgoing` has the result."""
        self._tls.write(data)

    def outgoing(self) -> bytes:
        """Return and forget the bytes for the network."""
        return self._out.read()


def master_context(sock_of_probe: socket.socket | None, trust: Trust, where: str) -> ssl.SSLContext:
    """Return the context that knows the master of a token.

    The first time, `sock_of_probe` is a fresh connection on which only the certificate is looked at; later it may be
    None. Raises `TrustError`.
    """
    if trust.authority is None:
        if sock_of_probe is None:
            raise TrustError(f"{where}: its certificate was not looked at yet")
        try:
            with looking_context().wrap_socket(sock_of_probe, server_hostname=SERVER_NAME) as tls:
                shown = tls.getpeercert(binary_form=True)
        except OSError as error:
            raise no_handshake(where, error) from None
        trust.recognise(shown, where)
    return trust.context()


class PeerCertificate:
    """A certificate of one communicator's life, which others know by its fingerprint from the master.

    Attributes:
        fingerprint: SHA-256 of the certificate, hexadecimal.
        context: what the listening side shows.
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
        raise TrustError(f"the peer shows another certificate than the master says: {fingerprint}, found {found}")
    return tls
