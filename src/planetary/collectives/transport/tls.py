"""TLS for both planes: over memory for the control connection, pinned certificates between peers."""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import socket
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from planetary.core.errors import PeerError, TrustError
from planetary.net.authority import SERVER_NAME, authority_in, client_context
from planetary.net.client import Trust

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
    assert trust.invite is not None
    if trust.authority is None:
        if sock_of_probe is None:
            raise TrustError(f"{where}: its certificate was not looked at yet")
        context = _unverified()
        try:
            with context.wrap_socket(sock_of_probe, server_hostname=SERVER_NAME) as tls:
                shown = tls.getpeercert(binary_form=True)
        except (ssl.SSLError, OSError) as error:
            raise TrustError(f"connecting to {where}: expected a TLS handshake, but {error}") from None
        if not shown:
            raise TrustError(f"connecting to {where}: it showed no certificate")
        trust.authority = authority_in(shown, trust.invite.authority_fingerprint, where)
    return client_context(trust.authority)


class PeerCertificate:
    """A certificate of one communicator's life, which others know by its fingerprint from the master.

    Attributes:
        fingerprint: SHA-256 of the certificate, hexadecimal.
        context: what the listening side shows.
    """

    def __init__(self) -> None:
        """Make a key and a certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "planetary peer")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0
        descriptor, path = tempfile.mkstemp()  # mode 0600; the ssl module reads keys from files only
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
            self.context.load_cert_chain(path)
        finally:
            os.unlink(path)


def wrap_to_peer(sock: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """Shake hands with a peer whose certificate must have this fingerprint. Raises `TrustError`, `PeerError`."""
    try:
        tls = _unverified().wrap_socket(sock)
        shown = tls.getpeercert(binary_form=True) or b""
    except (ssl.SSLError, OSError) as error:
        raise PeerError(f"TLS handshake: {error}") from None
    found = hashlib.sha256(shown).hexdigest()
    if not secrets.compare_digest(found, fingerprint):
        tls.close()
        raise TrustError(f"the peer shows another certificate than the master says: {fingerprint}, found {found}")
    return tls


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # what is shown is checked by its fingerprint before anything is sent
    return context
