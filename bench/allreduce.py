"""All-reduce of planetary, Gloo and the raw loopback limit, alternating in one run.

    python bench/allreduce.py [--world 2] [--mebibytes 4 64] [--repeat 7] [--concurrent 1] [--bits 8 4]

Each rank is a process. A round of measurements runs every candidate once, in turn, so that all of them see the same
load of the machine; medians over the rounds, in milliseconds, and ratios to Gloo are printed as one JSON object per
size. `cpu_ms` is the processor time of rank 0, which a busy machine disturbs less. `raw` sends and receives the bytes
of a ring all-reduce through plain sockets, and adds once: the least that any ring over TCP can do. `tcp` and
`shm` are planetary's transports in place, `_out` into another array, `_int8` quantised. Gloo is left out when torch is
not installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from planetary.collectives import Communicator, Master, Quantization, SocketOptions

CHUNK = 1 << 20


class Raw:
    """The bytes of a ring all-reduce through sockets, and the additions."""

    def __init__(self, rank: int, world: int, ports: list[int], listener: socket.socket) -> None:
        self.rank, self.world = rank, world
        self.out = socket.create_connection(("127.0.0.1", ports[(rank + 1) % world]))
        self.incoming, _ = listener.accept()
        for sock in (self.out, self.incoming):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.scratch = np.empty(CHUNK // 4, np.float32)

    def run(self, array: np.ndarray) -> None:
        share = len(array) // self.world
        steps = 2 * (self.world - 1)

        def send() -> None:
            for _ in range(steps):
                self.out.sendall(memoryview(array[:share]).cast("B"))

        thread = threading.Thread(target=send)
        thread.start()
        for step in range(steps):
            for start in range(0, share, len(self.scratch)):
                part = array[start : min(start + len(self.scratch), share)]
                into = self.scratch[: len(part)] if step < self.world - 1 else part
                view = memoryview(into).cast("B")
                while view:
                    view = view[self.incoming.recv_into(view) :]
                if into is not part:
                    np.add(part, into, out=part)
        thread.join()


def candidates(
    rank: int, address: str, options: argparse.Namespace, *, raw: Raw, store: str
) -> tuple[dict[str, Callable[[list[np.ndarray]], None]], Callable[[], None]]:
    """Return the things to measure, and what to call at the end."""
    world = options.world
    sockets = SocketOptions(congestion=options.congestion)
    communicators = {
        transport: Communicator(
            address, group, connections=options.connections, timeout_s=60, sockets=sockets, transport=transport
        )
        for group, transport in enumerate(("tcp", "auto"))
    }
    for communicator in communicators.values():
        communicator.connect()
        communicator.update_topology(min_world_size=world)
    outs: dict[tuple[int, int], np.ndarray] = {}

    def ours(arrays: list[np.ndarray], transport: str, bits: int = 0, separate: bool = False) -> None:
        quantization = Quantization(bits) if bits else None
        works = []
        for tag, array in enumerate(arrays):
            out = None
            if separate:
                if (array.nbytes, tag) not in outs:
                    outs[array.nbytes, tag] = np.zeros_like(array)
                out = outs[array.nbytes, tag]
            works.append(communicators[transport].all_reduce_async(array, out=out, tag=tag, quantization=quantization))
        for work in works:
            work.wait()

    found: dict[str, Callable[[list[np.ndarray]], None]] = {
        "tcp": lambda arrays: ours(arrays, "tcp"),
        "tcp_out": lambda arrays: ours(arrays, "tcp", separate=True),
        "shm": lambda arrays: ours(arrays, "auto"),
        "shm_out": lambda arrays: ours(arrays, "auto", separate=True),
    }
    for bits in options.bits:
        found[f"tcp_int{bits}"] = lambda arrays, bits=bits: ours(arrays, "tcp", bits)
    found["raw"] = lambda arrays: [raw.run(array) for array in arrays] and None
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return found, lambda: [communicator.close() for communicator in communicators.values()] and None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{store}", rank=rank, world_size=world)

    def gloo(arrays: list[np.ndarray]) -> None:
        works = [dist.all_reduce(torch.from_numpy(array), async_op=True) for array in arrays]
        for work in works:
            assert work is not None
            work.wait()

    found["gloo"] = gloo

    def close() -> None:
        dist.destroy_process_group()
        for communicator in communicators.values():
            communicator.close()

    return found, close


def rank_main(rank: int, address: str, options: argparse.Namespace, pipe: Any, meet: tuple[Any, str]) -> None:
    barrier, store = meet
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    raw = Raw(rank, options.world, pipe.recv(), listener)
    found, close = candidates(rank, address, options, raw=raw, store=store)
    for nbytes in sizes(options):
        arrays = [np.full(nbytes // 4 // options.concurrent, 1.0, np.float32) for _ in range(options.concurrent)]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for round_ in range(options.repeat + 1):  # the first one warms up
            for name, run in found.items():
                for array in arrays:
                    array.fill(1.0)
                repeats = 50 if nbytes <= 1 << 16 else 1
                barrier.wait()
                begun, cpu = time.perf_counter(), time.process_time()
                for _ in range(repeats):
                    run(arrays)
                spent, cpu = time.perf_counter() - begun, time.process_time() - cpu
                if round_:
                    times[name].append((spent / repeats * 1000, cpu / repeats * 1000))
        if rank == 0:
            pipe.send((nbytes, times))
    if rank == 0:
        pipe.send((0, {"peak_mib": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]}))
    barrier.wait()
    close()


def sizes(options: argparse.Namespace) -> list[int]:
    return [1024, *(size << 20 for size in options.mebibytes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, nargs="*", default=[4, 64])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--concurrent", type=int, default=1)
    parser.add_argument("--connections", type=int, default=None)
    parser.add_argument("--congestion", default=SocketOptions().congestion)
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"127.0.0.1:{free.getsockname()[1]}"
    with Master("127.0.0.1:0") as master:
        barrier = context.Barrier(options.world)
        pipes = [context.Pipe() for _ in range(options.world)]
        processes = [
            context.Process(
                target=rank_main, args=(rank, master.address, options, there, (barrier, store)), daemon=True
            )
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        ports = [here.recv() for here, _ in pipes]
        for here, _ in pipes:
            here.send(ports)
        while True:
            nbytes, times = pipes[0][0].recv()
            if not nbytes:
                print(json.dumps(times))
                break
            medians = {name: round(statistics.median(wall for wall, _ in values), 3) for name, values in times.items()}
            cpu = {name: round(statistics.median(cpu for _, cpu in values), 3) for name, values in times.items()}
            line: dict[str, Any] = {"world": options.world, "bytes": nbytes, "concurrent": options.concurrent}
            line["median_ms"], line["cpu_ms"] = medians, cpu
            for base in ("gloo", "raw"):
                if base in medians:
                    line[f"ratio_to_{base}"] = {name: round(ms / medians[base], 3) for name, ms in medians.items()}
            print(json.dumps(line), flush=True)
        for process in processes:
            process.join(30)


if __name__ == "__main__":
    main()
