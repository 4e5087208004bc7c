"""What a node manager tells, as transcripts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from planetary.fleet.protocol import events as e
from planetary.fleet.supervisor.machine import SupervisorMachine
from planetary.fleet.supervisor.node_news import NodeNews, SupervisorReport, read_report
from planetary.fleet.supervisor.restarts import Restarts
from planetary.machine.redial import LinkState

REFUSED = "cannot connect to g:8080: Connection refused"


def away(error: str = REFUSED, retry_in_s: float | None = 1.5) -> SupervisorReport:
    return SupervisorReport(link=LinkState.WAITING, error=error, retry_in_s=retry_in_s)


def here(run: str = "stdlib", pid: int = 7, restarts: int = 0) -> SupervisorReport:
    return SupervisorReport(link=LinkState.CONNECTED, run=run, pid=pid, restarts=restarts)


def test_missing_gateway_is_reported_at_once_and_rarely_again() -> None:
    """A node whose gateway is not there says so at once and again but not all the time."""
    news = NodeNews("g:8080", 2)
    assert news.lines([None, None], 0.0) == ["connecting to g:8080"]
    assert news.lines([away(), None], 0.5) == [f"cannot join yet: {REFUSED} (next try in 1.5 s)"]
    assert [news.lines([away(), away()], now) for now in (1.0, 10.0, 30.0)] == [[], [], []]
    assert news.lines([away(), away()], 31.0) == [f"cannot join yet: {REFUSED} (next try in 1.5 s)"]
    busy = "the gateway is not ready yet: exporting the model"
    assert news.lines([away(busy, None), away()], 32.0) == [f"cannot join yet: {busy} (trying again now)"]


def test_joining_workers_share_one_line_a_minute() -> None:
    """A run is joined once however many workers join it and has a line a minute."""
    news = NodeNews("g:8080", 2)
    news.lines([], 0.0)
    assert news.lines([here(), away()], 1.0) == ["joined run stdlib at g:8080"]
    assert news.lines([here(), here()], 60.0) == []
    assert news.lines([here(), here(pid=0)], 61.0) == ["run stdlib: 1 of 2 workers are running"]
    assert news.lines([here(), here(restarts=3)], 120.0) == []
    expected = "run stdlib: 2 of 2 workers are running, 3 restarts so far"
    assert news.lines([here(), here(restarts=3)], 121.0) == [expected]


def test_a_gateway_that_is_lost_and_comes_back_is_told_once_each() -> None:
    news = NodeNews("g:8080", 1)
    news.lines([here()], 0.0)
    assert news.lines([away("the connection ended")], 10.0) == [
        "the gateway of run stdlib is lost: the connection ended (next try in 1.5 s)"
    ]
    assert news.lines([SupervisorReport(link=LinkState.DIALLING)], 10.5) == []
    assert news.lines([away()], 11.0) == [f"cannot join yet: {REFUSED} (next try in 1.5 s)"]
    assert news.lines([away()], 12.0) == []
    assert news.lines([here()], 25.0) == ["the gateway of run stdlib is back after 15 s"]
    assert news.lines([here()], 26.0) == []


def test_the_end_is_told_once() -> None:
    news = NodeNews("g:8080", 2)
    news.lines([here()], 0.0)
    over = msgspec.structs.replace(here(), ended="all 12 rounds are done")
    assert news.lines([here(), over], 1.0) == ["leaving run stdlib: all 12 rounds are done"]
    assert news.lines([over, over], 100.0) == []


def test_a_supervisor_reports_its_connection_and_its_worker() -> None:
    restarts = Restarts("n/0", first_s=0.1, limit_s=2.0, healthy_after_s=10.0, final_codes=frozenset({4}))
    machine = SupervisorMachine("n/0", restarts=restarts, redial_first_s=0.2, redial_limit_s=2.0)
    machine.handle(e.Tick(), 0.0)
    assert machine.report(0.0) == SupervisorReport(link=LinkState.DIALLING)
    machine.handle(e.Closed(1, REFUSED), 1.0)
    report = machine.report(1.0)
    assert (report.link, report.error) == (LinkState.WAITING, REFUSED)
    assert report.retry_in_s is not None
    assert 0.0 < report.retry_in_s <= 0.2
    machine.handle(e.Tick(), 2.0)
    machine.handle(e.Opened(2, "stdlib"), 2.1)
    machine.handle(e.ProcessStarted(100), 2.2)
    assert machine.report(2.2) == SupervisorReport(link=LinkState.CONNECTED, run="stdlib", pid=100)
    machine.handle(e.StopRequested("stopped by SIGTERM"), 3.0)
    assert machine.report(3.0).ended == "stopped by SIGTERM"


def test_a_report_that_is_not_there_or_torn_is_none(tmp_path: Path) -> None:
    assert read_report(tmp_path / "0.json") is None
    (tmp_path / "0.json").write_text('{"link": "conn')
    assert read_report(tmp_path / "0.json") is None


@pytest.mark.processes
def test_node_manager_names_the_gateway_it_cannot_reach(tmp_path: Path) -> None:
    with socket.socket() as held:  # bound and not listening: no other process gets the port, and none answers
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        command = [sys.executable, "-m", "planetary", "node-manager", "--host=127.0.0.1", f"--port={port}"]
        node = subprocess.Popen(
            [*command, "--plain-loopback", f"--state={tmp_path}", f"--cache={tmp_path}", f"--logs={tmp_path / 'logs'}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert node.stderr is not None
        told = []
        for line in node.stderr:
            told.append(line)
            if "cannot join" in line:
                break
        os.kill(node.pid, signal.SIGTERM)
        node.stderr.read()
        assert node.wait(60) == 0
    assert any(line.rstrip().endswith(f"connecting to 127.0.0.1:{port}") for line in told)
    assert f"127.0.0.1:{port}" in told[-1]
    assert "Connection refused" in told[-1]
    # The node manager looks now and then, and the next try may be under way when it does.
    assert re.search(r"\((next try in \d\.\d s|trying again now)\)$", told[-1].rstrip())
