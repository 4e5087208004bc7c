from __future__ import annotations

import struct
import zlib

import pytest

from planetary.core.errors import RemoteProtocolError
from planetary.fleet.protocol.messages import FABRIC
from planetary.wire.frames import (
    PREFIX_BYTES,
    Kind,
    TensorHeader,
    decode_prefix,
    decode_tensor_header,
    encode_prefix,
    encode_tensor_header,
    skew_text,
)
from planetary.wire.limits import MAX_CHUNK_BYTES, STRANGER, Limits


def raw_prefix(kind: int, header_bytes: int, payload_bytes: int, zero: int = 0) -> bytes:
    """A prefix with any lengths and a right checksum: what a hostile peer would send."""
    fields = struct.pack("<4sBBHIIII", b"PLNT", FABRIC.version, kind, zero, header_bytes, payload_bytes, 0, 0)
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_a_prefix_has_the_documented_bytes() -> None:
    data = encode_prefix(FABRIC.version, Kind.CONTROL, b"ab", b"xyz")
    assert len(data) == PREFIX_BYTES == 28
    assert data[:8] == b"PLNT" + bytes([FABRIC.version, 1, 0, 0])
    assert data[8:16] == struct.pack("<II", 2, 3)
    prefix = decode_prefix(data, FABRIC.version, Limits())
    assert (prefix.kind, prefix.header_bytes, prefix.payload_bytes) == (Kind.CONTROL, 2, 3)
    assert (prefix.header_crc, prefix.payload_crc) == (zlib.crc32(b"ab"), zlib.crc32(b"xyz"))


@pytest.mark.parametrize(
    ("kind", "header", "payload"),
    [
        (1, 0, 0),  # a message of nothing
        (1, 0, (1 << 20) + 1),
        (1, (1 << 20) + 1, 2),
        (2, 0, 10),  # a run that belongs nowhere
        (2, (64 << 10) + 1, 10),
        (2, 40, 0),  # a run of nothing, which could be sent for ever
        (2, 40, MAX_CHUNK_BYTES + 1),
        (3, 40, 1),
        (0, 40, 1),
        (9, 40, 1),
    ],
)
def test_lengths_and_kinds_out_of_range_are_refused_unread(kind: int, header: int, payload: int) -> None:
    """Lengths and kinds out of range are refused before anything is read."""
    with pytest.raises(RemoteProtocolError, match=r"expected kind|may have"):
        decode_prefix(raw_prefix(kind, header, payload), FABRIC.version, Limits())


def test_a_stranger_may_send_only_small_messages() -> None:
    assert decode_prefix(raw_prefix(1, 0, 64 << 10), FABRIC.version, STRANGER).payload_bytes == 64 << 10
    for prefix in (raw_prefix(1, 0, (64 << 10) + 1), raw_prefix(1, 2, 100)):
        with pytest.raises(RemoteProtocolError, match="may have"):
            decode_prefix(prefix, FABRIC.version, STRANGER)


def test_every_flipped_bit_of_a_prefix_is_noticed() -> None:
    good = encode_prefix(FABRIC.version, Kind.CHUNK, b"h" * 40, b"p" * 100)
    decode_prefix(good, FABRIC.version, Limits())
    for bit in range(8 * PREFIX_BYTES):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            decode_prefix(bad, FABRIC.version, Limits())


@pytest.mark.parametrize(("theirs", "who"), [(FABRIC.version + 1, "this side"), (FABRIC.version - 1, "the peer")])
def test_version_skew_is_noticed_from_the_first_five_bytes(theirs: int, who: str) -> None:
    # Everything after the version may mean something else by then, checksums included.
    data = b"PLNT" + bytes([theirs]) + b"\xee" * (PREFIX_BYTES - 5)
    with pytest.raises(RemoteProtocolError, match=f"upgrade planetary on {who}") as caught:
        decode_prefix(data, FABRIC.version, Limits())
    assert str(caught.value) == skew_text(theirs, FABRIC.version)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"GET / HTTP/1.1", "speaks HTTP"),
        (b"\x16\x03\x01\x02", "speaks TLS"),
        (b"SSH-2.0", "speaks SSH"),
        (b"\0\0\0\x14", "upgrade planetary on the peer"),
        (b"NICK", "does not speak planetary's protocol"),
    ],
)
def test_other_protocols_are_named(data: bytes, hint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"expected it to start with b'PLNT'.*{hint}"):
        decode_prefix(data.ljust(PREFIX_BYTES, b"\0"), FABRIC.version, Limits())


@pytest.mark.parametrize("header", [TensorHeader(1, 0, 0), TensorHeader(2**63 - 1, 2**32 - 1, 2**64 - 1)])
def test_tensor_headers_round_trip(header: TensorHeader) -> None:
    assert decode_tensor_header(encode_tensor_header(header)) == header


def test_malformed_tensor_headers_are_protocol_errors() -> None:
    good = encode_tensor_header(TensorHeader(7, 3, 1 << 40))
    for length in range(len(good)):
        with pytest.raises(RemoteProtocolError, match="header is malformed"):
            decode_tensor_header(good[:length])
    refused = 0
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            decode_tensor_header(bytes(bad))
        except RemoteProtocolError:
            refused += 1
    assert refused > 50  # the rest are other well-formed headers; the frame's checksum tells them apart
