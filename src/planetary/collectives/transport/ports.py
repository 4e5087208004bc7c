"""Services of the machine under a master or a peer: `HERE` is the real one, the simulator passes another."""

from __future__ import annotations

import contextlib
import secrets
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.collectives.transport.bulk_network import SOCKETS, BulkNetwork
from planetary.core.clock import Clock, SystemClock
from planetary.core.threads import THREADS, Threads
from planetary.machine.machine import Machine
from planetary.net.loop_thread import BackgroundLoop, LoopThread
from planetary.net.network import TCP, Network


def machine_identity() -> str:
    """Return an identity that is equal for peers on one machine and differs between machines."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + socket.gethostname()
    return f"{uuid.getnode():x}{socket.gethostname()}"


def draw_id() -> str:
    """Return 128 random bits, hexadecimal."""
    return secrets.token_hex(16)


def _unobserved(machine: Machine[Any, Any], event: object, instructions: Sequence[object]) -> None:
    """Take no notice of a machine."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """One machine as masters and peers see it.

    Attributes:
        clock: for deadlines and durations.
        threads: starts threads and makes their locks and queues.
        start_loop: starts an event loop beside the threads, from a name.
        network: of control connections.
        bulk: of bulk connections.
        files: of the master's journal.
        machine: returns the machine's identity, by which peers find that they share one.
        draw_id: returns the id of a new peer, or the key of a new group.
        observe: is called with a machine, an event it handled, and the instructions.
    """

    clock: Clock = field(default_factory=SystemClock)
    threads: Threads = THREADS
    start_loop: Callable[[str], BackgroundLoop] = LoopThread
    network: Network = TCP
    bulk: BulkNetwork = SOCKETS
    files: DurableFiles = DISK
    machine: Callable[[], str] = machine_identity
    draw_id: Callable[[], str] = draw_id
    observe: Callable[[Machine[Any, Any], object, Sequence[object]], None] = _unobserved


HERE = Ports()
"""The machine that this process runs on."""
