"""What a composer sends: packed beside its steps, one message after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import msgspec

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.store import digest_of
from planetary.fabric.protocol import messages as m

Send = Callable[[m.Message, Packed | None], None]
"""Queue a message, with a payload where it has one."""


class ComposerPost:
    """See the module.

    Args:
        send: from whichever thread packs.
        packing: of one thread; None: everything is packed and sent at once.
        failed: is told, from that thread, why a payload could not be packed.
    """

    def __init__(self, send: Send, packing: Executor | None, failed: Callable[[Exception], None]) -> None:
        self.send, self._packing, self._failed = send, packing, failed
        self._connection = 0  # how many there were

    def put(self, message: m.Message, kind: str = "", pack: Callable[[], Packed] | None = None) -> None:
        """Send a message, with the payload that `pack` makes; as `payload` it has kind and sha256 of it.

        Without a kind it says itself what it carries. What a payload is made of must not be changed from now on.
        """
        if pack is None:
            self.send(message, None)
        elif self._packing is None:
            self._pack_and_send(message, kind, pack)
        else:
            self._packing.submit(self._pack_and_send_or_fail, message, kind, pack, self._connection)

    def forget(self) -> None:
        """Drop what waits to be packed: it was for a connection that is lost."""
        self._connection += 1

    def _pack_and_send(self, message: m.Message, kind: str, pack: Callable[[], Packed]) -> None:
        data = pack()
        if kind:
            message = msgspec.structs.replace(message, payload=f"{kind}/{digest_of(data)}")
        self.send(message, data)

    def _pack_and_send_or_fail(
        self, message: m.Message, kind: str, pack: Callable[[], Packed], connection: int
    ) -> None:
        if connection != self._connection:
            return
        try:
            self._pack_and_send(message, kind, pack)
        except Exception as error:  # noqa: BLE001 - the compute thread raises it
            self._failed(error)
