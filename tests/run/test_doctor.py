"""`planetary doctor`: findings from measured values, and a link measured against a real reception on loopback."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from planetary.cli.main import main
from planetary.collectives import Master
from planetary.core.clock import Clock, SystemClock
from planetary.core.configuration.schema import Timings
from planetary.core.errors import PeerError, ResourceError, TrustError
from planetary.fleet.gateway import reception
from planetary.fleet.gateway.gateway import Security
from planetary.fleet.gateway.reception import Reception
from planetary.fleet.protocol.messages import FABRIC, Hello, Welcome
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.system import SYSTEM
from planetary.net.authority import Authority
from planetary.net.connection import Connection
from planetary.net.handshake import answer_hello
from planetary.net.identity import Identity
from planetary.net.invite import mint
from planetary.run.doctor import findings as f
from planetary.run.doctor.link_checks import examine_gateway, examine_ring
from planetary.wire.protocol import Protocol

MIB = 1 << 20


@dataclass
class SkewedClock(SystemClock):
    """A clock that goes right and is set wrong."""

    offset: float = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset


class Gateway:
    """A reception whose runs want no worker."""

    def __init__(
        self, folder: Path, *, protocol: Protocol = FABRIC, clock: Clock | None = None, plain: bool = False
    ) -> None:
        self.authority = None if plain else Authority.open(folder, time.time())
        security = Security() if self.authority is None else Security.by(self.authority)
        self._tls = security.tls
        self.taken: list[str] = []
        self.reception = Reception(
            self._take,
            protocol,
            Timings(2.0),
            tokens=security.tokens,
            invites=security.invites,
            system=SYSTEM if clock is None else replace(SYSTEM, clock=clock),
        )

    async def _take(self, connection: Connection, hello: Hello) -> None:
        self.taken.append(hello.worker)
        await answer_hello(connection, Welcome(run="", heartbeat_s=1.0, silent_after_s=5.0), 5.0)

    def token(self) -> str:
        assert self.authority is not None
        return mint(self.authority.invite_secret, self.authority.fingerprint)

    def examined(
        self, folder: Path, token: str = "", *, most_bytes: int = MIB
    ) -> tuple[dict[str, f.Finding], f.Measurements]:
        async def examine() -> tuple[list[f.Finding], f.Measurements]:
            await self.reception.listen("127.0.0.1", 0, self._tls)
            try:
                identity = Identity.open(folder / "identity.key") if token else None
                address = Address("127.0.0.1", self.reception.port, token, 5.0, identity)
                return await examine_gateway(address, FABRIC, "node-a", ("cpu",), most_bytes=most_bytes)
            finally:
                await self.reception.close("the test is over")

        found, numbers = asyncio.run(asyncio.wait_for(examine(), 30.0))
        assert self.taken == []
        return {one.check: one for one in found}, numbers


def test_good_link_is_measured_both_ways_unseen_by_runs(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "authority")
    found, numbers = gateway.examined(tmp_path, gateway.token())
    assert {one.state for one in found.values()} == {f.State.GOOD}, found
    assert {*found} >= {"gateway", "version", "iree", "clocks", "round trip", "upload", "download", "inbound"}
    assert numbers.up > 0 < numbers.down
    assert numbers.rtt_s > 0
    assert numbers.reachable is True


def test_a_wrong_clock_is_found_and_does_not_change_the_link(tmp_path: Path) -> None:
    found, numbers = Gateway(tmp_path, clock=SkewedClock(offset=3600.0), plain=True).examined(tmp_path)
    assert found["clocks"].state is f.State.BAD
    assert "1:00:00 ahead of this machine" in found["clocks"].found
    assert "time server" in found["clocks"].remedy
    assert numbers.clock_offset_s == pytest.approx(3600.0, abs=1.0)
    assert found["upload"].state is f.State.GOOD


def test_a_token_of_another_gateway_is_no_way_in(tmp_path: Path) -> None:
    other = Gateway(tmp_path / "other").token()
    found, _ = Gateway(tmp_path / "authority").examined(tmp_path, other)
    assert [*found] == ["trust"]
    assert f.failure(found.values()) is TrustError
    assert "planetary invite" in found["trust"].remedy


def test_another_version_of_the_protocol_is_named(tmp_path: Path) -> None:
    newer = Protocol(FABRIC.version + 1, *FABRIC.messages)
    found, _ = Gateway(tmp_path, protocol=newer, plain=True).examined(tmp_path)
    assert [*found] == ["protocol"]
    assert f.failure(found.values()) is TrustError
    assert "version" in found["protocol"].found


def test_another_version_of_iree_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "compiler_version", lambda: "2.0.0")
    found, _ = Gateway(tmp_path, plain=True).examined(tmp_path)
    assert found["iree"].state is f.State.BAD
    assert "pip install iree-base-runtime==2.0.0" in found["iree"].remedy


def test_a_port_where_no_gateway_is_gets_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found, _ = asyncio.run(examine_gateway(Address("127.0.0.1", port, "", 5.0), FABRIC, "node-a", ("cpu",)))
    assert [one.check for one in found] == ["gateway"]
    assert f.failure(found) is PeerError
    assert "check host and port" in found[0].remedy


def test_peers_measure_their_ring_together() -> None:
    master = Master("127.0.0.1:0")
    master.start()
    try:

        async def both() -> list[tuple[list[f.Finding], f.Measurements]]:
            calls = (asyncio.to_thread(examine_ring, master.address, 2, "", name, nbytes=MIB) for name in ("a", "b"))
            return await asyncio.gather(*calls)

        for found, numbers in asyncio.run(asyncio.wait_for(both(), 30.0)):
            assert [(one.check, one.state) for one in found] == [("peers", f.State.GOOD)], found
            assert numbers.peers == 2
            assert numbers.ring_rate > f.SLOW_LINK
    finally:
        master.stop()


def test_the_command_needs_no_arguments_and_a_full_disk_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--json", "--backend=cpu", f"--cache={tmp_path}", f"--save={tmp_path / 'links.json'}"]
    assert main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {one["check"] for one in shown["findings"]} >= {"packages", "clock", "disk", "memory", "backend cpu"}
    assert json.loads((tmp_path / "links.json").read_text())["cores"] >= 1

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))
    assert main(arguments) == 7
    disk = next(one for one in json.loads(capsys.readouterr().out)["findings"] if one["check"] == "disk")
    assert disk["state"] == "bad"
    assert "make room" in disk["remedy"]


def test_the_command_reports_an_address_without_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "127.0.0.1:1", "--backend=cpu", f"--cache={tmp_path}"]) == 2
    assert "no invite token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("finding", "state"),
    [
        (f.judge_memory(100 << 20), f.State.BAD),
        (f.judge_memory(1 << 30), f.State.WARNING),
        (f.judge_open_files(100), f.State.BAD),
        (f.judge_open_files(-1), f.State.GOOD),
        (f.judge_own_clock(0.0, 1e9, "1970"), f.State.BAD),
        (f.judge_port(0, "no sockets"), f.State.BAD),
        (f.judge_port(8080, "held by process 7"), f.State.WARNING),
        (f.judge_device("cuda", [], ""), f.State.BAD),
        (f.judge_device("cuda", [], "its driver did not answer"), f.State.BAD),
        (f.judge_clock(5.0, 0.1), f.State.WARNING),
        (f.judge_clock(-0.04, 0.1), f.State.GOOD),
        (f.judge_reach("203.0.113.9", "10.0.0.2", "no answer"), f.State.WARNING),
        (f.judge_packages({"iree-base-runtime": "", "iree-base-compiler": ""})[0], f.State.BAD),
        (f.judge_packages({"iree-base-runtime": "3.1", "iree-base-compiler": "3.2"})[0], f.State.BAD),
        (f.judge_link(0.08, 1e5, 1e8)[1], f.State.WARNING),
        (f.judge_ring(4, 1e5, 0.01, 1.0)[0], f.State.WARNING),
    ],
)
def test_what_is_not_good_has_a_remedy(finding: f.Finding, state: f.State) -> None:
    assert finding.state is state
    assert bool(finding.remedy) == (state is not f.State.GOOD)
    assert (f.failure([finding]) is not None) == (state is f.State.BAD)


def test_the_first_bad_line_decides() -> None:
    lines = [f.judge_clock(5.0, 0.1), f.judge_memory(0), f.judge_refusal("token", "it expired")]
    assert f.failure(lines) is ResourceError
    assert f.failure(lines[2:]) is TrustError
    assert f.failure(lines[:1]) is None
