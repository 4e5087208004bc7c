"""All-reduces of two source trees, alternating in one run.

    python bench/allreduce_ratio.py BEFORE/src AFTER/src [--rounds 40] [--calls 100] [--kibibytes 1] [--transport tcp]

Each tree has a master and two peers in processes of their own, which wait while the other tree's are measured. Printed
as JSON: medians over the rounds of all-reduces of that size (wall clock, processor time of rank 0 and of the master, in
milliseconds a call), and after / before. `--tls`: with certificates and an invite token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path


def rank_main(address: str, token: str, kibibytes: int, transport: str, pipe: Connection) -> None:
    import numpy as np

    from planetary.collectives import Communicator

    array = np.ones(256 * kibibytes, np.float32)
    with Communicator(address, token=token, transport=transport, timeout_s=20) as peer:
        peer.update_topology(min_world_size=2)
        pipe.send(None)
        while calls := pipe.recv():
            wall, cpu = [], time.process_time()
            for _ in range(calls):
                start = time.perf_counter()
                peer.all_reduce(array, op="avg")
                wall.append(time.perf_counter() - start)
            pipe.send((statistics.median(wall) * 1e3, (time.process_time() - cpu) / calls * 1e3))


def serve_tree(folder: str, kibibytes: int, transport: str, *, tls: bool) -> None:
    """Measure as many calls as each line of the standard input says; 0 ends."""
    from planetary.collectives import Master
    from planetary.net import Authority
    from planetary.net.invite import mint

    authority, token = None, ""
    if tls:
        authority = Authority.open(Path(folder), time.time())
        token = mint(authority.invite_secret, authority.fingerprint)
    context = multiprocessing.get_context("spawn")
    with Master("127.0.0.1:0", authority=authority) as master:
        pipes = []
        for _ in range(2):
            here, there = context.Pipe()
            context.Process(
                target=rank_main, args=(master.address, token, kibibytes, transport, there), daemon=True
            ).start()
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()
        print("ready", flush=True)
        for line in sys.stdin:
            calls, cpu = int(line), time.process_time()
            for pipe in pipes:
                pipe.send(calls)
            if not calls:
                break
            (wall, rank_cpu), _ = (pipe.recv() for pipe in pipes)
            print(json.dumps([wall, rank_cpu, (time.process_time() - cpu) / calls * 1e3]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="SRC")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--kibibytes", type=int, default=1)
    parser.add_argument("--transport", choices=("auto", "tcp"), default="auto")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    if not options.trees:
        with tempfile.TemporaryDirectory() as folder:
            serve_tree(folder, options.kibibytes, options.transport, tls=options.tls)
        return
    trees = []
    for path in options.trees:
        sizes = [f"--kibibytes={options.kibibytes}", f"--transport={options.transport}"]
        command = [sys.executable, __file__, *sizes, *(["--tls"] if options.tls else [])]
        environment = os.environ | {"PYTHONPATH": path}
        trees.append(
            subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )

    def ask(tree: subprocess.Popen[str], calls: int) -> list[float]:
        assert tree.stdin is not None
        assert tree.stdout is not None
        tree.stdin.write(f"{calls}\n")
        tree.stdin.flush()
        return json.loads(tree.stdout.readline()) if calls else []

    for tree in trees:
        assert tree.stdout is not None
        assert tree.stdout.readline() == "ready\n"
    found: list[list[list[float]]] = [[] for _ in trees]
    for round_ in range(options.rounds + 2):  # the first two warm up
        places = range(len(trees)) if round_ % 2 else reversed(range(len(trees)))
        for place in places:
            found[place].append(ask(trees[place], options.calls))
    for tree in trees:
        ask(tree, 0)
        tree.wait(20)
    names = ("wall", "cpu of rank 0", "cpu of the master")
    medians = [[statistics.median(column) for column in zip(*rounds[2:], strict=True)] for rounds in found]
    for path, values in zip(options.trees, medians, strict=True):
        print(json.dumps({"tree": path, **{name: round(v, 3) for name, v in zip(names, values, strict=True)}}))
    before, after = medians[0], medians[-1]
    print(json.dumps({name: round(a / b, 3) for name, a, b in zip(names, after, before, strict=True)}))


if __name__ == "__main__":
    main()
