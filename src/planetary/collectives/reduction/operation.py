"""One collective on one peer: buffers and place in the ring, without sockets.

A shell begins it, passes it every piece that arrives, and sends the pieces it returns. The caller's array can be
restored until `commit`: elements are saved before they are overwritten in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planetary.collectives.protocol.options import QuantizationAlgorithm, ReduceOp, Spec
from planetary.collectives.reduction import kernels, quantise
from planetary.collectives.reduction.buffer_guard import BufferGuard
from planetary.collectives.reduction.buffers import BufferPool
from planetary.collectives.reduction.elements import TYPES, raw
from planetary.collectives.reduction.ring_plan import PieceAction, RingPlan
from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.core.quantisers import from_bfloat16, to_bfloat16
from planetary.core.threads import THREADS, Threads

_BYTES = np.dtype(np.uint8)
PIECES = 32
PIECE_LEAST, PIECE_LARGEST = 1 << 20, 2 << 20


def piece_elements(dtype: str, piece_bytes: int) -> int:
    """Elements of a piece: whole quantisation blocks, so pieces can be encoded one by one."""
    return max(piece_bytes // TYPES[dtype].itemsize // quantise.BLOCK, 1) * quantise.BLOCK


def good_piece_bytes(nbytes: int) -> int:
    """Return the size of pieces for a tensor: few enough that each one's cost is small, enough to overlap."""
    return min(max(nbytes // PIECES, PIECE_LEAST), PIECE_LARGEST)


@dataclass(frozen=True)
class OutgoingPiece:
    """A piece to send to the successor in the ring."""

    stage: int
    index: int
    data: (
        memoryview | None
    )  # of the working array, or of an encoded piece; None: `BufferedOperation.payload` encodes it


class BufferedOperation(BufferGuard):
    """Buffers and progress of one collective.

    Every access to the working array from another thread is guarded; see `BufferGuard`.

    Attributes:
        source: flat array of this peer's contribution; may be `work`.
        work: flat array that becomes the result.
        sent, received: bytes of pieces so far.
    """

    def __init__(
        self,
        spec: Spec,
        plan: RingPlan,
        source: np.ndarray,
        work: np.ndarray,
        backup: np.ndarray | None,
        *,
        pool: BufferPool | None = None,
        threads: Threads = THREADS,
    ) -> None:
        """`backup`, like `work`, is given when `work` must be restorable. Encoded pieces are in `pool`."""
        super().__init__(threads)
        self.spec, self.plan, self.source, self.work = spec, plan, source, work
        self._backup = backup
        self._saved: list[tuple[int, int]] = []
        self._arrived: set[tuple[int, int]] = set()
        self._expected = plan.expected()
        self._op = ReduceOp(spec.op) if spec.op else ReduceOp.SUM
        self._algorithm = QuantizationAlgorithm(spec.algorithm) if spec.bits else None
        # In all_reduce the first `world` stages write each chunk for the first time; later ones need no copy.
        self._saves_until = plan.world if spec.kind == "all_reduce" else len(plan.chunks) + plan.world
        self._announced = False
        self._pool = pool or BufferPool(0)
        self._lent: list[np.ndarray] = []
        self.sent = self.received = 0
        self._bytes = raw(work)
        self._source_bytes = raw(source)

    # --- progress

    @property
    def complete(self) -> bool:
        """Whether every piece has arrived and was taken."""
        return len(self._arrived) == self._expected

    def announce(self) -> bool:
        """Whether the operation is complete and was not reported yet; true once."""
        with self._condition:
            first = self.complete and not self._announced
            self._announced |= first
            return first

    def begin(self) -> list[OutgoingPiece]:
        """Return the pieces sent before any has arrived."""
        chunk = self.plan.first
        if chunk is None:
            return []
        out = []
        for index in range(self.plan.pieces(chunk)):
            # Encoding takes time: the thread that sends does it, piece by piece.
            data = None if self.spec.bits else self._view(self._source_bytes, *self.plan.bounds(chunk, index))
            out.append(OutgoingPiece(0, index, data))
        return out

    def payload(self, outgoing: OutgoingPiece) -> memoryview:
        """Return the bytes of a piece to send. The caller holds `enter`."""
        if outgoing.data is not None:
            return outgoing.data
        chunk = self.plan.first
        if chunk is None or outgoing.stage:
            raise LocalProtocolError("only the first chunk is encoded when it is sent")
        start, stop = self.plan.bounds(chunk, outgoing.index)
        return self._encoded(self.source[start:stop])

    def wire_bytes(self, stage: int, index: int) -> int:
        """Bytes of a piece that arrives. Raises `RemoteProtocolError` when no such piece is due."""
        self.plan.check(stage, index)
        if (stage, index) in self._arrived:
            raise RemoteProtocolError(f"piece {index} of stage {stage} came twice")
        start, stop = self.plan.bounds(self.plan.chunk(stage), index)
        if self.spec.bits:
            return quantise.encoded_bytes(stop - start, self.spec.bits)
        return (stop - start) * self.work.itemsize

    def target(self, stage: int, index: int) -> memoryview | None:
        """Where a piece may be received straight into; None when it must be combined or decoded first.

        The elements are saved before. The caller holds `enter` for every access.
        """
        if self.spec.bits or self.plan.action(stage) is not PieceAction.STORE:
            return None
        start, stop = self.plan.bounds(self.plan.chunk(stage), index)
        self._save(stage, start, stop)
        return self._view(self._bytes, start, stop)

    def reduces(self, stage: int) -> bool:
        """Whether a piece may be taken part by part, with `reduce_part`."""
        return not self.spec.bits and self.plan.action(stage) is not PieceAction.STORE

    def reduce_part(self, stage: int, index: int, offset: int, data: memoryview) -> None:
        """Combine a part of a piece, `offset` bytes after the beginning, with the own one. In whole elements."""
        start, _ = self.plan.bounds(self.plan.chunk(stage), index)
        start += offset // self.work.itemsize
        other = np.frombuffer(data, self.work.dtype)
        stop = start + len(other)
        own = self.work[start:stop]
        self._save(stage, start, stop)
        kernels.combine(self._op, self.spec.dtype, self.source[start:stop], other, own)
        if self.plan.action(stage) is PieceAction.FINISH:
            kernels.finish(self._op, self.spec.dtype, own, self.plan.world)

    def arrived(self, stage: int, index: int, data: memoryview | None) -> OutgoingPiece | None:
        """Take a whole piece; return the piece to pass on.

        `data` is None when it is in `target` already, or was taken by `reduce_part` from beginning to end. The memory
        of `data` may be used again afterwards.
        """
        plan = self.plan
        action = plan.action(stage)
        start, stop = plan.bounds(plan.chunk(stage), index)
        own = self.work[start:stop]
        passed: memoryview = self._view(self._bytes, start, stop)
        if data is not None and self.spec.bits:
            self._save(stage, start, stop)
            passed = self._take_encoded(action, self.source[start:stop], own, data)
            if action is PieceAction.STORE and plan.forwards(stage):  # forwarded unchanged: its memory is reused
                kept = self._memory(len(data))
                np.copyto(kept, np.frombuffer(data, np.uint8))
                passed = kept.data
        elif data is not None and action is PieceAction.STORE:
            self._save(stage, start, stop)
            own.view(np.uint8)[...] = np.frombuffer(data, np.uint8)  # unlike a memoryview, lets others run
        elif data is not None:
            self.reduce_part(stage, index, 0, data)
        with self._condition:
            self.received += len(passed)
            self._arrived.add((stage, index))
        if not plan.forwards(stage):
            return None
        return OutgoingPiece(stage + 1, index, passed)

    def count_sent(self, nbytes: int) -> None:
        """Count the bytes of a piece before it is sent; called by several threads."""
        with self._condition:
            self.sent += nbytes

    def close(self) -> None:
        super().close()
        # Pieces in flight are of an operation that failed on all peers: their content does not matter.
        while self._lent:
            self._pool.give(self._lent.pop())

    def restore(self) -> None:
        """After `close`: restore the caller's array."""
        if self._backup is not None:
            for start, stop in self._saved:
                self.work[start:stop] = self._backup[start:stop]

    # --- inside

    def _view(self, data: memoryview, start: int, stop: int) -> memoryview:
        size = self.work.itemsize
        return data[start * size : stop * size]

    def _save(self, stage: int, start: int, stop: int) -> None:
        if self._backup is not None and stage < self._saves_until:
            self._backup[start:stop] = self.work[start:stop]
            with self._condition:
                self._saved.append((start, stop))

    def _take_encoded(self, action: PieceAction, source: np.ndarray, own: np.ndarray, data: memoryview) -> memoryview:
        """Decode, combine and encode; return the new encoding of `own`."""
        if action is PieceAction.STORE:
            if self.spec.dtype == "f32":
                quantise.decode(data, self.spec.bits, own)
            else:
                _store_wide(self._decoded(data, len(own)), self.spec.dtype, own)
            return data
        finishes = action is PieceAction.FINISH
        if self.spec.dtype == "f32" and self._op in (ReduceOp.SUM, ReduceOp.AVG):
            assert self._algorithm is not None
            divisor = (self.plan.world if self._op is ReduceOp.AVG else 1) if finishes else None
            encoded = self._memory(len(data)).data
            quantise.add_encode(data, self.spec.bits, self._algorithm, source, own, encoded=encoded, divisor=divisor)
            return encoded
        other = self._decoded(data, len(own))
        if self.spec.dtype != "f32":
            wide, other = other, np.empty_like(own)
            _store_wide(wide, self.spec.dtype, other)
        kernels.combine(self._op, self.spec.dtype, source, other, own)
        if finishes:
            kernels.finish(self._op, self.spec.dtype, own, self.plan.world)
        encoded = self._encoded(own)
        if finishes:  # the owner keeps the decoded values of the others, not the more exact ones
            _store_wide(self._decoded(encoded, len(own)), self.spec.dtype, own)
        return encoded

    def _decoded(self, data: memoryview, count: int) -> np.ndarray:
        wide = np.empty(count, np.float32)
        quantise.decode(data, self.spec.bits, wide)
        return wide

    def _encoded(self, values: np.ndarray) -> memoryview:
        out = self._memory(quantise.encoded_bytes(len(values), self.spec.bits)).data
        self._encode(values, out)
        return out

    def _memory(self, nbytes: int) -> np.ndarray:
        """Return memory for an encoded piece, until `close`: the successor may take it from where it lies."""
        array = self._pool.take(nbytes, _BYTES)
        with self._condition:
            self._lent.append(array)
        return array

    def _encode(self, values: np.ndarray, out: memoryview) -> None:
        assert self._algorithm is not None
        if self.spec.dtype == "bf16":
            values = from_bfloat16(values)
        quantise.encode(values.astype(np.float32, copy=False), self.spec.bits, self._algorithm, out)


def _store_wide(wide: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """float32 [n] -> the element type."""
    if dtype == "bf16":
        to_bfloat16(wide, out)
    else:
        with np.errstate(over="ignore"):
            out[...] = wide
