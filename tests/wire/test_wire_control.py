from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.tensors import HOST_DTYPES, TensorSpec
from planetary.fleet.protocol import messages
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.messages import ROUNDS
from planetary.wire.frames import declare, decode_declaration, encode_declaration
from planetary.wire.limits import Limits
from planetary.wire.message import stamp

SPEC = TensorSpec("w", "f32", (2, 3))
EXAMPLES: list[messages.Message] = [
    messages.Hello(
        role="worker",
        protocol=1,
        software="0",
        token="",
        worker="node-a/0",
        node="node-a",
        pid=7,
        target="host",
    ),
    messages.Refused(code="token", reason="expired"),
    messages.Heartbeat(),
    messages.WorkerExited(pid=3, code=-9, restart_in_s=None, reason="killed"),
    rm.TrainingJob(
        run="r",
        artifact="a" * 64,
        buffers="",
        spec=StepSpec("gpt", (SPEC,), (), (SPEC,), (SPEC,), "d" * 64),
        inner_state="persist",
        schedule=Schedule(kind="wsd", peak=0.01),
    ),
    rm.TrainTask(
        task=1,
        round=2,
        version=1,
        lease=5,
        slice=rm.Slice("file:///t.u16", "ui16", 10, 20),
        steps=4,
        first_step=8,
    ),
    messages.TaskFailed(task=1, kind="numerics", reason="loss is NaN", step=3),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_messages_round_trip_as_tagged_json(message: messages.Message) -> None:
    stamped = stamp(message, 12)
    data = ROUNDS.encode(stamped, Limits())
    assert json.loads(data)["type"] == type(message).__name__
    assert ROUNDS.decode(data) == stamped


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"type":"Nonsense","id":1}',
        b'{"id":1}',
        b'{"type":"Goodbye","id":1}',
        b'{"type":"Goodbye","id":1,"reason":3}',
        b'{"type":"Goodbye","id":1,"reason":"\xff"}',
        b'{"type":"Goodbye","id":"1","reason":""}',
        b'{"type":"Heartbeat"}',
        b'{"type":"Heartbeat","id":0}',
        b'{"type":"Heartbeat","id":-4}',
        b'{"type":"Heartbeat","id":9223372036854775808}',
        b'{"type":"Heartbeat","id":1e400}',
        b'{"type":"Heartbeat","id":1,"more":' + b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:50]),
)
def test_malformed_messages_are_protocol_errors(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="reading"):
        ROUNDS.decode(data)


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_random_bytes_are_never_another_error(data: bytes) -> None:
    for decode in (ROUNDS.decode, lambda d: decode_declaration(d or b"{", Limits())):
        with pytest.raises(RemoteProtocolError):
            decode(data)


def test_a_field_of_a_newer_peer_is_ignored() -> None:
    assert ROUNDS.decode(b'{"type":"Heartbeat","id":3,"mood":"good"}') == messages.Heartbeat(id=3)


def test_a_message_over_the_cap_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="may have 1048576 bytes, it has"):
        ROUNDS.encode(messages.Goodbye(reason="x" * (1 << 20)), Limits())


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_number_without_json_form_is_not_sent(loss: float) -> None:
    with pytest.raises(LocalProtocolError, match="'loss'"):
        ROUNDS.encode(rm.Progress(task=1, round=1, step=1, loss=loss), Limits())


def test_every_host_type_is_declared() -> None:
    for name, host in HOST_DTYPES.items():
        expected = "ui16" if name == "bf16" else name
        assert declare({"t": np.zeros((2, 0), host)}) == (TensorSpec("t", expected, (2, 0)),)


@pytest.mark.parametrize("dtype", [">f4", "f2,f2", "O", "U3", "M8[s]"])
def test_other_types_have_no_place_on_the_wire(dtype: str) -> None:
    with pytest.raises(LocalProtocolError, match="sending tensor 't'"):
        declare({"t": np.zeros(3, dtype)})


def declaration(*specs: tuple[str, str, list[int]]) -> bytes:
    return msgspec.json.encode([{"name": n, "dtype": d, "shape": s} for n, d, s in specs])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (declaration(), "expected 1 to"),
        (declaration(("a", "f32", []), ("a", "f32", [])), "same name"),
        (declaration(("", "f32", [])), "name has"),
        (declaration(("n" * 2000, "f32", [])), "name has"),
        (declaration(("a", "f8", [])), "unknown element type"),
        (declaration(("a", "f32", [2, -1])), "impossible shape"),
        (declaration(("a", "f32", [1] * 33)), "impossible shape"),
        (declaration(("a", "f32", [0, 1 << 62])), "they have more"),
        (declaration(("a", "f32", [1 << 31, 1 << 31])), "they have more"),
        (declaration(("a", "f32", [1 << 20]), ("b", "f32", [1 << 32])), "they have more"),
        (b'[{"name":"a","dtype":"f32","shape":[1.5]}]', "Expected"),
        (b'[{"name":"a","dtype":"f32","shape":[1' + b"0" * 5000 + b"]}]", "reading the list"),
    ],
)
def test_impossible_declarations_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode_declaration(data, Limits())


def test_declarations_round_trip() -> None:
    specs = (
        TensorSpec("a", "f32", ()),
        TensorSpec("b", "ui8", (0, 3)),
        TensorSpec("ü", "complex<f64>", (2, 1)),
    )
    assert decode_declaration(encode_declaration(specs, Limits()), Limits()) == specs
    assert encode_declaration((), Limits()) == b""
    with pytest.raises(LocalProtocolError, match="expected 1 to 2 tensors, found 3"):
        encode_declaration(specs, Limits(tensors=2))
