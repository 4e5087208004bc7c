"""The gateway's own certificate authority, in a folder of files readable only by the user.

    authority.pem   key and certificate of the authority: made once, never replaced
    server.pem      key and certificate that the gateway shows; made anew when it runs out
    invites.key     secret under which invite tokens are made
    invites.jsonl   the invites that a person made, and those that were revoked

Every server certificate carries the authority's certificate in an extension. A client that knows only the authority's
fingerprint, from the invite token, can therefore find the authority without asking for it.
"""

from __future__ import annotations

import secrets
import ssl
import uuid
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, ObjectIdentifier

from planetary.core.errors import ResourceError, TrustError
from planetary.net.certificates import certificate_builder, common_name, fingerprint_of, pair_pem, serving_context
from planetary.net.private_files import create_once, read_private, write_private

SERVER_NAME = "planetary-gateway"
"""The name in every gateway's certificate; clients check it whatever address they dialled."""

# Object identifiers under 2.25 are anybody's own: a UUID as a number (ITU-T X.667). It is drawn from the
# name.
_AUTHORITY_EXTENSION = ObjectIdentifier(
    f"2.25.{uuid.uuid5(uuid.NAMESPACE_URL, 'https://github.com/planetary-compute/planetary#authority').int}"
)
_AUTHORITY_DAYS = 20 * 365
_SERVER_DAYS = 365
_RENEW_DAYS = 30


@dataclass(frozen=True)
class Authority:
    """An opened authority.

    Attributes:
        folder: folder of the files.
        certificate: the authority's certificate, PEM.
        fingerprint: SHA-256 of the certificate's DER bytes; 32 bytes.
        invite_secret: 32 bytes.
        server_fingerprint: the same of the certificate that servers show, which browsers display; 32 bytes.
    """

    folder: Path
    certificate: str
    fingerprint: bytes
    invite_secret: bytes
    server_fingerprint: bytes

    @classmethod
    def open(cls, folder: Path, now: float) -> Authority:
        """Open the authority in `folder`, creating missing files. `now` is Unix time in seconds.

        Raises `TrustError` when a file is damaged, foreign or readable by others, `ResourceError` when the
        folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            key, certificate = load_pair(create_once(folder / "authority.pem", lambda: _new_authority(now)))
            if _ends(certificate) < now:
                raise TrustError(
                    f"the certificate authority in {folder} ran out; delete the folder's files and make new invites"
                )
            server = _keep_server_certificate(folder / "server.pem", key, certificate, now)
            secret = read_private(create_once(folder / "invites.key", lambda: secrets.token_bytes(32)))
        except OSError as error:
            raise ResourceError(f"cannot keep the certificate authority in {folder}: {error}") from None
        if len(secret) != 32:
            raise TrustError(f"{folder / 'invites.key'} must have 32 bytes, it has {len(secret)}")
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        return cls(folder, pem, fingerprint_of(certificate), secret, fingerprint_of(server))

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context with which `serve` presents the gateway's certificate."""
        return serving_context(self.folder / "server.pem")


def fingerprint_in(folder: Path) -> str:
    """Return the fingerprint, hexadecimal, of the authority in a folder; "" where there is none yet.

    Raises `TrustError` when a file is damaged, foreign or readable by others.
    """
    path = folder / "authority.pem"
    return fingerprint_of(load_pair(path)[1]).hex() if path.exists() else ""


def authority_in(
    server_certificate: bytes,
    expected_fingerprint: bytes,
    where: str,
    source: str = "the invite token",
    remedy: str = "ask for a new token",
) -> str:
    """Return the authority (PEM) that a server certificate (DER) carries, once the fingerprint is the expected one.

    Raises `TrustError` that contains the expected and the actual value. `where` names the server in it, `source` the
    place the expected value comes from, and `remedy` what to do where host and port are right.
    """
    try:
        leaf = x509.load_der_x509_certificate(server_certificate)
        extension = leaf.extensions.get_extension_for_oid(_AUTHORITY_EXTENSION).value
        if not isinstance(extension, x509.UnrecognizedExtension):
            raise ValueError("its authority extension has another form")
        authority = x509.load_der_x509_certificate(extension.value)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise TrustError(
            f"the certificate of {where} is not one of a planetary gateway ({error}); expected one of the "
            f"authority whose fingerprint {source} has, {expected_fingerprint.hex()}. Check host and port"
        ) from None
    found = fingerprint_of(authority)
    if not secrets.compare_digest(found, expected_fingerprint):
        raise TrustError(
            f"{where} is not the gateway that {source} is for: expected a certificate authority with the fingerprint "
            f"{expected_fingerprint.hex()}, found {found.hex()}. Check host and port, or {remedy}"
        )
    return authority.public_bytes(serialization.Encoding.PEM).decode()


# --- certificates


def _new_authority(now: float) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = common_name("planetary gateway authority")
    builder = (
        certificate_builder(name, name, key, now, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return pair_pem(key, builder.sign(key, hashes.SHA256()))


def new_server_pair(authority_key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, now: float) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = common_name(SERVER_NAME)
    carried = authority.public_bytes(serialization.Encoding.DER)
    issuer_key = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    builder = (
        certificate_builder(name, authority.subject, key, now, _SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
        .add_extension(x509.UnrecognizedExtension(_AUTHORITY_EXTENSION, carried), critical=False)
    )
    return pair_pem(key, builder.sign(authority_key, hashes.SHA256()))


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _keep_server_certificate(
    path: Path, authority_key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, now: float
) -> x509.Certificate:
    """Return the server's certificate, a new one where it is absent, of another authority, or about to run out."""
    _, current = load_pair(create_once(path, lambda: new_server_pair(authority_key, authority, now)))
    try:
        current.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        signed_here = False
    else:
        signed_here = True
    if not signed_here or _ends(current) - now < _RENEW_DAYS * 86400:
        temporary = write_private(path, new_server_pair(authority_key, authority, now))
        temporary.replace(path)
        _, current = load_pair(path)
    return current


def _ends(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


# --- files


def load_pair(path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    data = read_private(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
        certificate = x509.load_pem_x509_certificate(data)
    except (ValueError, TypeError) as error:
        raise TrustError(f"{path} does not hold a key and a certificate: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise TrustError(f"{path}: the key does not belong to the certificate")
    return key, certificate
