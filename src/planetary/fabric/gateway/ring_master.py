"""The master of the workers' ring, in the gateway."""

from __future__ import annotations

from planetary.collectives import Master
from planetary.core.config import SyncConfig
from planetary.net.authority import Authority


class RingMaster:
    """Runs beside the gateway's server when the topology is a ring, and does nothing otherwise."""

    def __init__(self, config: SyncConfig, host: str, authority: Authority | None) -> None:
        """`host`: the address that workers connect to; `authority` None: plain connections, on loopback only."""
        self.wanted = config.topology == "ring"
        bracketed = f"[{host}]" if ":" in host else host
        self._master = Master(f"{bracketed}:{config.port}", authority=authority) if self.wanted else None

    @property
    def port(self) -> int:
        """Where it listens; 0 when there is no ring."""
        return int(self._master.address.rpartition(":")[2]) if self._master is not None else 0

    def start(self) -> None:
        """Listen. Raises `UserError` for an address that cannot be used."""
        if self._master is not None:
            self._master.start()

    def stop(self) -> None:
        """End it, with all its connections."""
        if self._master is not None:
            self._master.stop()
