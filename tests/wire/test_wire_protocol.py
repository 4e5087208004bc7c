"""A protocol is a value: it reads and sends its own messages and no others."""

from __future__ import annotations

from typing import ClassVar

import pytest

from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.fleet.protocol.messages import FABRIC
from planetary.runs.mixture.messages import MIXTURES, StepTaken
from planetary.runs.rounds.messages import ROUNDS, Progress
from planetary.wire import Inbox, Limits, Message, Order, Outbox, Protocol


class Ping(Message, frozen=True, kw_only=True):
    """A question."""

    text: str


class Pong(Message, frozen=True, kw_only=True):
    """An answer that waits for nothing."""

    order: ClassVar[Order] = Order.AHEAD
    text: str


SMALL = Protocol(7, Ping)
LARGE = SMALL.extended(Pong)


def frame(protocol: Protocol, message: Message) -> bytes:
    outbox = Outbox(protocol)
    outbox.add(message)
    taken = outbox.next_frame()
    assert taken is not None
    return taken.head


def test_extended_protocol_reads_both_and_its_base_refuses() -> None:
    """An extended protocol reads both and its base refuses the new messages."""
    for message in (Ping(text="a", id=1), Pong(text="b", id=1)):
        (received,) = Inbox(LARGE).feed(frame(LARGE, message))
        assert received.message == message
    assert Inbox(SMALL).feed(frame(LARGE, Ping(text="a")))
    with pytest.raises(RemoteProtocolError, match="Invalid value 'Pong'"):
        Inbox(SMALL).feed(frame(LARGE, Pong(text="b")))
    assert (LARGE.version, LARGE.messages) == (7, (Ping, Pong))


def test_another_protocols_message_is_not_sent() -> None:
    outbox = Outbox(SMALL)
    with pytest.raises(LocalProtocolError, match="sending Pong: it is no message of this protocol"):
        outbox.add(Pong(text="b"))
    assert not outbox
    with pytest.raises(LocalProtocolError, match="no message of this protocol"):
        FABRIC.encode(StepTaken(shard=0, epoch=1, step=1, loss=1.0, seconds=1.0, id=1), Limits())


@pytest.mark.parametrize("version", [6, 8])
def test_another_version_is_refused_with_the_side_to_upgrade(version: int) -> None:
    side = "the peer" if version < 7 else "this side"
    with pytest.raises(RemoteProtocolError, match=f"speaks 7, the peer speaks {version}; upgrade planetary on {side}"):
        Inbox(SMALL).feed(frame(Protocol(version, Ping), Ping(text="a")))


def test_a_protocol_that_could_not_be_read_is_not_made() -> None:
    with pytest.raises(LocalProtocolError, match="two messages named Ping"):
        SMALL.extended(Ping)
    for version in (0, 256):
        with pytest.raises(LocalProtocolError, match="1 to 255"):
            Protocol(version, Ping)


def test_sending_order_is_declared_on_the_class_unsent() -> None:
    assert (Ping(text="a").sending_order(), Pong(text="b").sending_order()) == (Order.IN_TURN, Order.AHEAD)
    assert b"order" not in LARGE.encode(Pong(text="b", id=1), Limits())
    declared = {kind.__name__: kind.order for kind in MIXTURES.messages if kind.order is not Order.IN_TURN}
    assert declared == {
        **dict.fromkeys(("MixtureEvaluated", "StepTaken", "RunProgress", "RequestTokens"), Order.AHEAD),
        **dict.fromkeys(("SaveShard", "ViewModel"), Order.BESIDE),
    }
    assert [kind.__name__ for kind in ROUNDS.messages if kind.order is Order.AHEAD] == [
        "CountIn",
        "Progress",
        "EvalResult",
    ]
    assert Progress in ROUNDS.messages
    assert StepTaken not in FABRIC.messages
