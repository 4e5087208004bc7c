"""The thread of a peer that hears what the master says, lets deadlines pass, and dials a master that was restarted."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from planetary.collectives.peer import peer_events as e
from planetary.collectives.peer.peer_machine import FIRST_SESSION, PeerMachine
from planetary.collectives.transport.control_stream import ControlStream
from planetary.core.errors import ClosedError, PeerError, PlanetaryError

if TYPE_CHECKING:
    from planetary.collectives.peer.peer_shell import PeerShell

log = logging.getLogger(__name__)

_WATCH_S = 0.2
_DIAL_MOST_S = 1.0


class ControlThread:
    """Serves one machine until the master is lost for good, or the peer was closed or connected anew."""

    def __init__(self, shell: PeerShell, machine: PeerMachine, stream: ControlStream) -> None:
        """`stream` is connected."""
        self._shell, self._machine, self._stream = shell, machine, stream
        self._session = FIRST_SESSION

    def start(self) -> None:
        """Begin; nobody waits for its end."""
        threading.Thread(target=self._run, name="planetary ring control", daemon=True).start()

    @property
    def _serving(self) -> bool:
        return self._shell.runs(self._machine)

    def _run(self) -> None:
        try:
            while self._serving:
                try:
                    self._listen()
                except (PlanetaryError, OSError) as error:
                    self._stream.close()
                    self._shell.handle(e.Closed(self._session, str(error)))
                if self._serving and self._machine.state == "away" and not self._dial_again():
                    return
        except Exception as error:
            log.exception("the control thread failed")
            self._stream.close()
            self._shell.fail_all(ClosedError(f"internal error of the communicator: {type(error).__name__}: {error}"))
            raise

    def _listen(self) -> None:
        shell = self._shell
        while self._serving:
            for message in self._stream.receive(self._until_next()):
                shell.handle(e.Received(self._session, message))
            shell.watch()
            deadline = shell.next_deadline()
            if deadline is not None and deadline <= time.monotonic():
                shell.handle(e.Tick())
            if self._machine.state == "away":
                raise PeerError("the master was silent")

    def _dial_again(self) -> bool:
        shell = self._shell
        while self._serving:
            session = shell.take_dial(self._machine)
            if not session:
                time.sleep(min(self._until_next(), _WATCH_S))
                shell.handle(e.Tick())
                continue
            try:
                self._stream = shell.dial(_DIAL_MOST_S)
            except (PlanetaryError, OSError) as error:
                log.debug("reconnecting to the master: %s", error)
                shell.handle(e.Closed(session, str(error)))
            else:
                self._session = session
                shell.speak_over(self._stream)
                shell.handle(e.Opened(session))
                return True
        return False

    def _until_next(self) -> float:
        deadline = self._shell.next_deadline()
        wait = _WATCH_S if self._shell.calls.transfers else 1.0
        return wait if deadline is None else min(wait, max(deadline - time.monotonic(), 0.0))
