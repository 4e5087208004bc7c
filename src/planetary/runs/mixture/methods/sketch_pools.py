"""Which sketches become one piece of expert work, for each source of them and pace of the run; pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class OfferedSketch(NamedTuple):
    """A sketch of one layer a composer has sent.

    Attributes:
        shard: of the composer.
        layer: of the model.
        step: of the composer.
        progress: steps of the run at that step.
        version: of the experts it was made with.
        payload: name in the payload store.
    """

    shard: int
    layer: int
    step: int
    progress: int
    version: int
    payload: str


class SketchBatch(NamedTuple):
    """The sketches that improve one shard's experts of a layer, and the version the shard's own was made with."""

    shard: int
    version: int
    payloads: tuple[str, ...]


class SketchPool(Protocol):
    """Collects sketches until they make work."""

    def add(self, sketch: OfferedSketch) -> list[SketchBatch]:
        """Take a sketch; return the work it completes."""
        ...


class OwnSketches:
    """`moe.sketches = "owner"`: each sketch improves the composer's experts."""

    def add(self, sketch: OfferedSketch) -> list[SketchBatch]:
        return [SketchBatch(sketch.shard, sketch.version, (sketch.payload,))]


class StepSketches:
    """`moe.sketches = "all"` in lock step: all composers' sketches of one step improve every shard's experts.

    Args:
        composers: how many sketches make a step complete.
    """

    def __init__(self, composers: int) -> None:
        self._composers = composers
        self._steps: dict[tuple[int, int], dict[int, OfferedSketch]] = {}  # sketches by step and layer, then shard

    def add(self, sketch: OfferedSketch) -> list[SketchBatch]:
        """Work of all shards when the last one's sketch has arrived."""
        place = sketch.step, sketch.layer
        found = self._steps.setdefault(place, {})
        found[sketch.shard] = sketch
        if len(found) < self._composers:
            return []
        del self._steps[place]
        payloads = tuple(found[shard].payload for shard in sorted(found))
        return [SketchBatch(shard, found[shard].version, payloads) for shard in sorted(found)]


class RecentSketches:
    """`moe.sketches = "all"` at a free pace: a sketch improves the composer's experts with the others' newest ones.

    Args:
        reach: steps of the run between sketches that are used together. Composers are not at the same step, and what
            is older than a refresh would mislead more than help.
    """

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._newest: dict[int, dict[int, OfferedSketch]] = {}  # newest sketches by layer and shard

    def add(self, sketch: OfferedSketch) -> list[SketchBatch]:
        newest = self._newest.setdefault(sketch.layer, {})
        newest[sketch.shard] = sketch
        near = [one for _, one in sorted(newest.items()) if abs(one.progress - sketch.progress) <= self._reach]
        return [SketchBatch(sketch.shard, sketch.version, tuple(one.payload for one in near))]
