"""A master in PCCL's names and manners."""

from __future__ import annotations

import atexit

from planetary import collectives as c
from planetary.compat.pccl.communicator import pccl_errors
from planetary.compat.pccl.security import authority, warn_unencrypted
from planetary.compat.pccl.types import Result

_POLL_S = 0.5


class MasterNode:
    """The master. Once it runs, the program does not end before `interrupt`, SIGINT or SIGTERM.

    In PCCL the destructor waits for the master's end, so a program whose last line is `master.run()` serves until it is
    interrupted. Here the end of the interpreter waits instead: a destructor that blocks would stop whichever thread the
    garbage collector happens to run in.
    """

    def __init__(self, listen_address: str) -> None:
        """Prepare; `run` listens. Raises `PCCLError` for an address or a `PLANETARY_AUTHORITY` that cannot be used."""
        with pccl_errors("pcclCreateMaster", Result.INVALID_ARGUMENT):
            self._master = c.Master(listen_address, authority=authority(), allow_unencrypted=True)

    @property
    def address(self) -> str:
        """The address listened on, with the real port."""
        return self._master.address

    def run(self) -> None:
        """Serve in the background. Raises `PCCLError` when the address cannot be listened on."""
        with pccl_errors("pcclRunMaster", Result.INVALID_USAGE):
            self._master.start()
        if not (self._master.encrypted or self._master.on_loopback):
            warn_unencrypted(f"the master at {self._master.address}")
        _running.append(self._master)

    def interrupt(self) -> None:
        """Stop."""
        self._master.stop()
        if self._master in _running:
            _running.remove(self._master)


_running: list[c.Master] = []
"""Masters the end of the program waits for. Not weak: a master whose `MasterNode` is gone still serves."""


@atexit.register
def _serve_until_interrupted() -> None:
    try:
        while _running:
            if _running[-1].wait(_POLL_S):
                _running.pop()
    except KeyboardInterrupt:  # the way in which a program that only serves is ended
        while _running:
            _running.pop().stop()
