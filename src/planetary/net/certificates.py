"""Certificates, and the TLS contexts that show them, check them or only look at them."""

from __future__ import annotations

import datetime
import hashlib
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_BACKDATE = datetime.timedelta(days=1)  # tolerance for workers with slow clocks


def serving_context(pair: Path) -> ssl.SSLContext:
    """Return a context that shows the certificate in a file of `pair_pem`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections last; none is resumed
    context.load_cert_chain(pair)
    return context


def client_context(authority: str) -> ssl.SSLContext:
    """Return a context that trusts servers of one authority (PEM) and no others, and checks their name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the chain and the host name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return context


def looking_context() -> ssl.SSLContext:
    """Return a context that checks nothing: the caller checks the fingerprint of the certificate, and sends nothing
    before.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(certificate: x509.Certificate) -> bytes:
    """Return the SHA-256 of a certificate's DER bytes."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def common_name(name: str) -> x509.Name:
    """Return a distinguished name with only a common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: float, days: int
) -> x509.CertificateBuilder:
    """Return a certificate to be completed and signed, valid for `days` from `now` (Unix time in seconds)."""
    start = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATE)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def self_signed(name: str, *, days: int, now: float) -> tuple[bytes, bytes]:
    """Make a key and a self-signed certificate; return both as `pair_pem` does, and the fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = common_name(name)
    certificate = certificate_builder(subject, subject, key, now, days).sign(key, hashes.SHA256())
    return pair_pem(key, certificate), fingerprint_of(certificate)


def pair_pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bytes:
    """Return key and certificate, PEM, one behind the other."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
