"""A simulated network with TCP's promises: in order, no duplicates, and either all that was sent or a broken pipe.

Delays are drawn per message. A partition stops traffic silently in both directions; a connection that was silent for
`silent_after_s` breaks on both sides, as the real transport's keep-alive does. A dropped connection breaks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from planetary.simulation.world import World


class Endpoint(Protocol):
    """Whoever holds one end of a connection."""

    def received(self, link: Link, item: Any) -> None:
        """An item arrived."""
        ...

    def broken(self, link: Link, reason: str) -> None:
        """The connection ended; nothing more arrives on it."""
        ...


class Link:
    """One connection between a client and the server."""

    def __init__(self, network: Network, node: str, client: Endpoint, server: Endpoint) -> None:
        """Made by `Network.connect`."""
        self.node = node
        self._network = network
        self._ends = (client, server)
        self._closed = [False, False]  # whether each end has seen the end
        self._last_arrival = [0.0, 0.0]  # per direction: nothing overtakes
        self._held: list[tuple[int, Any]] = []  # sent during a partition

    def send_to_server(self, item: Any) -> None:
        """Send from the client's end."""
        self._send(1, item)

    def send_to_client(self, item: Any) -> None:
        """Send from the server's end."""
        self._send(0, item)

    def close(self, end: Endpoint, reason: str) -> None:
        """Close from one end: it hears nothing more; the other end sees it after a delay."""
        for side in (0, 1):
            if self._ends[side] is end:
                self._closed[side] = True
            else:
                self._network.world.after(self._network.delay(), lambda side=side: self._break(side, reason))

    def drop(self, reason: str) -> None:
        """Break on both sides."""
        for side in (0, 1):
            self._network.world.after(self._network.delay(), lambda side=side: self._break(side, reason))

    @property
    def open(self) -> bool:
        """Whether both ends still believe in it."""
        return not any(self._closed)

    def release(self) -> None:
        """Deliver what a partition held back."""
        held, self._held = self._held, []
        for side, item in held:
            self._send(side, item)

    def _send(self, to: int, item: Any) -> None:
        if self._closed[1 - to]:
            return
        if self.node in self._network.partitioned:
            self._held.append((to, item))
            return
        arrival = max(self._network.world.now + self._network.delay(), self._last_arrival[to])
        self._last_arrival[to] = arrival
        self._network.world.at(arrival, lambda: self._arrive(to, item))

    def _arrive(self, to: int, item: Any) -> None:
        if self.node in self._network.partitioned:
            self._held.append((to, item))
        elif not self._closed[to]:
            self._ends[to].received(self, item)

    def _break(self, side: int, reason: str) -> None:
        if not self._closed[side]:
            self._closed[side] = True
            self._ends[side].broken(self, reason)


class Network:
    """All links to one server."""

    def __init__(self, world: World, delay_s: tuple[float, float], silent_after_s: float) -> None:
        """`delay_s`: the range that one-way delays are drawn from."""
        self.world = world
        self.partitioned: set[str] = set()
        self.links: list[Link] = []
        self._delay_s = delay_s
        self._silent_after_s = silent_after_s

    def delay(self) -> float:
        """Draw a one-way delay in seconds."""
        return self.world.random.uniform(*self._delay_s)

    def connect(
        self,
        node: str,
        client: Endpoint,
        server: Callable[[], Endpoint | None],
        answer: Callable[[Link | None], None],
    ) -> None:
        """Connect after a delay; `answer` gets None when the node is cut off or the server is down."""

        def arrive() -> None:
            end = server()
            if end is None or node in self.partitioned:
                answer(None)
                return
            link = Link(self, node, client, end)
            self.links = [old for old in self.links if old.open]
            self.links.append(link)
            answer(link)

        self.world.after(2 * self.delay(), arrive)

    def partition(self, node: str, seconds: float) -> None:
        """Cut a node off for some time."""
        self.partitioned.add(node)
        affected = [link for link in self.links if link.node == node and link.open]

        def silent() -> None:
            if node in self.partitioned:
                for link in affected:
                    link._held.clear()
                    for side in (0, 1):
                        link._break(side, f"nothing was heard for {self._silent_after_s:.1f} s")

        def heal() -> None:
            self.partitioned.discard(node)
            for link in affected:
                link.release()

        self.world.after(self._silent_after_s, silent)
        self.world.after(seconds, heal)
