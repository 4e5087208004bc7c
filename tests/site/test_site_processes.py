"""A site in real processes: training and serving over two shared workers, with a worker and the site killed."""

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
from serving_run import write_run

from planetary.cli.main import main
from waiting import HANG_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.compiles, pytest.mark.timeout(900)]

TINY = {
    "model": {"source": "planetary.models.nanochat:build", "options": {"n_layer": 1, "n_head": 2, "n_embd": 32}},
    "train": {"rounds": 2000, "batch_size": 2, "sequence_length": 16, "inner_steps": 100},
    "optimizer": {"warmup_steps": 2},
    "eval": {"batches": 2, "every": 100},
    "checkpoint": {"every": 2},
}


class Place:
    """A gateway with controllers and a node manager with two workers, on loopback without TLS."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.port, self.api = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.api}"
        (folder / "gateway.toml").write_text(
            'gateway_id = "lab"\nruns_dir = "runs"\n[controllers.training]\nenabled = true\n'
            "[controllers.inference]\nenabled = true\n"
        )
        self.started: list[subprocess.Popen[bytes]] = []
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S)
        self.gateway = self.start_gateway()
        self.node = self._start(
            "node-manager",
            "--host=127.0.0.1",
            f"--port={self.port}",
            "--scale=2",
            "--plain-loopback",
            "--node-name=n",
            f"--cache={cache}",
            f"--state={folder / 'node'}",
            f"--logs={folder / 'logs'}",
        )

    def start_gateway(self) -> subprocess.Popen[bytes]:
        """Start it, and wait until it answers."""
        found = self._start(
            "gateway",
            f"--gateway-config={self.folder / 'gateway.toml'}",
            f"--port={self.port}",
            f"--gateway-port={self.api}",
            f"--cache={self.cache}",
            f"--state={self.folder / 'state'}",
            "--plain-loopback",
        )

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.client.get("/healthz").status_code == 200
            return False

        self.until(answers, "the gateway answers")
        return found

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{command[0]}.log").open("ab")
        with log:
            found = subprocess.Popen(
                [sys.executable, "-m", "planetary", *command], stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(found)
        return found

    def until(self, holds: Callable[[], bool], what: str) -> None:
        wait_until(holds, what, said=self.log)

    def log(self) -> str:
        return (self.folder / "gateway.log").read_text()[-3000:]

    def get(self, path: str) -> Any:
        return self.client.get(path).json()

    def job(self, name: str) -> dict[str, Any]:
        return self.get(f"/v1/jobs/{name}")

    def rounds(self, name: str) -> int:
        """Return how many are finished, of a job that is training: after a kill its folder still tells of some."""
        status = self.get(f"/v1/jobs/{name}/status")
        return status["rounds_finished"] if status.get("state") == "training" else 0

    def workers(self) -> dict[str, str]:
        """Return connected workers by name: what each works for."""
        return {one["name"]: one["job"] for one in self.get("/v1/workers")["workers"] if one["connected"]}

    def command(self, *arguments: str) -> int:
        """Run a command of jobs as people do."""
        return main([*arguments, f"--gateway={self.url}", f"--token-file={self.folder / 'state' / 'api-token.txt'}"])

    def submit(self, name: str, tables: dict[str, Any]) -> None:
        lines = []
        for section, table in {"run": {"name": name}, **tables}.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(lines))
        assert self.command("jobs", "submit", str(path)) == 0

    def answer(self, prompt: str) -> str:
        asked = {"prompt": prompt, "max_tokens": 12, "seed": 3}
        found = self.client.post("/v1/inference/completions", json=asked)
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["text"]

    def pid_of(self, worker: str) -> int:
        (found,) = [one for one in self.get("/v1/workers")["workers"] if one["name"] == worker]
        return found["status"]["pid"]

    def close(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(HANG_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        self.client.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


@pytest.fixture
def place(tmp_path: Path, shared_cache: Path) -> Iterator[Place]:
    found = Place(tmp_path, shared_cache)
    yield found
    found.close()


def test_training_and_serving_share_workers_across_kills(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Training and serving share two workers and go on after a worker and the site were killed."""
    place.until(lambda: place.workers() == {"n/0": "", "n/1": ""}, "both workers wait")
    place.submit("small", TINY)
    place.until(lambda: place.rounds("small") >= 2, "two rounds are finished")
    assert set(place.workers().values()) == {"small"}

    write_run(place.folder / "noise", 1, seed=1)
    place.submit("chat", {"serve": {"model": str(place.folder / "noise"), "port": 0}})
    place.until(lambda: sorted(place.workers().values()) == ["chat", "small"], "one worker serves")
    place.until(lambda: place.get("/v1/jobs/chat/status")["state"] == "serving", "the model is served")
    text = place.answer("hello")
    before = place.rounds("small")
    place.until(lambda: place.rounds("small") > before, "the training goes on with the other worker")

    server = next(worker for worker, job in place.workers().items() if job == "chat")
    os.kill(place.pid_of(server), signal.SIGKILL)
    assert place.answer("hello") == text  # with the same tokens, by any worker that serves then
    place.until(lambda: sorted(place.workers().values()) == ["chat", "small"], "the killed worker is back")

    assert place.command("jobs", "cancel", "small", "--reason", "enough") == 0
    place.until(lambda: place.job("small")["state"] == "cancelled", "the job is cancelled")
    place.submit("second", {**TINY, "train": {**TINY["train"], "rounds": 100000}})
    place.until(lambda: place.rounds("second") >= 3, "the next job trains")
    assert place.command("jobs", "roll-out", "second", "--set=optimizer.weight_decay=0.03") == 0
    begun, rolled_out = place.get("/v1/jobs/second/steps")["steps"]
    place.until(lambda: place.rounds("second") > rolled_out["first_round"], "a round is trained with the new step")
    finished = place.rounds("second")
    place.gateway.send_signal(signal.SIGKILL)
    place.gateway.wait()
    place.gateway = place.start_gateway()
    place.until(lambda: place.rounds("second") > finished, "the training goes on")
    place.until(lambda: place.get("/v1/jobs/chat/status")["state"] == "serving", "the model is served again")
    assert place.answer("hello") == text
    assert place.get("/v1/jobs/second/status")["step"] == rolled_out["step"]
    assert place.command("jobs", "roll-back", "second", "--reason=enough") == 0
    steps = place.get("/v1/jobs/second/steps")["steps"]
    assert [one["step"] for one in steps] == [begun["step"], rolled_out["step"], begun["step"]]
    assert {job["job_id"]: job["state"] for job in place.get("/v1/jobs")["jobs"]} == {
        "small": "cancelled",
        "chat": "running",
        "second": "running",
    }

    capsys.readouterr()
    assert place.command("status") == 0
    shown = capsys.readouterr().out
    assert "takes jobs for inference, training" in shown
    assert "enough" in shown
    journal = [json.loads(line) for line in (place.folder / "runs" / "site.jsonl").read_text().splitlines()]
    moved = [one for one in journal if one["event"] == "worker_moved" and one["target"] == "chat"]
    assert moved[0]["source"] == "small"
    assert moved[0]["why"] == "it needs 1"
    events = [json.loads(line) for line in (place.folder / "runs" / "second" / "events.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events if one["event"] in ("run_started", "run_resumed")] == [
        "run_started",
        "run_resumed",
    ]
