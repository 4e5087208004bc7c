"""How the files and the status of a served model are read."""

from __future__ import annotations

import msgspec

from planetary.fleet.protocol.kind_reader import KindReader
from planetary.fleet.protocol.records import AnyRecord
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.status import RunStatus


class ServerLoad(msgspec.Struct, frozen=True):
    """One worker with a copy of a served model.

    Attributes:
        running: sequences that it continues.
        cache_used: fraction of its cache's pages in use, 0 to 1.
    """

    running: int
    cache_used: float


class ServingStatus(RunStatus, frozen=True, kw_only=True):
    """A served model, as the gateway sees it."""

    kind: str = "serving"

    endpoint: str = ""  # URL of the HTTP interface and the chat page; "": it does not listen yet
    model: str = ""  # model name in requests; "": not loaded yet
    version: int = 0  # the round the parameters are of; 0: they are of no run
    running: int = 0  # texts a worker continues
    waiting: int = 0  # texts without a worker
    cache_used: float = 0.0  # part of the workers' caches that texts use, 0 to 1
    servers: dict[str, ServerLoad] = msgspec.field(default_factory=dict)  # load of each worker, by name

    @property
    def lines(self) -> list[str]:
        used = f"{100 * self.cache_used:.0f} %"
        return [f"{self.running} texts running, {self.waiting} waiting, {used} of the cache in use at {self.endpoint}"]

    @property
    def takes_part(self) -> bool:
        """A served model without a worker answers nothing."""
        return self.state == "serving"


READER = KindReader(name="serving", status=ServingStatus, records=AnyRecord, fold=RunFold)
