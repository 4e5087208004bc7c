"""One peer of the churn test, as a program: joins, trains, checks itself, until it is told to stop or killed.

    python churn_peer.py ADDRESS NAME REPORT STOP

Writes a line of JSON per step to REPORT. Leaves when the file STOP exists.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

from planetary.collectives import (
    AbortedError,
    Communicator,
    PeerLostError,
    RemovedError,
    SharedState,
    StragglerError,
)

TENSORS, ELEMENTS = 8, 40_000


def contribution(step: int, tag: int) -> np.ndarray:
    """Equal on all peers, small integers: the average is known exactly for every number of peers."""
    return ((np.arange(ELEMENTS) + 31 * step + 7 * tag) % 97).astype(np.float32)


def main(address: str, name: str, report: Path, stop: Path) -> None:
    weights = [np.zeros(ELEMENTS, np.float32) for _ in range(TENSORS)]
    state = SharedState({f"w{i}": w for i, w in enumerate(weights)})
    lines = report.open("a", buffering=1)
    with Communicator(address, name=name, timeout_s=20, stall_s=10) as comm:
        comm.update_topology(timeout_s=60)
        fresh = True
        while True:
            if not fresh and comm.are_peers_pending():
                comm.update_topology()
            fresh = False
            while True:
                try:
                    info = comm.sync_shared_state(state)
                    break
                except RemovedError:
                    raise
                except AbortedError:
                    continue
            digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
            arrays = [contribution(state.revision, tag) for tag in range(TENSORS)]
            kept = [array.copy() for array in arrays]
            works = {tag: comm.all_reduce_async(array, op="avg", tag=tag) for tag, array in enumerate(arrays)}
            aborts = 0
            while works:
                tag, work = next(iter(works.items()))
                del works[tag]
                try:
                    work.wait()
                except AbortedError:
                    aborts += 1
                    assert (arrays[tag] == kept[tag]).all(), "an aborted operation left its array changed"
                    if comm.connected:
                        works[tag] = comm.all_reduce_async(arrays[tag], op="avg", tag=tag)
                        continue
                    raise
                assert (arrays[tag] == kept[tag]).all(), "a result is not the average"
            line = {
                "revision": state.revision,
                "digest": digest,
                "world": comm.world_size,
                "aborts": aborts,
                "received": len(info.received),
                "at": time.time(),
            }
            lines.write(json.dumps(line) + "\n")
            for weight, array in zip(weights, arrays, strict=True):
                np.subtract(weight, array * np.float32(0.01), out=weight)
            state.push_revision()
            if stop.exists():
                return


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    except (PeerLostError, StragglerError) as error:
        # At the end, peers that see the stop file leave one step before others that wait for them.
        if not Path(sys.argv[4]).exists():
            raise
        sys.stderr.write(f"left at the end: {error}\n")
