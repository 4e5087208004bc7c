"""Which messages wait for which others before they are sent on a connection."""

from __future__ import annotations

from enum import Enum, auto

from planetary.wire import messages as m


class Order(Enum):
    """When a message is sent."""

    AHEAD = auto()  # at once, before all payloads that wait
    IN_TURN = auto()  # after all that were queued before it and are sent in turn
    BESIDE = auto()  # after those that are sent beside the others; both share the line


def order_of(message: m.Message) -> Order:
    """Return when a message is sent.

    Most have to arrive in the order in which they were queued. Two kinds must not, for a payload may take minutes on a
    slow line: what says that a worker is alive or how far the others are; and a shard's whole state, behind which
    nothing that others wait for should stand. A composer's view goes with the state: it has to be there before it.
    """
    match message:
        case m.Progress() | m.StepTaken() | m.RunProgress() | m.WantTokens() | m.EvalResult():
            return Order.AHEAD
        case m.TaskFailed() if not message.task:  # of a role in a mixture, which has forgotten its state
            return Order.AHEAD
        case m.KeepShard() | m.ViewModel():
            return Order.BESIDE
        case m.TokensReady() if message.shard >= 0:  # held-out tokens have to be there before what they evaluate
            return Order.BESIDE
        case _:
            return Order.IN_TURN
