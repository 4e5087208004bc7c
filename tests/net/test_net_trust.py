from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import os
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from net_support import listening, open_authority, run, token_for

from planetary.core.errors import ResourceError, TrustError
from planetary.fleet.protocol.messages import FABRIC, Shutdown
from planetary.net import Authority, Trust, authority, connect
from planetary.net.authority import SERVER_NAME, authority_in
from planetary.net.certificates import pair_pem
from planetary.net.invite import mint, read, verify

DAY = 86400.0
SECRET = bytes(range(32))
PRINT = bytes(range(100, 132))


def server_certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())


# --- the authority


def test_an_authority_is_made_once_and_its_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "authority"
    first = open_authority(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"authority.pem", "server.pem", "invites.key"}
    assert open_authority(folder) == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        assert folder.stat().st_mode & 0o777 == 0o700
    names = server_certificate(folder).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]


def test_several_at_once_agree_on_one_authority(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(open_authority, [tmp_path] * 8))
    assert len({(a.fingerprint, a.invite_secret) for a in opened}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"authority.pem", "server.pem", "invites.key"}
    opened[0].server_context()


def test_server_certificate_is_renewed_under_one_authority(tmp_path: Path) -> None:
    now = time.time()
    first = Authority.open(tmp_path, now)
    old = server_certificate(tmp_path)
    Authority.open(tmp_path, now + 300 * DAY)
    assert server_certificate(tmp_path) == old
    later = Authority.open(tmp_path, now + 340 * DAY)
    new = server_certificate(tmp_path)
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert later.fingerprint == first.fingerprint
    assert (tmp_path / "server.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(TrustError, match="ran out"):
        Authority.open(tmp_path, now + 21 * 365 * DAY)


def test_a_server_certificate_of_another_authority_is_replaced(tmp_path: Path) -> None:
    open_authority(tmp_path / "a")
    open_authority(tmp_path / "b")
    (tmp_path / "b" / "server.pem").replace(tmp_path / "a" / "server.pem")
    opened = open_authority(tmp_path / "a")
    shown = server_certificate(tmp_path / "a").public_bytes(authority.serialization.Encoding.DER)
    assert authority_in(shown, opened.fingerprint, "here") == opened.certificate


def test_damaged_or_open_files_are_refused(tmp_path: Path) -> None:
    open_authority(tmp_path)
    key = tmp_path / "authority.pem"
    good = key.read_bytes()
    key.write_bytes(good[: len(good) // 2])
    with pytest.raises(TrustError, match="does not hold a key and a certificate"):
        open_authority(tmp_path)
    other = tmp_path / "other"
    open_authority(other)
    split = good.index(b"-----BEGIN CERTIFICATE")
    foreign = (other / "authority.pem").read_bytes()
    key.write_bytes(good[:split] + foreign[foreign.index(b"-----BEGIN CERTIFICATE") :])
    with pytest.raises(TrustError, match="does not belong"):
        open_authority(tmp_path)
    key.write_bytes(good)
    (tmp_path / "invites.key").write_bytes(b"short")
    with pytest.raises(TrustError, match="must have 32 bytes"):
        open_authority(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    open_authority(tmp_path)
    (tmp_path / "authority.pem").chmod(0o640)
    with pytest.raises(TrustError, match=r"its mode is 640.*chmod 600"):
        open_authority(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot keep the certificate authority in"):
        open_authority(tmp_path / "file")


# --- tokens


def check(token: str, **changes: object) -> object:
    arguments: dict = {
        "secret": SECRET,
        "authority_fingerprint": PRINT,
        "role": "worker",
        "now": 1000.0,
    } | changes
    return verify(token, **arguments)


def test_a_token_says_what_it_was_made_for() -> None:
    token = mint(SECRET, PRINT, expires=2000.0, roles=["worker"])
    assert token.startswith("plt1.")
    assert not set(token) & set("=+/ \n")
    invite = check(token + "\n")
    assert invite == read(token)
    assert (read(token).authority_fingerprint, read(token).roles, read(token).expires) == (
        PRINT,
        ("worker",),
        2000,
    )
    assert check(mint(SECRET, PRINT), now=1e12)
    assert mint(SECRET, PRINT) != mint(SECRET, PRINT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"secret": bytes(32)}, "not made by this gateway"),
        ({"authority_fingerprint": bytes(32)}, "not made by this gateway"),
        ({"now": 2000.0}, "expired 0 seconds ago"),
        ({"now": 2000.0 + 3 * DAY}, "expired 3 days ago"),
        ({"role": "supervisor"}, "for the role worker, not for 'supervisor'"),
    ],
)
def test_unfit_token_is_refused_without_being_shown(changes: dict, text: str) -> None:
    token = mint(SECRET, PRINT, expires=2000.0, roles=["worker"])
    with pytest.raises(TrustError, match=text) as caught:
        check(token, **changes)
    assert token[5:40] not in str(caught.value)


def test_a_revoked_token_is_refused() -> None:
    token = mint(SECRET, PRINT)
    assert check(token, revoked={"another"})
    with pytest.raises(TrustError, match="was revoked"):
        check(token, revoked={read(token).id})


@pytest.mark.parametrize(
    "token",
    [
        "",
        "   ",
        "hello",
        "plt1.",
        "plt2." + "A" * 100,
        "plt1." + "A" * 100,
        "plt1.!!!",
        "plt1.ü",
        "plt1." + "A" * 5000,
    ],
)
def test_malformed_tokens_are_refused(token: str) -> None:
    with pytest.raises(TrustError, match="invite token"):
        check(token)
    with pytest.raises(TrustError, match="invite token"):
        read(token)


def test_every_changed_character_of_a_token_is_noticed() -> None:
    token = mint(SECRET, PRINT, expires=2000.0)
    check(token)
    data = base64.urlsafe_b64decode(token[5:] + "=" * (-len(token[5:]) % 4))
    for index in range(len(data)):
        bad = bytearray(data)
        bad[index] ^= 1
        with pytest.raises(TrustError):
            check("plt1." + base64.urlsafe_b64encode(bad).rstrip(b"=").decode())
    for length in range(len(token)):
        with pytest.raises(TrustError):
            check(token[:length])


def test_a_trust_does_not_print_its_token() -> None:
    token = mint(SECRET, PRINT)
    assert token[5:20] not in repr(Trust(token))
    assert "plain loopback" in repr(Trust.plain_loopback())


# --- who the gateway is


def test_authority_is_found_by_fingerprint_and_remembered(tmp_path: Path) -> None:
    opened = open_authority(tmp_path)
    trust = Trust(token_for(opened))

    async def join_twice() -> None:
        async with listening(opened.server_context()) as (server, taken):
            for _ in range(2):
                client = await connect(server.host, server.port, trust, FABRIC)
                await client.send(Shutdown(reason="hello"))
                end = await taken.get()
                assert (await end.receive(5)).message == Shutdown(reason="hello", id=1)
                await client.close("done")
                assert trust.authority == opened.certificate
            # The connection that only looked at the certificate never came as far as the callback.
            assert taken.empty()

    run(join_twice())


def test_another_gateway_is_told_apart_by_its_fingerprint(tmp_path: Path) -> None:
    ours, theirs = open_authority(tmp_path / "ours"), open_authority(tmp_path / "theirs")

    async def dial() -> None:
        async with listening(theirs.server_context()) as (server, taken):
            with pytest.raises(TrustError, match="is not the gateway that the invite token is for") as caught:
                await connect(server.host, server.port, Trust(token_for(ours)), FABRIC)
            assert ours.fingerprint.hex() in str(caught.value)
            assert theirs.fingerprint.hex() in str(caught.value)
            assert taken.empty()

    run(dial())


def impostor_context(folder: Path, ours: Authority, theirs: Authority, now: float) -> ssl.SSLContext:
    """Shows our authority's certificate, but is signed by another."""
    their_key, _ = authority.load_pair(theirs.folder / "authority.pem")
    our_certificate = x509.load_pem_x509_certificate(ours.certificate.encode())
    path = folder / "impostor.pem"
    path.write_bytes(authority.new_server_pair(their_key, our_certificate, now))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


def test_impostor_with_our_authority_fails_the_handshake(tmp_path: Path) -> None:
    """An impostor with our authority in its certificate fails the handshake."""
    ours, theirs = open_authority(tmp_path / "ours"), open_authority(tmp_path / "theirs")
    context = impostor_context(tmp_path, ours, theirs, time.time())

    async def dial() -> None:
        async with listening(context) as (server, taken):
            with pytest.raises(TrustError, match="expected a certificate for 'planetary-gateway'"):
                await connect(server.host, server.port, Trust(token_for(ours)), FABRIC)
            assert taken.empty()

    run(dial())


def test_an_expired_server_certificate_fails_the_handshake(tmp_path: Path) -> None:
    key, _ = authority.load_pair(open_authority(tmp_path).folder / "authority.pem")
    ours = open_authority(tmp_path)
    certificate = x509.load_pem_x509_certificate(ours.certificate.encode())
    long_ago = authority.new_server_pair(key, certificate, time.time() - 400 * DAY)
    (tmp_path / "server.pem").write_bytes(long_ago)

    async def dial() -> None:
        async with listening(ours.server_context()) as (server, _):
            with pytest.raises(TrustError, match="expired"):
                await connect(server.host, server.port, Trust(token_for(ours)), FABRIC)

    run(dial())


def test_any_other_tls_server_is_told_apart(tmp_path: Path) -> None:
    ours = open_authority(tmp_path)
    key, certificate = authority.load_pair(ours.folder / "authority.pem")
    path = tmp_path / "web.pem"
    path.write_bytes(pair_pem(key, certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)

    async def dial() -> None:
        async with listening(context) as (server, _):
            with pytest.raises(TrustError, match="not one of a planetary gateway"):
                await connect(server.host, server.port, Trust(token_for(ours)), FABRIC)
            await asyncio.sleep(0)

    run(dial())
