"""A hub and two sites in real processes over TLS: a job outlives kill -9 of the hub, and of its site at another one; a
job over both sites outlives that of the hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from planetary.cli.main import main
from waiting import HANG_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.compiles, pytest.mark.slow]

SITES = ("paris", "tokyo")
PATIENCE_S = {"paris": HANG_S, "tokyo": 20}
"""Of the hub: tokyo is killed and waited for; both may be slow to come back to a hub that was killed."""
JOB = """
[run]
name = "tiny"
[model]
source = "planetary.models.nanochat:build"
options = { n_layer = 1, n_head = 2, n_embd = 32 }
[data]
source = "site://notes"
[train]
rounds = 100000
batch_size = 2
sequence_length = 16
inner_steps = 50
[optimizer]
warmup_steps = 2
[eval]
batches = 2
every = 100
"""


class Member:
    """A gateway's process, its API, and its journal."""

    def __init__(self, folder: Path, name: str, *command: str) -> None:
        self.folder, self.name, self.command = folder, name, command
        self.port, self.api = free_port(), free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.api}", timeout=HANG_S)
        self.start()

    def start(self) -> None:
        ports = (f"--port={self.port}", f"--gateway-port={self.api}", f"--state={self.folder / self.name}-state")
        self.process = started(self.folder / f"{self.name}.log", *self.command, *ports)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def get(self, path: str) -> Any:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get(path).json()
        return {}  # it is starting

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()[-2500:]


