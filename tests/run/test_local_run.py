"""A local run whose node manager ends: started again when it was killed, told and ended when it gave up."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from planetary.core.configuration.schema import Config
from planetary.core.errors import PeerError, ResourceError, UserError
from planetary.fleet.shell.child import Child
from planetary.run.processes import local_run
from planetary.run.processes.announcement import Announcement, write_announcement
from planetary.run.processes.local_run import LocalRun, LocalRunOptions

pytestmark = pytest.mark.processes

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
GAVE_UP = "print('trying'); print('planetary: no device\\nis here'); raise SystemExit(6)"
STAYS = "import time; time.sleep(60)"


class ScriptedRun(LocalRun):
    """The gateway and each node manager in turn are one-line programs."""

    def __init__(self, folder: Path, gateway: str, *nodes: str) -> None:
        super().__init__(Config(), LocalRunOptions(folder=folder, cache=folder / "cache"))
        self.folder, self.gateway, self.nodes = folder, gateway, list(nodes)

    async def _start_gateway(self, announced_in: Path) -> Child:
        write_announcement(announced_in, Announcement("127.0.0.1", 1, "http://127.0.0.1:9", "", str(self.folder)))
        return await self._script(self.gateway, "gateway.log")

    async def _start(self, role: str, start: msgspec.Struct, log: str) -> Child:
        assert role == "node-manager"
        return await self._script(self.nodes.pop(0), log)

    async def _script(self, code: str, log: str) -> Child:
        return await Child.start([sys.executable, "-c", code], log=self.folder / "logs" / log)


def test_a_node_manager_that_gave_up_ends_the_run_with_its_words(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, STAYS, GAVE_UP)
    with pytest.raises(ResourceError, match="ended for good: no device is here"):
        asyncio.run(run.run())


def test_a_node_manager_that_was_killed_is_started_again(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, STAYS, KILLED, KILLED, GAVE_UP)
    with pytest.raises(ResourceError, match="no device is here"):
        asyncio.run(run.run())
    assert not run.nodes


def test_missing_backend_is_refused_before_the_start(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, STAYS)
    fabric = msgspec.structs.replace(Config().fabric, backend="pjrt:cuda")
    LocalRun.__init__(
        run, msgspec.structs.replace(Config(), fabric=fabric), LocalRunOptions(folder=tmp_path, cache=tmp_path)
    )
    with pytest.raises(UserError, match="needs JAX"):
        asyncio.run(run.run())
    assert not (tmp_path / "logs").exists()


class KeptRun(ScriptedRun):
    """Each gateway in turn is a one-line program, too, and the node manager stays."""

    def __init__(self, folder: Path, *gateways: str) -> None:
        super().__init__(folder, "", STAYS)
        self._options = msgspec.structs.replace(self._options, keeps_gateway=True)
        self.gateways = list(gateways)

    async def _start_gateway(self, announced_in: Path) -> Child:
        self.gateway = self.gateways.pop(0)
        return await super()._start_gateway(announced_in)


def test_killed_gateway_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "PAUSES_S", (0.01, 0.02))
    run = KeptRun(tmp_path, KILLED, KILLED, "raise SystemExit(0)")
    assert asyncio.run(run.run()) == "finished"
    assert not run.gateways


def test_gateway_that_dies_at_every_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "PAUSES_S", (0.01, 0.02))
    run = KeptRun(tmp_path, *[KILLED] * (local_run.MOST_FAILED_STARTS + 2))
    with pytest.raises(PeerError, match=r"the gateway .*SIGKILL"):
        asyncio.run(run.run())
    assert len(run.gateways) == 1


def test_gateway_that_answers_no_probe_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(local_run, "PROBE_S", 0.01)
    misses = iter(range(local_run.MOST_MISSED))

    def probe(url: str) -> None:
        assert url == "http://127.0.0.1:9/healthz"
        if next(misses, None) is not None:
            raise TimeoutError

    monkeypatch.setattr(local_run, "_probe", probe)
    run = KeptRun(tmp_path, STAYS, "raise SystemExit(0)")
    assert asyncio.run(run.run()) == "finished"
    assert not run.gateways
