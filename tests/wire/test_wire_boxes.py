"""The two halves of a connection together: what goes into an outbox comes out of an inbox."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planetary.core.errors import LocalProtocolError, RemoteProtocolError, ResourceError
from planetary.core.tensors import HOST_DTYPES, TensorSpec
from planetary.fleet.protocol.messages import Goodbye, Heartbeat
from planetary.runs.rounds.messages import ROUNDS, Parameters
from planetary.wire import Inbox, Limits, Outbox, ReceivedMessage, expect_tensors, refuse_tensors
from planetary.wire.frames import Kind, TensorHeader, encode_prefix, encode_tensor_header
from planetary.wire.message import Message, stamp
from planetary.wire.streams import Frame


def frame_bytes(frame: Frame) -> bytes:
    return frame.head + bytes(frame.payload or b"")


def drain(outbox: Outbox) -> list[bytes]:
    frames = []
    while (frame := outbox.next_frame()) is not None:
        frames.append(frame_bytes(frame))
    return frames


def chunk(message: int, tensor: int, offset: int, data: bytes) -> bytes:
    header = encode_tensor_header(TensorHeader(message, tensor, offset))
    return encode_prefix(ROUNDS.version, Kind.CHUNK, header, data) + header + data


def same(received: ReceivedMessage, message: Message, tensors: dict[str, np.ndarray]) -> bool:
    return (
        received.message == message
        and list(received.tensors) == list(tensors)
        and all(
            got.shape == sent.shape and got.dtype == sent.dtype and got.tobytes() == sent.tobytes()
            for got, sent in zip(received.tensors.values(), tensors.values(), strict=True)
        )
    )


WEIGHTS = {
    "w": np.arange(50, dtype="<f4").reshape(5, 10),
    "empty": np.zeros((0, 4), "<f8"),
    "scalar": np.array(2.5, "<f4"),
    "transposed": np.arange(12, dtype="<i8").reshape(3, 4).T,
    "strided": np.arange(20, dtype="<u2")[::3],
    "flags": np.array([True, False, True]),
}


def test_arrays_of_every_kind_arrive_whole() -> None:
    outbox, inbox = Outbox(ROUNDS, chunk_bytes=64), Inbox(ROUNDS)
    outbox.add(Parameters(version=3), WEIGHTS)
    frames = drain(outbox)
    assert len(frames) > 6
    received = [r for data in frames for r in inbox.feed(data)]
    assert len(received) == 1
    assert same(received[0], Parameters(version=3, id=1), WEIGHTS)
    assert received[0].nbytes == sum(a.nbytes for a in WEIGHTS.values())
    assert inbox.unfinished() is None
    assert inbox.bytes_received == sum(map(len, frames))


def test_a_message_with_only_empty_tensors_is_whole_at_once() -> None:
    outbox, inbox = Outbox(ROUNDS), Inbox(ROUNDS)
    outbox.add(Parameters(version=0), {"e": np.zeros((3, 0), "<f4")})
    (frame,) = drain(outbox)
    (received,) = inbox.feed(frame)
    assert received.tensors["e"].shape == (3, 0)


def test_bytes_land_in_the_array_the_hook_gave() -> None:
    target = np.zeros(100, "<f4")
    outbox, inbox = Outbox(ROUNDS, chunk_bytes=128), Inbox(ROUNDS, allocate=lambda _message, _spec: target)
    sent = np.arange(100, dtype="<f4")
    outbox.add(Parameters(version=1), {"w": sent})
    frames = drain(outbox)
    inbox.feed(frames[0])
    inbox.feed(frames[1][: 28 + 40])  # prefix and header: now the buffer to fill is the array itself
    buffer = inbox.next_buffer()
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), target)
    assert len(buffer) == 128
    received = [r for data in (frames[1][68:], *frames[2:]) for r in inbox.feed(data)]
    assert received[0].tensors["w"] is target
    assert np.array_equal(target, sent)


def test_every_split_of_the_stream_gives_the_same_messages() -> None:
    outbox = Outbox(ROUNDS, chunk_bytes=16)
    outbox.add(Heartbeat())
    outbox.add(Parameters(version=1), {"w": np.arange(9, dtype="<f4"), "s": np.array(1, "<i8")})
    outbox.add(Goodbye(reason="done"))
    stream = b"".join(drain(outbox))
    for cut in range(len(stream) + 1):
        inbox = Inbox(ROUNDS)
        received = inbox.feed(stream[:cut])
        assert (inbox.unfinished() is None) == (cut in message_ends(stream))
        received += inbox.feed(stream[cut:])
        assert [type(r.message) for r in received] == [Heartbeat, Goodbye, Parameters]
        assert same(
            received[2],
            Parameters(version=1, id=2),
            {"w": np.arange(9, dtype="<f4"), "s": np.array(1, "<i8")},
        )
    one_by_one = Inbox(ROUNDS)
    assert len([r for byte in stream for r in one_by_one.feed(bytes([byte]))]) == 3


def message_ends(stream: bytes) -> set[int]:
    """Positions between frames at which no message is half sent: before, after the heartbeat, at the end."""
    first = 28 + sum(struct.unpack_from("<II", stream, 8))
    return {0, first, len(stream)}


def test_control_overtakes_chunks_and_large_messages_take_turns() -> None:
    outbox = Outbox(ROUNDS, chunk_bytes=10)
    first = outbox.add(Parameters(version=1), {"w": np.zeros(30, "u1")})
    second = outbox.add(Parameters(version=2), {"w": np.zeros(30, "u1")})
    order = []
    while (frame := outbox.next_frame()) is not None:
        if len(order) == 3:
            outbox.add(Heartbeat())
        name = {first: "1", second: "2"}.get(frame.outgoing, "beat")  # type: ignore[arg-type]
        order.append(name + ("" if frame.payload is not None else "!") + ("." if frame.last else ""))
    assert order == ["1!", "2!", "1", "2", "beat!.", "1", "2", "1.", "2."]


def test_a_withdrawn_message_is_dropped_on_both_sides() -> None:
    outbox, inbox = Outbox(ROUNDS, chunk_bytes=10), Inbox(ROUNDS)
    unsent = outbox.add(Goodbye(reason="never"))
    outbox.withdraw(unsent)
    large = outbox.add(Parameters(version=1), {"w": np.zeros(30, "u1")})
    for _ in range(2):
        frame = outbox.next_frame()
        assert frame is not None
        assert inbox.feed(frame_bytes(frame)) == []
    assert inbox.unfinished() == "Parameters 2 lacks 20 bytes of its tensors"
    outbox.withdraw(large)
    outbox.withdraw(large)
    outbox.add(Heartbeat())
    received = [r for data in drain(outbox) for r in inbox.feed(data)]
    assert [r.message for r in received] == [Heartbeat(id=3)]
    assert inbox.unfinished() is None


def test_what_cannot_be_sent_leaves_no_trace() -> None:
    outbox = Outbox(ROUNDS)
    with pytest.raises(LocalProtocolError, match="numpy type"):
        outbox.add(Parameters(version=1), {"w": np.zeros(2, ">f4")})
    assert not outbox
    assert outbox.add(Heartbeat()).message.id == 1
    with pytest.raises(LocalProtocolError, match="chunk has"):
        Outbox(ROUNDS, chunk_bytes=5 << 20)


def test_a_cleared_outbox_goes_on_counting() -> None:
    outbox = Outbox(ROUNDS)
    outbox.add(Parameters(version=1), {"w": np.zeros(3)})
    outbox.next_frame()
    outbox.add(Heartbeat())
    outbox.clear()
    assert outbox.next_frame() is None
    assert outbox.add(Goodbye(reason="over")).message.id == 3


# --- what a broken or hostile peer sends


def test_a_repeated_id_is_dropped_and_counted() -> None:
    outbox, inbox = Outbox(ROUNDS, chunk_bytes=16), Inbox(ROUNDS)
    outbox.add(Parameters(version=1), {"w": np.arange(10, dtype="<f4")})
    outbox.add(Heartbeat())
    frames = drain(outbox)
    asked: list[str] = []
    stream = b"".join(frames)
    assert len(inbox.feed(stream)) == 2
    inbox.allocate = lambda _message, spec: asked.append(spec.name) or spec.empty()
    assert inbox.feed(stream) == []
    assert inbox.duplicates == 2
    assert asked == []
    assert inbox.unfinished() is None


def test_a_repetition_of_a_message_under_way_is_refused() -> None:
    outbox, inbox = Outbox(ROUNDS), Inbox(ROUNDS)
    outbox.add(Parameters(version=1), {"w": np.arange(10, dtype="<f4")})
    declared, _ = drain(outbox)
    inbox.feed(declared)
    with pytest.raises(RemoteProtocolError, match="came again"):
        inbox.feed(declared)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([chunk(9, 0, 0, b"x")], "message 9 has no tensors under way"),
        ([chunk(1, 1, 0, b"x")], "found a run of number 1"),
        ([chunk(1, 0, 4, b"x")], "starts at byte 0 and ends by 40, found one of 1 bytes at 4"),
        ([chunk(1, 0, 0, b"x" * 41)], "ends by 40"),
        ([chunk(1, 0, 0, b"x" * 20), chunk(1, 0, 0, b"x" * 20)], "starts at byte 20"),
        ([chunk(1, 0, 0, b"x" * 40), chunk(1, 0, 40, b"x")], "message 1 has no tensors under way"),
        ([chunk(1, 0, 2**64 - 1, b"x")], "found one of 1 bytes at 18446744073709551615"),
    ],
)
def test_runs_that_belong_nowhere_are_refused(frames: list[bytes], text: str) -> None:
    outbox, inbox = Outbox(ROUNDS), Inbox(ROUNDS)
    outbox.add(Parameters(version=1), {"w": np.arange(10, dtype="<f4")})
    inbox.feed(drain(outbox)[0])
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        inbox.feed(b"".join(frames))
    for call in (inbox.next_buffer, lambda: inbox.filled(0)):
        with pytest.raises(RemoteProtocolError) as again:
            call()
        assert again.value is caught.value


def test_a_withdrawal_of_nothing_is_refused() -> None:
    header = encode_tensor_header(TensorHeader(4, 0, 0))
    with pytest.raises(RemoteProtocolError, match="message 4 has no tensors"):
        Inbox(ROUNDS).feed(encode_prefix(ROUNDS.version, Kind.WITHDRAW, header, b"") + header)


def test_hooks_refuse_before_a_byte_is_accepted() -> None:
    wanted = [TensorSpec("w", "f32", (10,)), TensorSpec("b", "bf16", (2,))]
    good = {"w": np.zeros(10, "<f4"), "b": np.zeros(2, "<u2")}
    assert declared_to(Inbox(ROUNDS, allocate=expect_tensors(wanted)), good) is None
    for bad, text in (
        ({"v": np.zeros(10, "<f4")}, "named 'v' is not expected"),
        ({"w": np.zeros(11, "<f4")}, r"must be f32\[10\], declared was f32\[11\]"),
        ({"w": np.zeros(10, "<f8")}, r"declared was f64\[10\]"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            declared_to(Inbox(ROUNDS, allocate=expect_tensors(wanted)), bad)
    with pytest.raises(RemoteProtocolError, match="may have no tensors"):
        declared_to(Inbox(ROUNDS, allocate=refuse_tensors), good)


def declared_to(inbox: Inbox, tensors: dict[str, np.ndarray]) -> None:
    outbox = Outbox(ROUNDS)
    outbox.add(Parameters(version=1), tensors)
    inbox.feed(drain(outbox)[0])


@pytest.mark.parametrize(
    "array",
    [np.zeros(9, "<f4"), np.zeros(10, "<f8"), np.zeros(20, "<f4")[::2], np.frombuffer(bytes(40), "<f4")],
)
def test_a_hook_that_gives_the_wrong_array_is_a_bug_here(array: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError, match="allocation hook gave"):
        declared_to(Inbox(ROUNDS, allocate=lambda _message, _spec: array), {"w": np.zeros(10, "<f4")})


def test_no_memory_is_named_as_that() -> None:
    def full(_message: Message, _spec: TensorSpec) -> np.ndarray:
        raise MemoryError

    with pytest.raises(ResourceError, match="no memory for the 40 bytes of 'w'"):
        declared_to(Inbox(ROUNDS, allocate=full), {"w": np.zeros(10, "<f4")})


def test_tensors_under_way_are_capped_together() -> None:
    inbox, outbox = Inbox(ROUNDS, Limits(tensor_bytes=100)), Outbox(ROUNDS)
    for version in range(3):
        outbox.add(Parameters(version=version), {"w": np.zeros(40, "u1")})
    frames = drain(outbox)
    inbox.feed(frames[0])
    inbox.feed(frames[1])
    with pytest.raises(RemoteProtocolError, match="100 bytes together, they would have 120"):
        inbox.feed(frames[2])
    inbox = Inbox(ROUNDS, Limits(messages_under_way=1))
    inbox.feed(frames[0])
    with pytest.raises(RemoteProtocolError, match="at most 1 messages"):
        inbox.feed(frames[1])


def test_every_flipped_bit_is_noticed() -> None:
    outbox = Outbox(ROUNDS, chunk_bytes=24)
    outbox.add(Parameters(version=1), {"w": np.arange(9, dtype="<f4")})
    stream = b"".join(drain(outbox))
    for bit in range(8 * len(stream)):
        bad = bytearray(stream)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            Inbox(ROUNDS).feed(bad)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=400))
def test_garbage_is_refused_or_waited_for(data: bytes) -> None:
    inbox = Inbox(ROUNDS)
    if len(data) >= 5 or (len(data) == 4 and data != b"PLNT"):
        with pytest.raises(RemoteProtocolError):
            inbox.feed(data)
    else:
        assert inbox.feed(data) == []
        assert (inbox.unfinished() is None) == (not data)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([1, 2, 3]),
    header=st.binary(max_size=80),
    payload=st.binary(max_size=80),
    whole=st.booleans(),
)
def test_well_framed_garbage_is_refused(kind: int, header: bytes, payload: bytes, whole: bool) -> None:
    outbox, inbox = Outbox(ROUNDS), Inbox(ROUNDS)
    outbox.add(Parameters(version=1), {"w": np.arange(10, dtype="<f4")})
    inbox.feed(drain(outbox)[0])
    data = encode_prefix(ROUNDS.version, Kind(kind), header, payload) + header + payload
    with pytest.raises(RemoteProtocolError):
        inbox.feed(data if whole else data + bytes(28))


def test_hostile_length_with_right_checksum_allocates_nothing() -> None:
    fields = struct.pack("<4sBBHIIII", b"PLNT", ROUNDS.version, 2, 0, 40, 2**32 - 1, 0, 0)
    inbox = Inbox(ROUNDS)
    with pytest.raises(RemoteProtocolError, match="may have 1 to 4194304 bytes, it has 4294967295"):
        inbox.feed(fields + struct.pack("<I", zlib.crc32(fields)))


# --- any interleaving

arrays = st.builds(
    lambda dtype, shape, seed: (
        np.random.default_rng(seed)
        .integers(0, 256, int(np.prod(shape, dtype=int)) * HOST_DTYPES[dtype].itemsize, dtype=np.uint8)
        .view(HOST_DTYPES[dtype] if dtype != "i1" else np.uint8)
        .reshape(shape)
    ),
    st.sampled_from(sorted(HOST_DTYPES)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 1000),
)
sends = st.lists(
    st.one_of(st.none(), st.dictionaries(st.text(min_size=1, max_size=8), arrays, min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sends=sends,
    chunk_bytes=st.integers(1, 40),
    pieces=st.lists(st.integers(1, 200), min_size=1),
    data=st.data(),
)
def test_any_interleaving_round_trips(
    sends: list[dict[str, np.ndarray] | None], chunk_bytes: int, pieces: list[int], data: st.DataObject
) -> None:
    outbox, inbox = Outbox(ROUNDS, chunk_bytes=chunk_bytes), Inbox(ROUNDS)
    expected: dict[int, tuple[Message, dict[str, np.ndarray]]] = {}
    stream = bytearray()
    take: Callable[[], Frame | None] = outbox.next_frame
    for tensors in sends:
        message = Heartbeat() if tensors is None else Parameters(version=len(expected))
        sent = outbox.add(message, tensors)
        expected[sent.message.id] = (stamp(message, sent.message.id), tensors or {})
        for _ in range(data.draw(st.integers(0, 3))):
            if (frame := take()) is not None:
                stream += frame_bytes(frame)
    stream += b"".join(drain(outbox))
    received, position, turn = [], 0, 0
    while position < len(stream):
        size = pieces[turn % len(pieces)]
        received += inbox.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert len(received) == len(expected)
    assert all(same(r, *expected[r.message.id]) for r in received)
    assert inbox.unfinished() is None
