"""Operations on workers: list, drain, release, restart, and assign to runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request

from planetary.core.errors import UserError
from planetary.fleet.protocol.status import WorkerStatus
from planetary.site.api.views import RoleRequest, SiteWorker, WorkerList
from planetary.site.site import Site
from planetary.site.worker_scheduler import IDLE
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError
from planetary.web.operations import Operation


class WorkerOperations:
    """Operations on workers."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def operations(self) -> Sequence[Operation]:
        admin = partial(Operation, group="workers", scope=Scope.ADMIN, answer=SiteWorker, refuses=(404, 409))
        post = partial(admin, method="POST", status=202)
        site = self._site

        def change(act: Callable[[str, str], None]) -> Callable[[Request], Awaitable[SiteWorker]]:
            async def handler(request: Request) -> SiteWorker:
                name = self._name(request)
                act(name, request.state.user)
                return self._view(name, self._statuses())

            return handler

        async def assign(request: Request) -> SiteWorker:
            asked: RoleRequest = request.state.body
            name = self._name(request)
            site.assign(name, asked.controller, by=request.state.user)
            return self._view(name, self._statuses())

        return (
            Operation(
                method="GET",
                path="/v1/workers",
                name="list_workers",
                text="List workers, each with its run and the reason.",
                group="workers",
                scope=Scope.READ,
                handler=self._list,
                answer=WorkerList,
            ),
            post(
                path="/v1/workers/{worker:path}/drain",
                name="drain_worker",
                text="Keep a worker from every run, from the end of its task on.",
                handler=change(lambda name, by: site.drain(name, by=by)),
            ),
            post(
                path="/v1/workers/{worker:path}/release",
                name="release_worker",
                text="Let a drained worker take part again.",
                handler=change(lambda name, by: site.release(name, by=by)),
            ),
            post(
                path="/v1/workers/{worker:path}/restart",
                name="restart_worker",
                text="Replace a worker's process now; its task is given to another.",
                handler=change(lambda name, by: site.restart(name, by=by)),
            ),
            admin(
                method="PUT",
                path="/v1/workers/{worker:path}/role",
                name="assign_worker",
                text="Let a worker work for one controller only, or for any.",
                handler=assign,
                body=RoleRequest,
            ),
            Operation(
                method="GET",
                path="/v1/workers/{worker:path}",
                name="get_worker",
                text="Return a worker.",
                group="workers",
                scope=Scope.READ,
                handler=self._show,
                answer=SiteWorker,
                refuses=(404,),
            ),
        )

    async def _list(self, request: Request) -> WorkerList:
        statuses = self._statuses()
        names = {*self._site.scheduler.workers, *statuses, *self._site.book.drained}
        return WorkerList(workers=tuple(self._view(name, statuses) for name in sorted(names)))

    async def _show(self, request: Request) -> SiteWorker:
        return self._view(self._name(request), self._statuses())

    def _name(self, request: Request) -> str:
        """Return the worker a path names. Raises `ApiError` (404) when it is not known."""
        name = request.path_params["worker"]
        try:
            self._site.require_worker(name)
        except UserError as error:
            raise ApiError(404, str(error), code="worker_not_found") from None
        return name

    def _statuses(self) -> dict[str, WorkerStatus]:
        """Return workers as their runs see them, connected before lost."""
        found: dict[str, WorkerStatus] = {}
        for name, run in self._site.runs.items():
            for status in run.status().workers:
                if status.name not in found or self._site.scheduler.run_of(status.name) == name:
                    found[status.name] = status
        return found

    def _view(self, name: str, statuses: dict[str, WorkerStatus]) -> SiteWorker:
        site, status = self._site, statuses.get(name)
        seen = site.scheduler.workers.get(name)
        peer = next((one for one in site.peers if one.hello.worker == name and one.hello.role == "worker"), None)
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
