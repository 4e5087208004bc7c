"""Runs the operations of all ranks of a ring against each other in memory, delivering pieces in random order."""

from __future__ import annotations

import random

import numpy as np

from planetary.collectives.protocol.options import Spec
from planetary.collectives.reduction.operation import BufferedOperation, piece_elements
from planetary.collectives.reduction.ring_plan import plan


def operations(
    spec: Spec, arrays: list[np.ndarray], *, piece_bytes: int = 1, root: int = 0, in_place: bool = True
) -> list[BufferedOperation]:
    """One operation per rank; with `in_place` the arrays become the results and can be restored."""
    world = len(arrays)
    piece = piece_elements(spec.dtype, piece_bytes)
    made = []
    for rank, array in enumerate(arrays):
        ring_plan = plan(spec.kind, rank, world, count=spec.count, piece=piece, root=root)
        work = array if in_place else np.empty_like(array)
        made.append(BufferedOperation(spec, ring_plan, array, work, np.empty_like(array) if in_place else None))
    return made


def drive(ring: list[BufferedOperation], seed: int = 0, most: int | None = None) -> int:
    """Deliver pieces until nothing is under way (or `most` were); return how many were delivered."""
    rng = random.Random(seed)
    flying = [
        (rank, outgoing.stage, outgoing.index, bytes(operation.payload(outgoing)))
        for rank, operation in enumerate(ring)
        for outgoing in operation.begin()
    ]
    delivered = 0
    while flying and (most is None or delivered < most):
        rank, stage, index, data = flying.pop(rng.randrange(len(flying)))
        receiver = (rank + 1) % len(ring)
        operation = ring[receiver]
        assert operation.wire_bytes(stage, index) == len(data)
        target = operation.target(stage, index)
        if target is not None:
            target[:] = data
        passed = operation.arrived(stage, index, None if target is not None else memoryview(data))
        if passed is not None:
            assert passed.data is not None
            flying.append((receiver, passed.stage, passed.index, bytes(passed.data)))
        delivered += 1
    return delivered
