"""Real masters and communicators on loopback, each peer in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planetary.collectives import Communicator, Master
from planetary.collectives.peer.shell import PeerShell
from planetary.collectives.transport import direct_memory
from waiting import HANG_S


class OpenCommunicator(Communicator):
    """Shows what is inside: for looking at connections, and for faults that no user can cause."""

    @property
    def shell(self) -> PeerShell:
        return self._shell


@contextlib.contextmanager
def ring(count: int, *, groups: tuple[int, ...] = (), **options: Any) -> Iterator[tuple[Master, list[Communicator]]]:
    """A master and `count` admitted peers of one group (or of the groups that are named)."""
    options = {"timeout_s": 10.0, "stall_s": 5.0, **options}
    with Master("127.0.0.1:0") as master, contextlib.ExitStack() as stack:
        peers: list[Communicator] = [
            stack.enter_context(
                OpenCommunicator(master.address, groups[i] if groups else 0, name=f"peer-{i}", **options)
            )
            for i in range(count)
        ]
        sizes = [groups.count(groups[i]) if groups else count for i in range(count)]
        together(lambda i: peers[i].update_topology(min_world_size=sizes[i]), count)
        yield master, peers


def together(call: Callable[[int], Any], count: int) -> list[Any]:
    """Call for each peer in a thread of its own; return results in order. An error is raised here."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = call(i)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    if errors:
        raise errors[0]  # the others may be waiting for the one that failed
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the exception, of a call."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return error


def shell_of(peer: Communicator) -> PeerShell:
    assert isinstance(peer, OpenCommunicator)
    return peer.shell


def vanish(peer: Communicator) -> None:
    """Let a peer disappear as if it had been killed: its sockets close, nothing is said."""
    shell_of(peer).abandon()


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system not allow one process to read the memory of another."""
    monkeypatch.setattr(direct_memory, "_process_vm_readv", lambda: None)
