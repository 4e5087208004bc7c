"""Which sketches of a composer nobody has answered yet, on both sides of a connection; pure.

A composer has at most a window of sketches of a layer out: more would be made with experts that are too old when it is
their turn. The gateway reports with every `ExpertsUpdate` the newest sketch that has come on this connection, and
those that wait for what becomes of them. It does not say what has happened: such messages come unasked, too, and
the newest stands for those before it, which a slow line leaves out. A composer then counts what waits and what it has
sent since, no matter how often it was told. What was on its way when a connection was lost is not among either, and
what its shard's last owner has left is.

Only the gateway forgets: an answer may take longer to a composer than any number of its steps, and what it offers until
then is made with old experts. It hears of a composer's steps ahead of all payloads, and says when sketches are too old.

A step names its sketch. A composer that goes back takes steps again; what it offers then is the same work (`Work.key`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

FORGET_STEPS = 20
"""Work on sketches that are older is not worth doing (12.10), unless somebody is at it."""


class SketchWindow:
    """A composer's side.

    Args:
        layers: of the model.
        window: how many sketches of each may be out.
    """

    def __init__(self, layers: int, window: int) -> None:
        """Not connected."""
        self._window = window
        # By layer: steps of what was sent on this connection and may not have come, and of what waits there.
        self._sent: list[set[int]] = [set() for _ in range(layers)]
        self._waiting: list[set[int] | None] = [None] * layers  # None: the gateway has not said it yet

    def may_offer(self, layer: int) -> bool:
        """Whether there is room for a sketch."""
        waiting = self._waiting[layer]
        return waiting is not None and len(self._sent[layer] | waiting) < self._window

    def offered(self, layer: int, step: int) -> None:
        """The sketch of a step is on its way."""
        self._sent[layer].add(step)

    def told(self, layer: int, arrived: int, waiting: Iterable[int]) -> None:
        """The gateway has had the sketch of step `arrived` and those before it; those of `waiting` are not answered."""
        self._sent[layer] = {step for step in self._sent[layer] if step > arrived}
        self._waiting[layer] = set(waiting)

    def forget(self) -> None:
        """The connection is another, or the shard: wait for the gateway's word."""
        self._sent = [set() for _ in self._sent]
        self._waiting = [None] * len(self._waiting)


class WaitingSketches:
    """The gateway's side.

    Args:
        left: shard, layer and step of what waits from an earlier life.
    """

    def __init__(self, left: Iterable[tuple[int, int, int]] = ()) -> None:
        """No composer is connected."""
        self._waiting: dict[tuple[int, int], set[int]] = {}  # by shard and layer: steps
        self._arrived: dict[tuple[int, int, int], int] = {}  # by session, shard and layer: the newest step
        for shard, layer, step in left:
            self._waiting.setdefault((shard, layer), set()).add(step)

    def arrived(self, session: int, shard: int, layer: int, step: int) -> None:
        """A sketch has come on a connection; it is answered unless it `waits`."""
        self._arrived[session, shard, layer] = step

    def waits(self, shard: int, layer: int, step: int) -> None:
        """A sketch becomes work."""
        self._waiting.setdefault((shard, layer), set()).add(step)

    def forget(self, shard: int, step: int, begun: Collection[tuple[int, int, int]]) -> list[int]:
        """A shard's composer has taken `step` steps: forget what is too old; return the layers where something was.

        `begun`: shard, layer and step of what somebody is at.
        """
        found = []
        for (owner, layer), waiting in self._waiting.items():
            old = {s for s in waiting if s <= step - FORGET_STEPS and (owner, layer, s) not in begun}
            if owner == shard and old:
                waiting.difference_update(old)
                found.append(layer)
        return found

    def is_waiting(self, shard: int, layer: int, step: int) -> bool:
        """Whether somebody is to improve experts with a sketch."""
        return step in self._waiting.get((shard, layer), ())

    def over(self, shard: int, layer: int, step: int) -> bool:
        """Nobody improves experts with a sketch any more; return whether it has waited until now."""
        waiting = self._waiting.get((shard, layer), set())
        found = step in waiting
        waiting.discard(step)
        return found

    def lost(self, session: int) -> None:
        """A connection has ended."""
        self._arrived = {key: step for key, step in self._arrived.items() if key[0] != session}

    def said(self, session: int, shard: int, layer: int) -> tuple[int, tuple[int, ...]]:
        """Return what to say on a connection: see `SketchWindow.told`. A step of -1: none has come."""
        return self._arrived.get((session, shard, layer), -1), tuple(sorted(self._waiting.get((shard, layer), ())))
