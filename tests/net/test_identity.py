"""A machine's key: made once, kept private, and proved by each peer that greets with it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from planetary.core.errors import ResourceError, TrustError
from planetary.fleet.protocol.messages import FABRIC, Hello, Refused, Welcome
from planetary.net.handshake import TokenCheck, judge_hello
from planetary.net.identity import Identity, check_proof
from planetary.net.invite import mint

SECRET, PRINT = bytes(range(32)), bytes(range(100, 132))
WELCOME = Welcome(run="r", heartbeat_s=1.0, silent_after_s=5.0)
HELLO = Hello(
    role="worker",
    protocol=FABRIC.version,
    software="1",
    token=mint(SECRET, PRINT),
    worker="a/0",
    node="a",
    pid=1,
)


def judge(hello: Hello, *, identified: bool = True) -> Welcome | Refused:
    tokens = TokenCheck(secret=SECRET, authority_fingerprint=PRINT, identified=identified)
    return judge_hello(hello, FABRIC.version, welcome=WELCOME, software="1", tokens=tokens, now=0.0)


def test_a_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.key"
    first = Identity.open(path)
    assert Identity.open(path).public == first.public
    assert Identity.open(tmp_path / "other.key").public != first.public
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        with pytest.raises(TrustError, match="readable by its owner only"):
            Identity.open(path)


def test_a_damaged_key_and_a_place_for_none_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path)
    path.write_bytes(b"short")
    with pytest.raises(TrustError, match=r"must have 32 bytes, it has 5; delete it.*--node-name"):
        Identity.open(path)
    with pytest.raises(ResourceError, match="cannot keep this machine's key"):
        Identity.open(path / "below-a-file" / "identity.key")


def test_greeting_proves_its_key_to_this_authority() -> None:
    """A greeting proves its key to this authority and says what was signed."""
    identity = Identity(bytes(32))
    signed = identity.sign(HELLO, PRINT)
    assert signed.identity == identity.public
    check_proof(msgspec.structs.replace(signed, id=7), PRINT)  # messages are numbered when they are sent
    assert judge(signed) is WELCOME
    wrong = {
        "another name": msgspec.structs.replace(signed, worker="b/0"),
        "another token": msgspec.structs.replace(signed, token=mint(SECRET, PRINT)),
        "another role": msgspec.structs.replace(signed, role="supervisor"),
        "another key": msgspec.structs.replace(signed, identity=Identity(bytes(range(32))).public),
        "capitals": msgspec.structs.replace(signed, identity=signed.identity.upper()),
        "no key": msgspec.structs.replace(signed, identity=""),
        "no proof": msgspec.structs.replace(signed, proof=""),
        "nonsense": msgspec.structs.replace(signed, proof="zz"),
        "for another gateway": identity.sign(HELLO, SECRET),
        "nothing": HELLO,
    }
    for name, hello in wrong.items():
        refused = judge(hello)
        assert isinstance(refused, Refused), name
        assert refused.code == "identity", name
        assert "does not prove" in refused.reason


def test_keyless_server_takes_none_and_believes_no_wrong_key() -> None:
    """A server that asks for no key takes none and believes no wrong one."""
    assert judge(HELLO, identified=False) is WELCOME
    lying = msgspec.structs.replace(HELLO, identity=Identity(bytes(32)).public)
    assert isinstance(judge(lying, identified=False), Refused)


def test_a_key_is_not_shown_whole() -> None:
    identity = Identity(bytes(32))
    assert repr(identity) == f"Identity({identity.public[:12]})"
