"""Ports of a shell to the machine it runs on, beside the event loop: the simulator passes simulated parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.core.clock import Clock, SystemClock
from planetary.fleet.shell.child import Child, StartChild
from planetary.machine.machine import Validated
from planetary.net.network import TCP, Network


def one_thread(name: str) -> Executor:
    """Return an executor that runs calls one after the other in a separate thread."""
    return ThreadPoolExecutor(1, thread_name_prefix=name)


def daemon_thread(name: str, work: Callable[[], object]) -> None:
    """Call `work` in a detached thread."""
    threading.Thread(target=work, name=name, daemon=True).start()


def available_memory() -> int | None:
    """Return the bytes that programs can still take; None: not known."""
    from planetary.runtime.host import available_memory  # only workers report it, and supervisors start without it

    return available_memory()


def unobserved(machine: Validated) -> None:
    """Take no notice of a machine."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One machine as shells see it.

    Attributes:
        clock: for deadlines, durations and dates.
        network: dials and listens.
        files: of journals, checkpoints, blobs and locks.
        threads: makes an executor with one thread, from a name; the thread may block.
        aside: calls a function in a detached thread, from a name.
        start_child: starts a child process.
        pid: returns the id of the calling process.
        entropy: returns so many bytes that cannot be predicted.
        memory: returns the bytes that programs can still take; None: not known.
        observe: is called with a machine after each event it handled.
    """

    clock: Clock = field(default_factory=SystemClock)
    network: Network = TCP
    files: DurableFiles = DISK
    threads: Callable[[str], Executor] = one_thread
    aside: Callable[[str, Callable[[], object]], None] = daemon_thread
    start_child: StartChild = Child.start
    pid: Callable[[], int] = os.getpid
    entropy: Callable[[int], bytes] = os.urandom
    memory: Callable[[], int | None] = available_memory
    observe: Callable[[Validated], None] = unobserved


SYSTEM = System()
"""The machine that this process runs on."""
