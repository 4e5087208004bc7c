"""What each call of the collectives costs: two peers on loopback, a state of 100,000 float32 parameters.

    python bench/collective_calls.py [--repeat 200]

Prints the median and the least of the milliseconds that rank 0 spends in each call, as one JSON object. On a busy
machine the least says more about the library, the median about the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from planetary.collectives import Communicator, Master, SharedState

PARAMETERS = 100_000


def peer(rank: int, address: str, repeat: int, meet: Any, pipe: Any) -> None:
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = call()
        times.setdefault(name, []).append((time.perf_counter() - begun) * 1000)
        return result

    array = np.ones(PARAMETERS, np.float32)
    state = SharedState({"parameters": np.ones(PARAMETERS, np.float32)}, revision=0)
    with Communicator(address, transport="tcp") as comm:
        comm.update_topology(min_world_size=2)
        for _ in range(repeat):
            for name, call in (
                ("are_peers_pending", comm.are_peers_pending),
                ("update_topology", comm.update_topology),
                ("sync_shared_state", lambda: comm.sync_shared_state(state)),
            ):
                meet.wait()
                timed(name, call)
            state.push_revision()
            meet.wait()
            work = timed("all_reduce_async", lambda: comm.all_reduce_async(array))
            timed("wait", work.wait)
        meet.wait()
    if rank == 0:
        pipe.send(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=200)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    meet = context.Barrier(2)
    here, there = context.Pipe()
    with Master("127.0.0.1:0") as master:
        peers = [
            context.Process(target=peer, args=(rank, master.address, options.repeat, meet, there), daemon=True)
            for rank in range(2)
        ]
        for process in peers:
            process.start()
        times = here.recv()
        for process in peers:
            process.join(30)
    report = {
        name: {"median_ms": round(statistics.median(values), 3), "least_ms": round(min(values), 3)}
        for name, values in times.items()
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
