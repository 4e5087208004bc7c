"""Schedule of a ring: chunks, stages and pieces, as pure functions of rank and world size.

The tensor is cut into as many chunks as there are peers (pipelined ring, Patarasuk & Yuan 2009; the PCCL report,
algorithm 5). At stage s a peer receives one chunk from the predecessor; a chunk travels in pieces, and each piece is
passed on as soon as it was reduced or stored, without waiting for the rest of the chunk or for other stages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from planetary.core.errors import LocalProtocolError, RemoteProtocolError


class PieceAction(enum.Enum):
    """Treatment of a received piece."""

    REDUCE = "reduce"  # combine with this peer's own
    FINISH = "finish"  # combine, and the piece is complete: this peer's contribution is the last
    STORE = "store"  # it is complete: take it over


@dataclass(frozen=True)
class RingPlan:
    """The part of one peer in one collective.

    Attributes:
        rank, world: position in the ring and the ring's size.
        count: elements of the tensor.
        piece: most elements of a piece, a multiple of the quantisation block.
        first: chunk sent at stage 0 without having received anything; None when this peer waits.
        stages: numbers of the stages at which a chunk is received.
        reduces: how many of the first stages reduce; the last of them finishes.
        chunks: (start, stop) of each chunk in elements.
    """

    rank: int
    world: int
    count: int
    piece: int
    first: int | None
    stages: range
    reduces: int
    last_sent: int  # the last stage at which anything is sent
    chunks: tuple[tuple[int, int], ...]
    shift: int

    def chunk(self, stage: int) -> int:
        """Index of the chunk received at a stage."""
        return (self.rank - self.shift - stage - 1) % len(self.chunks)

    def action(self, stage: int) -> PieceAction:
        """Return the treatment of the pieces of a stage."""
        if stage >= self.reduces:
            return PieceAction.STORE
        return PieceAction.FINISH if stage == self.reduces - 1 else PieceAction.REDUCE

    def forwards(self, stage: int) -> bool:
        """Whether the pieces of a stage are passed on as stage + 1."""
        return stage < self.last_sent

    def pieces(self, chunk: int) -> int:
        """Number of pieces of a chunk; an empty chunk has none."""
        start, stop = self.chunks[chunk]
        return -(-(stop - start) // self.piece)

    def bounds(self, chunk: int, index: int) -> tuple[int, int]:
        """(start, stop) of a piece in elements of the tensor."""
        start, stop = self.chunks[chunk]
        begin = start + index * self.piece
        return begin, min(begin + self.piece, stop)

    def expected(self) -> int:
        """How many pieces arrive in the whole operation."""
        return sum(self.pieces(self.chunk(stage)) for stage in self.stages)

    def check(self, stage: int, index: int) -> None:
        """Raise `RemoteProtocolError` unless such a piece is part of the operation."""
        if stage not in self.stages or not 0 <= index < self.pieces(self.chunk(stage)):
            raise RemoteProtocolError(
                f"piece {index} of stage {stage} was received; expected stages {self.stages.start} to "
                f"{self.stages.stop - 1} with the pieces of {self.count} elements"
            )


def split(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut `count` elements into `parts` runs whose lengths differ by one at most; the first ones are longer."""
    share, rest = divmod(count, parts)
    cuts = [i * share + min(i, rest) for i in range(parts + 1)]
    return tuple((cuts[i], cuts[i + 1]) for i in range(parts))


def plan(kind: str, rank: int, world: int, *, count: int, piece: int, root: int = 0) -> RingPlan:
    """Return the plan of `kind` for one peer; `root` is the rank that broadcasts.

    all_reduce: 2·(world − 1) stages. reduce_scatter: the first half; rank r ends with chunk r. all_gather: the second
    half; rank r gives chunk r (`count` is the elements of all). broadcast: a chain that starts at the root; the
    tensor is one chunk. barrier: nothing moves.
    """
    chunks = split(count, world)
    if world == 1 or kind == "barrier":
        return RingPlan(rank, world, count, piece, None, range(0), 0, -1, chunks, 0)
    match kind:
        case "all_reduce":
            stages = 2 * (world - 1)
            return RingPlan(rank, world, count, piece, rank, range(stages), world - 1, stages - 1, chunks, 0)
        case "reduce_scatter":
            stages, first = world - 1, (rank - 1) % world
            return RingPlan(rank, world, count, piece, first, range(stages), stages, stages - 1, chunks, 1)
        case "all_gather":
            stages = world - 1
            return RingPlan(rank, world, count, piece, rank, range(stages), 0, stages - 1, chunks, 0)
        case "broadcast":
            position = (rank - root) % world
            whole = ((0, count),)
            if position == 0:
                return RingPlan(rank, world, count, piece, 0, range(0), 0, 0, whole, 0)
            return RingPlan(rank, world, count, piece, None, range(position - 1, position), 0, world - 2, whole, 0)
    raise LocalProtocolError(f"no collective is called {kind!r}")
