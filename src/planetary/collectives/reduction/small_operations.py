"""Operations so small that the master relays their data to all peers: one round trip.

The master reads no number: it passes on the contributions, in the order of the ring, and each peer combines them
by itself, in the order in which a ring would have. Their delivery decides the operation: no later step could fail on
one peer and not on another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.collectives.protocol.options import ReduceOp, Spec
from planetary.collectives.reduction import kernels
from planetary.collectives.reduction.elements import TYPES
from planetary.collectives.reduction.ring_plan import split

_OWN_MOST = 4 << 10  # bytes of one peer
_ALL_MOST = 64 << 10  # bytes of all peers, which each of them receives


def is_small(spec: Spec, world: int) -> bool:
    """Whether an operation of `world` peers goes through the master."""
    if spec.bits or spec.verify or spec.kind not in ("all_reduce", "barrier"):
        return False
    return data_bytes(spec) <= min(_OWN_MOST, _ALL_MOST // world)


def data_bytes(spec: Spec) -> int:
    """Bytes of each peer's contribution."""
    return spec.count * TYPES[spec.dtype].itemsize if spec.dtype in TYPES else 0


def combine(spec: Spec, parts: Sequence[bytes], out: np.ndarray) -> None:
    """Contributions by rank, `data_bytes` each -> the result, [count]; the same bits as round the ring."""
    world = len(parts)
    held = [np.frombuffer(part, TYPES[spec.dtype]) for part in parts]
    op = ReduceOp(spec.op)
    for chunk, (start, stop) in enumerate(split(spec.count, world)):
        total = held[chunk][start:stop].copy()
        for step in range(1, world):
            kernels.combine(op, spec.dtype, held[(chunk + step) % world][start:stop], total, total)
        kernels.finish(op, spec.dtype, total, world)
        out[start:stop] = total
