"""Memory of a server with TLS that thousands of connections call upon and never introduce themselves.

    python bench/idle_connections.py --attempts 4000

Attempts are made in a process of their own, as many at once as the server bears, and stay open until they are ended.
Prints the server's resident memory before, with all attempts made, and after they have gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from planetary.core.errors import PeerError
from planetary.fleet.protocol.messages import FABRIC, Shutdown
from planetary.net import Authority, Connection, ServerLimits, Trust, connect, serve
from planetary.net.invite import mint
from planetary.net.strangers import StrangerLimits

CALL = """
import socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
held = []
for _ in range(count):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"\\x16")
    held.append(sock)
print("made", flush=True)
sys.stdin.read()
"""


async def measure(attempts: int, at_once: int) -> None:
    """Run one server and print what it takes."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.open(Path(folder), time.time())
        token = mint(authority.invite_secret, authority.fingerprint)

        async def attend(connection: Connection) -> None:
            connection.accept_peer()
            await connection.receive()

        limits = ServerLimits(connections=max(1024, at_once), strangers=StrangerLimits(at_once=at_once))
        server = await serve("127.0.0.1", 0, attend, FABRIC, tls=authority.server_context(), limits=limits)
        before = memory_mb()
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CALL,
            str(server.port),
            str(attempts),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        await child.stdout.readline()
        most, strangers = memory_mb(), server.strangers
        began = time.monotonic()
        peer: Connection | None = None
        while peer is None:
            try:
                peer = await connect("127.0.0.1", server.port, Trust(token), FABRIC)
            except PeerError:  # all places are taken by others who have just come: as a node does, again
                await asyncio.sleep(0.1)
        await peer.send(Shutdown(reason="a peer among them"))
        joined_s = time.monotonic() - began
        child.terminate()
        await child.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15.0):
                while server.strangers:
                    await asyncio.sleep(0.05)
        print(
            f"at_once {at_once}: {before:.0f} MB before, {most:.0f} MB with {attempts} attempts made "
            f"({strangers} strangers), {memory_mb():.0f} MB after; a peer joined among them in {joined_s:.2f} s"
        )
        peer.abort()
        await server.close()


def memory_mb() -> float:
    """Return this process's resident memory."""
    return psutil.Process().memory_info().rss / 1e6


def main() -> None:
    """Measure the server with its limits, or without them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=4000)
    parser.add_argument("--unlimited", action="store_true", help="as many places as attempts")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(measure(args.attempts, args.attempts if args.unlimited else StrangerLimits().at_once))


if __name__ == "__main__":
    main()
