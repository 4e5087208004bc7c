"""A site on loopback whose jobs are of the toy kind: they run until their workers have said their names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import pytest
from toy_kind import PROTOCOL, Present, RollCall, Toy

from planetary.core.clock import SystemClock
from planetary.core.errors import PlanetaryError
from planetary.fleet.gateway.gateway import Security
from planetary.fleet.protocol import kind_table
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.events import Finish
from planetary.net.client import Trust, connect
from planetary.net.handshake import say_hello
from planetary.run import kinds
from planetary.site.api.control_api import control_api
from planetary.site.config import ControllerOptions, Controllers
from planetary.site.site import Site, SiteOptions
from planetary.version import __version__
from planetary.web.access import Access, AccessTokens, Scope
from planetary.web.http_server import WebServer

ADMIN = "admin-of-the-test"
Test = Callable[["Running"], Awaitable[None]]


class Quick(Toy):
    """A toy that leaves no report and no picture."""

    async def results_after(self, running: Awaitable[Finish], folder: Path, again: str = "") -> Finish:
        return await running


class ToyInference(Quick):
    """The same, as if it were a served model: of another controller."""

    name = "toy inference"
    controller = "inference"

    def claims(self, config: Any) -> bool:
        return config.run.name.startswith("toy-serve")


@pytest.fixture
def toy_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (ToyInference(), Quick(), *kinds.all_kinds())
    monkeypatch.setattr(kinds, "all_kinds", lambda: found)
    monkeypatch.setattr("planetary.site.site.worker_protocol", lambda: PROTOCOL)
    reader = EntryPoint("toy", "toy_kind:READER", kind_table.GROUP)
    monkeypatch.setattr(kind_table, "entry_points", lambda group: [reader] if group == kind_table.GROUP else [])


class Running:
    """A site, and a client that may do everything."""

    def __init__(self, site: Site, url: str, folder: Path, client: httpx.AsyncClient) -> None:
        self.site, self.url, self.folder, self.client = site, url, folder, client
        self.workers: dict[str, asyncio.Task[None]] = {}
        self.joined: list[tuple[str, str]] = []  # worker and run, in the order of their greetings
        self.restarts: list[tuple[str, str]] = []  # worker and why, as supervisors are told

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.client.get(path, **more)

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **more) if body is not None else await self.client.post(path)

    async def submit(self, name: str = "toy", **more: Any) -> dict[str, Any]:
        """Submit a job that ends when so many workers have answered: `workers`, by default more than there are."""
        workers = more.pop("workers", 99)
        answer = await self.post(
            "/v1/jobs", {"config": {"run": {"name": name}, "fabric": {"workers": workers}}, **more}
        )
        assert answer.status_code == 202, answer.text
        return answer.json()

    async def job(self, name: str) -> dict[str, Any]:
        return (await self.get(f"/v1/jobs/{name}")).json()

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while not await holds():
                await asyncio.sleep(0.01)

    async def until_state(self, name: str, state: str) -> dict[str, Any]:
        async def holds() -> bool:
            return (await self.job(name))["state"] == state

        await self.until(holds)
        return await self.job(name)

    async def until_open(self, name: str) -> None:
        """Wait until the run of a job has its folder."""

        async def holds() -> bool:
            return name in self.site.runs

        await self.until(holds)

    async def until_begun(self, name: str) -> None:
        """Wait until the run of a job is prepared, and takes workers."""

        async def holds() -> bool:
            return name in self.site.runs and self.site.runs[name].gateway.parts is not None

        await self.until(holds)

    def join(self, name: str, *, answers: bool = False, roles: tuple[str, ...] = ()) -> None:
        """Start a worker that dials again whenever its connection ends."""
        self.workers[name] = asyncio.ensure_future(self._work(name, answers=answers, roles=roles))

    def supervise(self, name: str) -> None:
        """Start the supervisor of a worker, which dials again like it."""
        work = self._work(name, answers=False, roles=(), role="supervisor")
        self.workers[f"supervisor of {name}"] = asyncio.ensure_future(work)

    async def kill(self, name: str) -> None:
        self.workers[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.workers.pop(name)

    async def _work(self, name: str, *, answers: bool, roles: tuple[str, ...], role: str = "worker") -> None:
        while True:
            with contextlib.suppress(PlanetaryError, TimeoutError):
                await self._session(name, role, answers=answers, roles=roles)
            await asyncio.sleep(0.02)

    async def _session(self, name: str, role: str, *, answers: bool, roles: tuple[str, ...]) -> None:
        connection = await connect("127.0.0.1", self.site.port, Trust.plain_loopback(), PROTOCOL)
        greeting = m.Hello(
            role=role,
            protocol=PROTOCOL.version,
            software=__version__,
            token="",
            worker=name,
            node=name,
            pid=1,
            backend="cpu",
            target="host",
            target_features="",
            iree_version="",
            roles=roles,
        )
        try:
            welcome = await say_hello(connection, greeting, 10.0)
            if isinstance(welcome, m.Welcome):
                self.joined.append((name if role == "worker" else f"supervisor of {name}", welcome.run))
            while True:
                message = (await connection.receive(10.0)).message
                if isinstance(message, m.RestartWorker):
                    self.restarts.append((name, message.reason))
                if isinstance(message, RollCall) and answers:
                    await connection.send(Present(name=name))
        finally:
            connection.abort()


CONTROLLERS = Controllers(
    training=ControllerOptions(enabled=True, parallel=1),
    inference=ControllerOptions(enabled=True),
    rl=ControllerOptions(enabled=False),
)


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    controllers: Controllers = CONTROLLERS,
    *,
    access: Access | None = None,
    security: Security | None = None,
    tls: bool = False,
    name: str = "lab",
    port: int = 0,
    **more: Any,
) -> AsyncIterator[Running]:
    options = SiteOptions(
        name=name,
        folder=folder / "runs",
        cache=folder / "cache",
        host="127.0.0.1",
        port=port,
        controllers=controllers,
        **more,
    )
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    site = Site(options, security or Security(), wall=SystemClock().wall)
    await site.open()
    access = access or Access(
        AccessTokens(folder / "state"), anonymous=Scope.READ, known={"the test": (Scope.ADMIN, ADMIN)}
    )
    app, context = control_api(site, access, host="127.0.0.1"), site.security.tls if tls else None
    server = await WebServer.start(app, "127.0.0.1", 0, what="the test's API", tls=context)
    serving = asyncio.ensure_future(site.serve())
    headers = {"authorization": f"Bearer {ADMIN}"}
    client = httpx.AsyncClient(base_url=server.url, timeout=20, headers=headers, verify=False)
    found = Running(site, server.url, folder, client)
    try:
        yield found
    finally:
        for worker in list(found.workers):
            await found.kill(worker)
        site.stop("the test ends")
        await serving
        await client.aclose()
        await site.close("the test ends")
        await server.close()


def forget_the_kind(folder: Path) -> None:
    """Make the ended run in `folder` one of a kind whose package is not installed here."""
    journal = folder / "events.jsonl"
    known = journal.read_text()
    assert known.count('"kind":"toy"') == 1
    journal.write_text(known.replace('"kind":"toy"', '"kind":"comet"'))


def run(folder: Path, test: Test, **options: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), running(folder, **options) as found:
            await test(found)

    asyncio.run(whole())
