"""Operations on workers: list, drain, release, restart, and assign to runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planetary.core.errors import UserError
from planetary.fleet.protocol.status import WorkerStatus
from planetary.site.api.group import SiteGroup
from planetary.site.api.views import RoleRequest, SiteWorker, WorkerList
from planetary.site.worker_scheduler import IDLE
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError
from planetary.web.router import Caller, operation

_CHANGE: Mapping[str, Any] = {"group": "workers", "scope": Scope.ADMIN, "refuses": (404, 409)}


class WorkerOperations(SiteGroup):
    """Operations on workers."""

    @operation("GET", "/v1/workers", group="workers", scope=Scope.READ)
    async def list_workers(self) -> WorkerList:
        """List workers, each with its run and the reason."""
        statuses = self._statuses()
        names = {*self._site.workers.scheduler.workers, *statuses, *self._site.book.drained}
        return WorkerList(workers=tuple(self._view(name, statuses) for name in sorted(names)))

    @operation("POST", "/v1/workers/{worker:path}/drain", **_CHANGE, status=202)
    async def drain_worker(self, worker: str, by: Caller) -> SiteWorker:
        """Keep a worker from every run, from the end of its task on."""
        self._site.workers.drain(self._known(worker), by=by)
        return self._view(worker, self._statuses())

    @operation("POST", "/v1/workers/{worker:path}/release", **_CHANGE, status=202)
    async def release_worker(self, worker: str, by: Caller) -> SiteWorker:
        """Let a drained worker take part again."""
        self._site.workers.release(self._known(worker), by=by)
        return self._view(worker, self._statuses())

    @operation("POST", "/v1/workers/{worker:path}/restart", **_CHANGE, status=202)
    async def restart_worker(self, worker: str, by: Caller) -> SiteWorker:
        """Replace a worker's process now; its task is given to another."""
        self._site.workers.restart(self._known(worker), by=by)
        return self._view(worker, self._statuses())

    @operation("PUT", "/v1/workers/{worker:path}/role", **_CHANGE)
    async def assign_worker(self, worker: str, by: Caller, body: RoleRequest) -> SiteWorker:
        """Let a worker work for one controller only, or for any."""
        self._site.workers.assign(self._known(worker), body.controller, by=by)
        return self._view(worker, self._statuses())

    @operation("GET", "/v1/workers/{worker:path}", group="workers", scope=Scope.READ, refuses=(404,))
    async def get_worker(self, worker: str) -> SiteWorker:
        """Return a worker."""
        return self._view(self._known(worker), self._statuses())

    def _known(self, name: str) -> str:
        """Return the name of a worker. Raises `ApiError` (404) when it is not known."""
        try:
            self._site.workers.require_worker(name)
        except UserError as error:
            raise ApiError(404, str(error), code="worker_not_found") from None
        return name

    def _statuses(self) -> dict[str, WorkerStatus]:
        """Return workers as their runs see them, connected before lost."""
        found: dict[str, WorkerStatus] = {}
        for name, run in self._site.runs.items():
            for status in run.status().workers:
                if status.name not in found or self._site.workers.scheduler.run_of(status.name) == name:
                    found[status.name] = status
        return found

    def _view(self, name: str, statuses: dict[str, WorkerStatus]) -> SiteWorker:
        site, status = self._site, statuses.get(name)
        seen = site.workers.scheduler.workers.get(name)
        peer = next(
            (one for one in site.workers.peers if one.hello.worker == name and one.hello.role == "worker"), None
        )
        moves = seen is not None and seen.goal != seen.at
        node = peer.hello.node if peer is not None else status.node if status is not None else ""
        return SiteWorker(
            name=name,
            node=node,
            job=seen.at if seen is not None else IDLE,
            moving_to=seen.goal if seen is not None and moves else IDLE,
            why=seen.why if seen is not None else "",
            drained=name in site.book.drained,
            controller=site.book.assigned.get(name, ""),
            roles=seen.roles if seen is not None else (),
            connected=peer is not None,
            address=peer.connection.peer_host if peer is not None else "",
            status=status,
        )
