"""Which sketches of a composer nobody has answered yet, on both sides of a connection; pure.

A composer has at most a window of sketches of a layer out: more would be made with experts that are too old when it is
their turn. The gateway says with every `UseExperts` how things are: the newest sketch that has come on this connection,
and those that wait for what becomes of them. It does not say what has happened: such messages come unasked, too, and
the newest stands for those before it, which a slow line leaves out. A composer then counts what waits and what it has
sent since, no matter how often it was told. What was on its way when a connection was lost is not among either, and
what its shard's last owner has left is.

A step names its sketch. A composer that goes back takes steps again; what it offers then is the same work (`Work.key`).
"""

from __future__ import annotations

from collections.abc import Iterable

FORGET_STEPS = 20
"""Work on sketches that are older is not worth doing (12.10): neither side counts them, and the queue drops them."""


class SketchWindow:
    """A composer's side.

    Args:
        layers: of the model.
        window: how many sketches of each may be out.
    """

    def __init__(self, layers: int, window: int) -> None:
        """Not connected."""
        self._window = window
        self._out: list[set[int] | None] = [None] * layers  # by layer: steps; None: the gateway has not said them yet

    def may_offer(self, layer: int, step: int) -> bool:
        """Whether there is room for the sketch of a step."""
        out = self._out[layer]
        return out is not None and sum(s > step - FORGET_STEPS for s in out) < self._window

    def offered(self, layer: int, step: int) -> None:
        """The sketch of a step is on its way."""
        out = self._out[layer]
        if out is not None:
            out.add(step)

    def told(self, layer: int, arrived: int, waiting: Iterable[int]) -> None:
        """The gateway has had the sketch of step `arrived` and those before it; those of `waiting` are not answered."""
        self._out[layer] = {step for step in self._out[layer] or () if step > arrived} | set(waiting)

    def forget(self) -> None:
        """The connection is another, or the shard: wait for the gateway's word."""
        self._out = [None] * len(self._out)


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
        kept = {s for s in self._waiting.get((shard, layer), ()) if s > step - FORGET_STEPS}
        self._waiting[shard, layer] = kept | {step}

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
