"""How much memory one all-reduce needs beside its tensor: two peers on loopback.

    python bench/collective_memory.py [--mebibytes 256]

Each way is measured in processes of its own: the highest resident memory during the first operation, above what was
resident before it, over the size of the tensor. Printed as one JSON object, in tensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any, Literal

import numpy as np

from planetary.collectives import Communicator, Master

WAYS: tuple[tuple[Literal["tcp", "auto"], bool], ...] = (("tcp", False), ("tcp", True), ("auto", False), ("auto", True))


def resident(field: str) -> int:
    """Bytes of a field of this process's status, such as `VmHWM`, the highest so far, or `VmRSS`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":"))) << 10


def peer(address: str, transport: Literal["tcp", "auto"], separate: bool, nbytes: int, pipe: Any) -> None:
    array = np.ones(nbytes // 4, np.float32)
    out = np.ones_like(array) if separate else None
    with Communicator(address, transport=transport) as comm:
        comm.update_topology(min_world_size=2)
        comm.all_reduce(np.ones(100_000, np.float32))  # connections and threads
        Path("/proc/self/clear_refs").write_text("5")  # the highest is counted from here
        before = resident("VmRSS")
        comm.all_reduce(array, out=out)
        pipe.send((resident("VmHWM") - before) / nbytes)
        comm.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mebibytes", type=int, default=256)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    for transport, separate in WAYS:
        here, there = context.Pipe()
        with Master("127.0.0.1:0") as master:
            arguments = (master.address, transport, separate, options.mebibytes << 20, there)
            processes = [context.Process(target=peer, args=arguments, daemon=True) for _ in range(2)]
            for process in processes:
                process.start()
            found[f"{transport}{'_out' if separate else ''}"] = round(max(here.recv() for _ in range(2)), 3)
            for process in processes:
                process.join(30)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
