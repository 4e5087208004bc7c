"""Children are started with one file: what is in it, who may read it, and what a child says of a wrong one."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

from planetary.cli.child import main
from planetary.cli.commands.roles import node_manager
from planetary.cli.main import build_parser
from planetary.cli.node_flags import started_by, worker_start
from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.fleet.shell.starts import ManagerStart, WorkerStart, read_start, start_command, write_start
from planetary.run.processes.announcement import Announcement
from planetary.run.processes.local_run import node_start

FLAGS = ["--backend=cpu", "--threads=3", "--node-name=n", "--role=trainer", "--allow-code", "--give-up-after=7"]


def of_flags(folder: Path) -> WorkerStart:
    words = ["worker", "--connect=gw.example:81", "--device-id=2", f"--state={folder}", f"--cache={folder}", *FLAGS]
    return worker_start(build_parser("worker").parse_args([*words, "--token=secret"]))


def test_file_of_a_child_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    started = of_flags(tmp_path)
    path = write_start(tmp_path / "n" / "0.json", started)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_start(path, WorkerStart) == started
    command = start_command("worker", path)
    assert command[1:] == ["-m", "planetary.cli.child", "worker", str(path)]
    assert "secret" not in " ".join(command)


def test_line_of_the_readme_finds_a_worker(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    pattern = re.search(r"kill -9 \$\(pgrep -f '(.+)' \| head -1\)", readme)
    assert pattern is not None
    assert re.search(pattern[1], " ".join(start_command("worker", tmp_path)))
    assert not re.search(pattern[1], " ".join(start_command("gateway", tmp_path)))


def test_flags_and_file_say_the_same(tmp_path: Path) -> None:
    found = of_flags(tmp_path)
    assert (found.host, found.port, found.token, found.plain, found.name) == ("gw.example", 81, "secret", False, "n/2")
    assert (found.threads, found.device_id, found.roles, found.allow_code, found.give_up_s) == (
        3,
        2,
        ("trainer",),
        True,
        7.0,
    )
    assert (found.cache, found.state, found.logs) == (str(tmp_path), str(tmp_path), "")


def test_worker_of_a_manager_has_the_managers_values(tmp_path: Path) -> None:
    words = ["node-manager", "--host=gw.example", "--port=81", "--scale=4", f"--state={tmp_path}", *FLAGS]
    args = build_parser("node-manager").parse_args([*words, f"--cache={tmp_path}", "--token=secret"])
    manager = ManagerStart(**started_by(args, args.host, args.port), scale=args.scale)
    worker = node_manager._worker(manager, name="n/2", device_id=2)
    assert worker == of_flags(tmp_path)


def test_local_node_has_every_value_of_the_configuration(tmp_path: Path) -> None:
    keys = ["workers=3", "threads=2", 'backend="cpu"', 'target="baseline"', "latency_budget_s=5.0", "island=1"]
    config = apply_overrides(Config(), [f"fabric.{key}" for key in keys])
    announced = Announcement("127.0.0.1", 9, "http://127.0.0.1:1/", "invite", str(tmp_path))
    found = node_start(config, announced, tmp_path, tmp_path / "cache")
    assert msgspec.to_builtins(found) == {
        "host": "127.0.0.1", "port": 9, "token": "invite", "plain": False, "latency_budget_s": 5.0, "node": "local",
        "backend": "cpu", "target": "baseline", "island": 1, "threads": 2, "cache": str(tmp_path / "cache"),
        "state": str(tmp_path / "workers"), "logs": str(tmp_path / "logs"), "roles": (), "allow_code": True,
        "give_up_s": 0.0, "scale": 3,
    }  # fmt: skip


def test_child_says_what_is_wrong_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "start.json"
    with pytest.raises(ResourceError, match=r"start\.json, which this process was started with: No such file"):
        read_start(path, WorkerStart)
    path.write_text('{"host": "127.0.0.1"}')
    with pytest.raises(LocalProtocolError, match=r"is no WorkerStart: .*missing required field `port`"):
        read_start(path, WorkerStart)
    assert main(["worker", str(tmp_path / "nothing.json")]) == 7
    assert "which this process was started with" in " ".join(capsys.readouterr().err.split())


def test_crash_below_python_leaves_the_stack_in_the_log(tmp_path: Path) -> None:
    """As of a library's segmentation fault; the child waits for its file, a pipe, meanwhile."""
    path, log = tmp_path / "start", tmp_path / "log"
    os.mkfifo(path)
    with log.open("w") as output:
        child = subprocess.Popen(start_command("gateway", path), stderr=output)
    with path.open("w"):  # opened once the child has begun to read
        child.send_signal(signal.SIGSEGV)
        assert child.wait(30) == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in log.read_text()
    assert "in read_start" in log.read_text()
