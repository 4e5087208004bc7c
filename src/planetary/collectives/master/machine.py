"""The master: registers peers and passes their messages to the machine of their group. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from planetary.collectives.master.events import Decided, GroupRecord, Record, Solved
from planetary.collectives.master.group_desk import Peer
from planetary.collectives.master.group_machine import GroupMachine
from planetary.collectives.protocol import messages as m
from planetary.core.errors import LocalProtocolError
from planetary.core.printable import is_name
from planetary.machine.events import Append, Close, Closed, Event, Instruction, Received, Send, Tick
from planetary.machine.machine import check_invariants
from planetary.net.addresses import is_loopback

_EMPTIED_MOST = 4096  # groups that left a state behind; a member of a new one is refused then


class MasterMachine:
    """Implements `machine.machine.Machine`. Groups are independent of each other.

    Attributes:
        groups: those with peers, by number.
    """

    def __init__(
        self,
        draw: Callable[[], str],
        *,
        alive_s: float = 1.0,
        silent_s: float = 10.0,
        peers_most: int = 1024,
        remeasure_s: float = 0.0,
    ) -> None:
        """`draw` returns a new secret string each time; it is the machine's only randomness.

        `alive_s` and `silent_s` are for connections: how often a side sends something, and when it is lost.
        `remeasure_s`: seconds between two measurements of links in the background, in each group; 0 for none.
        """
        self._draw = draw
        self._alive_s, self._silent_s, self._peers_most = alive_s, silent_s, peers_most
        self._remeasure_s = remeasure_s
        self.groups: dict[int, GroupMachine] = {}
        self._emptied: dict[int, GroupRecord] = {}  # groups without peers: the state they agreed on last
        self._where: dict[int, tuple[int, str]] = {}  # connection -> group, peer

    def restore(self, records: Iterable[Record], now: float, grace_s: float) -> None:
        """Take up where a journal ends. Members have `grace_s` seconds to return.

        The caller then replaces the journal by `records`, so a second restart knows of this one.
        """
        last: dict[int, GroupRecord] = {}
        decided: dict[int, dict[int, None]] = {}
        for record in records:
            if isinstance(record, Decided):
                decided.setdefault(record.group, {})[record.seq] = None
            else:
                last[record.number] = record
        for number, record in last.items():
            if record.revision is not None and not record.ring:
                self._emptied[number] = record
                continue
            group = self._group(number)
            group.operations.decided = decided.get(number, {})
            desk = group.desk
            # Operations may have begun after the last record: leave their numbers behind.
            desk.seq = ((max([record.seq, *group.operations.decided]) >> 32) + 1) << 32
            desk.key, desk.epoch, desk.revision = record.key, record.epoch, record.revision
            desk.content = record.content
            desk.counts, desk.pending = record.counts, record.pending
            for member in record.ring:
                known = Peer(member.info, member.secret, member.digests, None, member.agreed, return_by=now + grace_s)
                known.doing = "away since the master was restarted"
                desk.peers[member.info.peer] = known
                desk.ring.append(member.info.peer)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        return self._tidy(self._decide(event, now))

    def _decide(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case Received(session=connection, message=message):
                if isinstance(message, m.Register):
                    return self._register(connection, message, event.host, now)
                if connection not in self._where:
                    return self._refuse(connection, f"expected Register first, found {type(message).__name__}")
                number, peer = self._where[connection]
                if isinstance(message, m.Leave):
                    del self._where[connection]
                    return [*self.groups[number].request(peer, message, now), Close(connection, "it left")]
                return self.groups[number].request(peer, message, now)
            case Closed(session=connection, reason=reason):
                number, peer = self._where.pop(connection, (0, ""))
                return self.groups[number].lose(peer, reason, now) if peer else []
            case Solved():
                return self.groups[event.group].solved(event, now) if event.group in self.groups else []
            case Tick():
                return self._tick(now)
            case _:
                raise LocalProtocolError(f"the master's machine knows no event {type(event).__name__}")

    def next_deadline(self) -> float | None:
        times = [group.next_deadline() for group in self.groups.values()]
        first = min(times, default=math.inf)
        return None if math.isinf(first) else first

    def validate(self) -> None:
        check_invariants("the master", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        there = {
            (number, peer): known.connection
            for number, group in self.groups.items()
            for peer, known in group.desk.peers.items()
            if known.connection is not None
        }
        where = {key: connection for connection, key in self._where.items()}
        yield there == where, f"connections are {there} in the groups, and {where} at the master"
        yield not self.groups.keys() & self._emptied.keys(), "a group has peers, and is remembered as empty"
        for group in self.groups.values():
            yield bool(group.desk.peers), f"group {group.desk.number} has no peers"
            yield from group.invariants()

    def records(self) -> list[Record]:
        """Return the records of a complete journal."""
        out: list[Record] = list(self._emptied.values())
        for group in self.groups.values():
            out.append(group.desk.record())
            out.extend(Decided(group.desk.number, seq) for seq in group.operations.decided)
        return out

    # --- inside

    def _tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for group in self.groups.values():
            out += group.tick(now)
        return out

    def _register(self, connection: int, hello: m.Register, seen_host: str, now: float) -> list[Instruction]:
        if connection in self._where:  # the members must not wait for a peer whose connection is closed
            number, peer = self._where.pop(connection)
            lost = self.groups[number].lose(peer, "it registered twice", now)
            return [*lost, *self._refuse(connection, "it registered twice")]
        if not 0 <= hello.group < 2**32 or not is_name(hello.name) or not 0 < hello.port < 65536:
            return self._refuse(
                connection,
                "a registration needs a group of 32 bits, a name of 1 to 128 letters, digits and . _ : / -, and a "
                f"port; found group {hello.group}, name {hello.name[:128]!r}, port {hello.port}",
            )
        if sum(len(group.desk.peers) for group in self.groups.values()) >= self._peers_most and not hello.peer:
            return self._refuse(connection, f"the master has its {self._peers_most} peers", "busy")
        if len(self._emptied) >= _EMPTIED_MOST and hello.group not in (*self.groups, *self._emptied):
            return self._refuse(connection, f"the master remembers the states of {len(self._emptied)} groups already")
        group = self._group(hello.group)
        peers, host = group.desk.peers, hello.host or seen_host
        if hello.peer:
            known = peers.get(hello.peer)
            if known is None or known.secret != hello.secret:
                text = "the master does not know this peer any more; register as a new one"
                return self._refuse(connection, text, "unknown")
            old = known.connection
            known.connection = connection
            self._where[connection] = (hello.group, hello.peer)
            answer = self._welcome(hello, hello.peer, known.secret, member=True)
            out: list[Instruction] = [Send(connection, answer), *group.returned(hello.peer, hello.undecided)]
            if old is not None:
                self._where.pop(old, None)
                out.append(Close(old, "it came back over another connection"))
            return out
        other = next((known.info for known in peers.values() if is_loopback(known.info.host)), None)
        if is_loopback(host) != (other is not None) and peers:
            return self._refuse(
                connection,
                f"bulk data for this peer would go to {host}, which is not reachable from all members (one is at "
                f"{next(iter(peers.values())).info.host}): loopback and network addresses do not mix. Connect "
                "every peer by the master's network address, or give advertise=",
            )
        peer, secret = self._draw(), self._draw()
        info = m.PeerInfo(peer, hello.name, host, hello.port, hello.machine, hello.certificate)
        peers[peer] = Peer(info, secret, hello.digests, connection, doing="registered, not admitted", since=now)
        self._where[connection] = (hello.group, peer)
        return [Send(connection, self._welcome(hello, peer, secret, member=False))]

    def _welcome(self, hello: m.Register, peer: str, secret: str, *, member: bool) -> m.Registered:
        return m.Registered(
            run=f"group {hello.group}",
            heartbeat_s=self._alive_s,
            silent_after_s=self._silent_s,
            peer=peer,
            secret=secret,
            member=member,
        )

    def _refuse(self, connection: int, reason: str, code: str = "registration") -> list[Instruction]:
        refused = m.Refused(code=code, reason=reason, retry=code == "busy")
        return [Send(connection, refused), Close(connection, reason)]

    def _group(self, number: int) -> GroupMachine:
        group = self.groups.get(number)
        if group is None:
            group = self.groups[number] = GroupMachine(
                number, self._draw, self._everyone, remeasure_s=self._remeasure_s
            )
            if (last := self._emptied.pop(number, None)) is not None:
                desk = group.desk
                desk.epoch, desk.seq = last.epoch, last.seq
                desk.revision, desk.content = last.revision, last.content
        return group

    def _everyone(self) -> tuple[int, int, int]:
        sizes = [len(group.desk.ring) for group in self.groups.values() if group.desk.ring]
        return sum(sizes), len(sizes), max(sizes, default=0)

    def _tidy(self, out: list[Instruction]) -> list[Instruction]:
        """Forget the connections a group closed, and groups without peers."""
        for instruction in out:
            if isinstance(instruction, Close):
                self._where.pop(instruction.session, None)
        for number in [number for number, group in self.groups.items() if not group.desk.peers]:
            desk = self.groups.pop(number).desk
            rest = GroupRecord(
                number, desk.key, desk.epoch, desk.seq, desk.revision, m.Counts(), False, (), desk.content
            )
            out.append(Append(rest))
            if desk.revision is not None:
                self._emptied[number] = rest
        return out
