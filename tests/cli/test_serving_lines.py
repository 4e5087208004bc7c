"""The lines of `planetary serve`: every wait once, and a request that can be copied once the model is served."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from planetary.cli.serving_lines import ServingLines, example_request
from planetary.fleet.protocol.status import RunState, WorkerStatus
from planetary.runs.serve.status import ServingStatus

WAIT = "waiting for local/0 to load the model"
URL = "http://127.0.0.1:8000"


def status(
    state: RunState, stage: str, *events: tuple[float, str], model: str = "stdlib", ready: bool = False
) -> ServingStatus:
    serving = {"endpoint": URL, "model": model, "version": 2}
    worker = WorkerStatus(name="local/0", node="local", pid=1, state="ready" if ready else "fetching")
    return ServingStatus(run="serve", state=state, stage=stage, events=events, workers=(worker,), **serving)


def test_a_wait_that_becomes_an_event_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines, stalled, joined = ServingLines(), (4.0, WAIT), (5.0, "worker local/0 joined")
    lines.show(status("waiting", WAIT))
    lines.show(status("waiting", WAIT, stalled))
    lines.show(status("waiting", WAIT, stalled))
    lines.show(status("serving", f"{URL}: 0 texts are continued, 0 wait", stalled, joined, ready=True))
    lines.show(status("serving", f"{URL}: 1 texts are continued, 0 wait", stalled, joined, ready=True))
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        WAIT,
        "worker local/0 joined",
        f"serving at {URL}/v1 with 1 worker. Try it:",
        example_request(URL, "stdlib", ""),
    ]


def test_a_wait_that_comes_back_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines, lost = ServingLines(), (6.0, "worker local/0 lost: killed")
    lines.show(status("waiting", WAIT))
    lines.show(status("serving", "", ready=True))
    lines.show(status("waiting", WAIT, lost))
    assert capsys.readouterr().out.splitlines()[-2:] == [lost[1], WAIT]


@pytest.mark.parametrize("name", ["stdlib", 'it\'s a "model" of $HOME'])
def test_the_example_is_a_request_of_the_model_by_its_name(name: str) -> None:
    command, url, *flags = shlex.split(example_request(URL, name, ""))
    assert (command, url) == ("curl", f"{URL}/v1/completions")
    assert flags[:3] == ["-H", "Content-Type: application/json", "-d"]
    assert json.loads(flags[3]) == {"model": name, "prompt": "Hello", "max_tokens": 40}
    assert len(flags) == 4


def test_example_reads_its_key_from_a_file_and_hides_it(tmp_path: Path) -> None:
    keys = tmp_path / "my keys.txt"
    keys.write_text("# of the team\n\nann s3cret  # hers\nbob other\n")
    line = example_request(URL, "stdlib", str(keys))
    assert "s3cret" not in line
    asked = subprocess.run(["sh", "-c", line.replace("curl", "printf '%s\\n'", 1)], capture_output=True, check=True)
    assert "Authorization: Bearer s3cret" in asked.stdout.decode().splitlines()
