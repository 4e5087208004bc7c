"""Tensor throughput of one loopback connection between two processes, plain and over TLS.

    python bench/net_throughput.py [--mebibytes 256] [--repeat 5]

Prints one JSON object per transport: the median over the repetitions in MB/s (10^6 bytes), from the start of
the send to the receiver's answer that the whole message arrived and matched its checksums.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

from planetary.fleet.protocol.messages import FABRIC, Parameters, Shutdown
from planetary.net import Authority, Connection, Trust, connect, serve
from planetary.net.invite import mint


def receiver(folder: str | None, pipe: Pipe) -> None:
    async def answer(connection: Connection) -> None:
        connection.accept_peer()
        while True:
            received = await connection.receive()
            await connection.send(Shutdown(reason=f"{received.nbytes}"))

    async def run() -> None:
        tls = Authority.open(Path(folder), time.time()).server_context() if folder else None
        async with await serve("127.0.0.1", 0, answer, FABRIC, tls=tls) as server:
            pipe.send(server.port)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


async def measure(port: int, trust: Trust, nbytes: int, repeat: int) -> list[float]:
    connection = await connect("127.0.0.1", port, trust, FABRIC)
    array = np.random.default_rng(0).integers(0, 2**63, nbytes // 8, dtype="<i8")
    await connection.send(Shutdown(reason="hello"))  # strangers may not send tensors
    await connection.receive(60)
    rates = []
    for version in range(repeat + 1):  # the first one warms up
        start = time.perf_counter()
        await connection.send(Parameters(version=version), {"w": array})
        await connection.receive(60)
        rates.append(array.nbytes / (time.perf_counter() - start) / 1e6)
    await connection.close("measured")
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.open(Path(folder), time.time())
        token = mint(authority.invite_secret, authority.fingerprint)
        for name, state, trust in (("plain", None, Trust.plain_loopback()), ("tls", folder, Trust(token))):
            pipe, other = spawn.Pipe()
            process = spawn.Process(target=receiver, args=(state, other))
            process.start()
            rates = asyncio.run(measure(pipe.recv(), trust, options.mebibytes << 20, options.repeat))
            pipe.send("over")
            process.join(10)
            result = {
                "transport": name,
                "mebibytes": options.mebibytes,
                "median_mb_s": statistics.median(rates),
            }
            print(json.dumps(result | {"all_mb_s": [round(rate) for rate in rates]}))


if __name__ == "__main__":
    main()
