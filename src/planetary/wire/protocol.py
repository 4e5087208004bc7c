"""A protocol between two peers: a version and the classes of messages."""

from __future__ import annotations

import math
from functools import reduce
from operator import or_
from typing import Any, get_args

import msgspec

from planetary.core import decoding
from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.wire.limits import Limits
from planetary.wire.message import Message

_LAST_ID = 2**63 - 1
_encoder = msgspec.json.Encoder()


class Protocol:
    """Encodes and decodes the messages of one protocol, and no others.

    Each package declares messages and makes a protocol of them and of those it builds upon. The class of a message says
    how it is queued (`Message.order`).

    Attributes:
        version: the fifth byte of every frame. Raised whenever a message changes in a way an older peer would misread;
            a peer of another version is refused.
        messages: the classes, in the order of declaration.
        limits: for peers that have authenticated.
    """

    def __init__(self, version: int, *messages: type[Message], limits: Limits | None = None) -> None:
        """Raise `LocalProtocolError` where two classes have the same name on the wire."""
        if not 0 < version < 256:
            raise LocalProtocolError(f"a protocol's version is 1 to 255, not {version}")
        names = [_name(kind) for kind in messages]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise LocalProtocolError(f"a protocol has two messages named {', '.join(doubled)}")
        self.version = version
        self.messages = messages
        self.limits = limits or Limits()
        self._floats = {kind: _float_fields(kind) for kind in messages}
        union: Any = reduce(or_, messages)
        self._decoder: msgspec.json.Decoder[Message] = decoding.json_decoder(union)

    def __repr__(self) -> str:
        """Name the version and how many messages there are."""
        return f"Protocol({self.version}, {len(self.messages)} messages)"

    def extended(self, *messages: type[Message]) -> Protocol:
        """Return the protocol of the same version with these messages, too."""
        return Protocol(self.version, *self.messages, *messages, limits=self.limits)

    def encode(self, message: Message, limits: Limits) -> bytes:
        """Return a message's JSON.

        Raises `LocalProtocolError` when it is none of the protocol's, is over the cap or has no JSON form.
        """
        name = type(message).__name__
        floats = self._floats.get(type(message))
        if floats is None:
            raise LocalProtocolError(f"sending {name}: it is no message of this protocol")
        for field in floats:
            value = getattr(message, field)
            if isinstance(value, float) and not math.isfinite(value):
                raise LocalProtocolError(
                    f"sending {name}: field {field!r} is {value}, which JSON has not; report it as a failure instead"
                )
        try:
            data = _encoder.encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise LocalProtocolError(f"sending {name}: it has no JSON form: {error}") from None
        if len(data) > limits.message_bytes:
            raise LocalProtocolError(
                f"sending {name}: its JSON may have {limits.message_bytes} bytes, it has {len(data)}"
            )
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """Read a message; an unknown type, a bad field or an id out of range raises `RemoteProtocolError`."""
        try:
            message = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            raise RemoteProtocolError(f"reading a message: {error}; it began {bytes(data[:60])!r}") from None
        if not 0 < message.id <= _LAST_ID:
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: expected an id of 1 to 2^63 - 1, found {message.id}"
            )
        return message


def _float_fields(kind: type[Message]) -> tuple[str, ...]:
    return tuple(f.name for f in msgspec.structs.fields(kind) if float in (f.type, *get_args(f.type)))


def _name(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)
