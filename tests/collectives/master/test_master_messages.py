"""A peer's messages at the master: none ends it, and a peer that is closed is lost to its group."""

from __future__ import annotations

from itertools import count
from typing import get_args

from message_fuzz import RandomMessages, bombard
from planetary.collectives.master.machine import MasterMachine
from planetary.collectives.protocol import messages as m
from planetary.machine.events import Instruction, Received, Send, Tick
from planetary.wire.message import Message


class Bench:
    """A master with three registered peers, on sessions 1 to 3."""

    def __init__(self) -> None:
        numbers = count()
        self.machine = MasterMachine(lambda: f"id{next(numbers)}")
        self.now = 0.0
        self.peers = [self._register(session) for session in (1, 2, 3)]

    def hello(self, session: int) -> m.Register:
        host = f"10.0.0.{session}"
        return m.Register(protocol=m.PROTOCOL, group=0, name=f"p{session}", host=host, port=session, machine=host)

    def tell(self, session: int, message: Message) -> list[Instruction]:
        self.now += 0.01
        out = self.machine.handle(Received(session, message, host="10.0.0.9"), self.now)
        self.machine.validate()
        return out

    def _register(self, session: int) -> str:
        out = self.tell(session, self.hello(session))
        return next(i.message.peer for i in out if isinstance(i, Send) and isinstance(i.message, m.Registered))


def test_no_message_of_a_peer_ends_the_master() -> None:
    for seed in range(8):
        bench = Bench()
        for session in (1, 2, 3) if seed % 2 else ():
            bench.tell(session, m.Vote(call=1, number=1, timeout_s=5.0, min_world=1))
        source = RandomMessages(seed, [2**32, 2**32 + 1], bench.peers)

        def tell(message: Message, bench: Bench = bench, source: RandomMessages = source) -> None:
            bench.tell(source.random.choice((1, 2, 3, 4)), message)
            if source.random.random() < 0.1:
                bench.now += 5.0
                bench.machine.handle(Tick(), bench.now)

        bombard(tell, get_args(m.FromPeer), source, 200)


def test_a_peer_that_registers_twice_is_lost_to_its_group() -> None:
    """Its connection is closed, so that calls of the others must not wait for it."""
    bench = Bench()
    bench.tell(1, bench.hello(1))
    assert bench.peers[0] not in bench.machine.groups[0].desk.peers
    assert bench.peers[1] in bench.machine.groups[0].desk.peers