class Federation:
    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.others = folder, []
        (folder / "notes.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        sites = ", ".join(f'{{ name = "{name}", patience_s = {PATIENCE_S[name]} }}' for name in SITES)
        (folder / "hub.toml").write_text(
            f'gateway_id = "hub"\nruns_dir = "hub"\n[federation]\nsites = [{sites}]\n'
            'data_sets = { notes = "notes.txt" }\n'
        )
        self.shared = shared = f"--cache={cache}"
        self.hub = Member(folder, "hub", "federation-hub", f"--gateway-config={folder / 'hub.toml'}", shared)
        invite = folder / "hub-state" / "newest-invite.txt"
        self.until(invite.exists, "the hub has an invite")
        self.sites: dict[str, Member] = {}
        for name in SITES:
            (folder / f"{name}.toml").write_text(
                f'gateway_id = "{name}"\nruns_dir = "{name}"\n[controllers.training]\nenabled = true\n'
                f'[federation]\nupstream = "127.0.0.1:{self.hub.port}"\ntoken_file = "{invite}"\n'
                'data_sets = { notes = "notes.txt" }\n'
            )
            file = f"--gateway-config={folder / name}.toml"
            self.sites[name] = Member(folder, name, "gateway", file, shared)
        self.add_worker("paris")

    def add_worker(self, site: str) -> None:
        """Start a node with one worker."""
        folder = self.folder
        token = folder / f"{site}-state" / "newest-invite.txt"
        self.until(token.exists, f"{site} has an invite")
        self.others.append(
            started(
                folder / f"node-{site}.log",
                "node-manager",
                "--host=127.0.0.1",
                f"--port={self.sites[site].port}",
                "--scale=1",
                f"--token-file={token}",
                "--node-name=n",
                self.shared,
                f"--state={folder / f'node-{site}'}",
                f"--logs={folder / f'logs-{site}'}",
            )
        )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        wait_until(holds, what, said=self.logs)

    def logs(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.log()}" for one in (self.hub, *self.sites.values()))

    def until_job(self, name: str, **expected: Any) -> dict[str, Any]:
        def holds() -> bool:
            found = self.hub.get(f"/v1/federation/jobs/{name}")
            return all(found.get(key) == value for key, value in expected.items())

        self.until(holds, f"{name}: {expected}")
        return self.hub.get(f"/v1/federation/jobs/{name}")

    def command(self, *arguments: str) -> int:
        """Run a command of jobs as people do."""
        token = self.folder / "hub-state" / "api-token.txt"
        return main([*arguments, f"--gateway=http://127.0.0.1:{self.hub.api}", f"--token-file={token}"])

    def rounds(self, site: str, job: str) -> int:
        return self.sites[site].get(f"/v1/jobs/{job}/status").get("rounds_finished", 0)

    def close(self) -> None:
        processes = [*self.others, *(one.process for one in self.sites.values()), self.hub.process]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(HANG_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for one in (self.hub, *self.sites.values()):
            one.client.close()


def started(log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "planetary", *command], stdout=file, stderr=file, start_new_session=True
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def federation(tmp_path: Path, shared_cache: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, shared_cache)
    yield found
    found.close()


def test_jobs_outlive_hub_and_site_and_are_cancelled(federation: Federation) -> None:
    (federation.folder / "job.toml").write_text(JOB)
    submit = ("jobs", "submit", str(federation.folder / "job.toml"))
    assert federation.command(*submit) == 0
    federation.until_job("tiny", state="placed", site="paris", state_there="running")
    federation.until(lambda: federation.rounds("paris", "tiny") >= 1, "a round is finished")
    assert federation.command(*submit, "--name=other", "--needs=workers=0") == 0
    federation.until_job("other", state="placed", site="tokyo")

    federation.hub.kill()
    federation.hub.start()
    federation.until_job("tiny", state="placed", site="paris", attempt=1)
    federation.until_job("other", state="placed", site="tokyo", attempt=1)
    finished = federation.rounds("paris", "tiny")
    federation.until(lambda: federation.rounds("paris", "tiny") > finished, "the training goes on")
    assert [one["job_id"] for one in federation.sites["paris"].get("/v1/jobs")["jobs"]] == ["tiny"]

    assert federation.command("jobs", "cancel", "tiny", "--reason=enough") == 0
    federation.until_job("tiny", state="cancelled", reason="enough")
    assert federation.sites["paris"].get("/v1/jobs/tiny")["state"] == "cancelled"

    federation.sites["tokyo"].kill()
    federation.until_job("other", state="placed", site="paris", attempt=2, strays={"tokyo": "away"})
    federation.sites["tokyo"].start()
    federation.until_job("other", site="paris", strays={})
    assert federation.sites["tokyo"].get("/v1/jobs/other")["state"] == "cancelled"
    assert federation.command("jobs", "cancel", "other") == 0
    federation.until_job("other", state="cancelled")

    journal = (federation.folder / "hub" / "hub.jsonl").read_text().splitlines()
    offers = [one for one in map(json.loads, journal) if one["event"] == "job_offered"]
    assert [(one["job"], one["attempt"], one["site"]) for one in offers] == [
        ("tiny", 1, "paris"),
        ("other", 1, "tokyo"),
        ("other", 2, "paris"),
    ]


def test_job_over_two_sites_outlives_the_hub_and_ends_at_both(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run at the hub, whose workers are the sites, goes on from the hub's journal alone."""
    (federation.folder / "job.toml").write_text(JOB)
    sizes = ("--set=train.rounds=8", "--set=federation.every_rounds=10")
    assert federation.command("jobs", "submit", str(federation.folder / "job.toml"), "--sites=2", *sizes) == 0
    waiting = federation.until_job("tiny", state="waiting")
    assert "1 of 2 sites can take a part now" in waiting["why"] or "0 of 2" in waiting["why"]
    federation.add_worker("tokyo")
    federation.until_job("tiny", state="placed")
    for part, site in (("tiny.1", "paris"), ("tiny.2", "tokyo")):
        federation.until_job(part, state="placed", site=site, state_there="running", whole="tiny")

    def merged() -> int:
        return federation.hub.get("/v1/jobs/tiny/status").get("rounds_finished", 0)

    federation.until(lambda: merged() >= 2, "the hub has merged two versions")
    before = merged()
    federation.hub.kill()
    federation.hub.start()
    federation.until(lambda: merged() > before, "the hub merges again")
    assert federation.command("jobs", "list") == 0
    shown = capsys.readouterr().out
    assert "paris, tokyo" in shown
    assert "of 8" in shown
    for job in ("tiny", "tiny.1", "tiny.2"):
        federation.until_job(job, state="finished", attempt=0 if job == "tiny" else 1)
    assert merged() == 8
    assert (federation.folder / "hub" / "tiny" / "report.json").exists()
    for site, name in zip(SITES, ("tiny.1", "tiny.2"), strict=True):
        adopted = federation.sites[site].get(f"/v1/jobs/{name}")
        assert (adopted["state"], adopted["kind"]) == ("finished", "site")
        journal = (federation.folder / site / name / "events.jsonl").read_text().splitlines()
        versions = [one["version"] for one in map(json.loads, journal) if one["event"] == "version_adopted"]
        assert versions[0] == 0
        assert versions[-1] == 8
    journal = map(json.loads, (federation.folder / "hub" / "hub.jsonl").read_text().splitlines())
    events = [one["event"] for one in journal]
    assert (events.count("job_spread"), events.count("job_offered")) == (1, 2)
