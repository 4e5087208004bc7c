"""One collective on one peer: its buffers and its place in the ring, without sockets.

A shell begins it, hands it every piece that arrives, and sends what it says. The caller's array can be restored
until `commit`: what is overwritten in place was saved first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planetary.collectives import kernels, quantise
from planetary.collectives.elements import TYPES, narrow_bf16, raw, widen_bf16
from planetary.collectives.guard import Guard
from planetary.collectives.options import QuantizationAlgorithm, ReduceOp, Spec
from planetary.collectives.ring_plan import Action, RingPlan
from planetary.core.errors import LocalProtocolError, RemoteProtocolError

PIECE_BYTES = 1 << 20


def piece_elements(dtype: str, piece_bytes: int) -> int:
    """Elements of a piece: whole quantisation blocks, so that pieces can be encoded one by one."""
    return max(piece_bytes // TYPES[dtype].itemsize // quantise.BLOCK, 1) * quantise.BLOCK


@dataclass(frozen=True)
class Outgoing:
    """A piece to send to the successor in the ring."""

    stage: int
    index: int
    data: memoryview | None  # of the working array, or of an encoded piece; None: `Operation.payload` encodes it


class Operation(Guard):
    """Buffers and progress of one collective.

    Every access to the working array from another thread is guarded; see `Guard`.

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
    ) -> None:
        """`backup`, like `work`, is given when `work` holds what must be restorable."""
        super().__init__()
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
        self._kept: list[memoryview] = []
        self.sent = self.received = 0
        self._bytes = raw(work)
        self._source_bytes = raw(source)

    # --- progress

    @property
    def complete(self) -> bool:
        """Whether every piece has arrived and was taken."""
        return len(self._arrived) == self._expected

    def announce(self) -> bool:
        """Whether the operation is complete and nobody was told so yet; true once."""
        with self._condition:
            first = self.complete and not self._announced
            self._announced |= first
            return first

    def begin(self) -> list[Outgoing]:
        """Return what is sent without waiting for anything."""
        chunk = self.plan.first
        if chunk is None:
            return []
        out = []
        for index in range(self.plan.pieces(chunk)):
            # Encoding takes time: the thread that sends does it, piece by piece.
            data = None if self.spec.bits else self._view(self._source_bytes, *self.plan.bounds(chunk, index))
            out.append(Outgoing(0, index, data))
        return out

    def payload(self, outgoing: Outgoing) -> memoryview:
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

        What stands there is saved before. The caller holds `enter` for every access.
        """
        if self.spec.bits or self.plan.action(stage) is not Action.STORE:
            return None
        start, stop = self.plan.bounds(self.plan.chunk(stage), index)
        self._save(stage, start, stop)
        return self._view(self._bytes, start, stop)

    def arrived(self, stage: int, index: int, data: memoryview | None) -> Outgoing | None:
        """Take a whole piece (`data` is None when it is in its `target` already); return what to pass on.

        With quantisation the same `data` may be passed on: the caller must not reuse its memory before it is sent.
        """
        plan = self.plan
        action = plan.action(stage)
        start, stop = plan.bounds(plan.chunk(stage), index)
        own = self.work[start:stop]
        passed: memoryview = self._view(self._bytes, start, stop)
        if data is not None:
            self._save(stage, start, stop)
            if self.spec.bits:
                passed = self._take_encoded(action, self.source[start:stop], own, data)
            elif action is Action.STORE:
                own.view(np.uint8)[...] = np.frombuffer(data, np.uint8)  # unlike a memoryview, lets others run
            else:
                other = np.frombuffer(data, own.dtype)
                kernels.combine(self._op, self.spec.dtype, self.source[start:stop], other, own)
                if action is Action.FINISH:
                    kernels.finish(self._op, self.spec.dtype, own, plan.world)
        elif action is not Action.STORE:
            raise LocalProtocolError(f"stage {stage} combines; its piece cannot have been stored in place")
        with self._condition:
            self.received += len(passed)
            self._arrived.add((stage, index))
        if not plan.forwards(stage):
            return None
        if self.spec.bits and action is Action.REDUCE:
            passed = self._encoded(own)
        return Outgoing(stage + 1, index, passed)

    def count_sent(self, nbytes: int) -> None:
        """A piece is about to be sent, by one of several threads."""
        with self._condition:
            self.sent += nbytes

    def keep(self, payload: memoryview) -> None:
        """The successor will take these bytes from where they lie: let an encoded piece live as long as this."""
        if self.spec.bits:
            with self._condition:
                self._kept.append(payload)

    def close(self) -> None:
        """See `Guard.close`."""
        super().close()
        self._kept.clear()

    def restore(self) -> None:
        """After `close`: put back what the caller's array held."""
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

    def _take_encoded(self, action: Action, source: np.ndarray, own: np.ndarray, data: memoryview) -> memoryview:
        if self.spec.dtype == "f32" and action is not Action.STORE and self._op in (ReduceOp.SUM, ReduceOp.AVG):
            quantise.decode_add(data, self.spec.bits, source, own)
            return data if action is Action.REDUCE else self._finished(own)
        if self.spec.dtype == "f32" and action is Action.STORE:
            quantise.decode(data, self.spec.bits, own)
            return data
        wide = np.empty(len(own), np.float32)
        quantise.decode(data, self.spec.bits, wide)
        if action is Action.STORE:
            _store_wide(wide, self.spec.dtype, own)
            return data
        other = wide
        if self.spec.dtype != "f32":
            other = np.empty_like(own)
            _store_wide(wide, self.spec.dtype, other)
        kernels.combine(self._op, self.spec.dtype, source, other, own)
        if action is Action.REDUCE:
            return data
        return self._finished(own)

    def _finished(self, own: np.ndarray) -> memoryview:
        """Encode a chunk that is reduced."""
        kernels.finish(self._op, self.spec.dtype, own, self.plan.world)
        encoded = self._encoded(own)
        # The owner keeps what the others will decode, not what it knows better.
        wide = own if self.spec.dtype == "f32" else np.empty(len(own), np.float32)
        quantise.decode(encoded, self.spec.bits, wide)
        if wide is not own:
            _store_wide(wide, self.spec.dtype, own)
        return encoded

    def _encoded(self, values: np.ndarray) -> memoryview:
        out = memoryview(bytearray(quantise.encoded_bytes(len(values), self.spec.bits)))
        self._encode(values, out)
        return out

    def _encode(self, values: np.ndarray, out: memoryview) -> None:
        assert self._algorithm is not None
        if self.spec.dtype == "bf16":
            values = widen_bf16(values)
        quantise.encode(values.astype(np.float32, copy=False), self.spec.bits, self._algorithm, out)


def _store_wide(wide: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """float32 [n] -> the element type."""
    if dtype == "bf16":
        narrow_bf16(wide, out)
    else:
        with np.errstate(over="ignore"):
            out[...] = wide
