"""Programs written for PCCL run as they are: their own processes, in a folder with nothing but a recipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import HANG_S

pytestmark = pytest.mark.processes
PROGRAMS = Path(__file__).parent / "pccl_programs"
RECIPE = "from planetary.compat.pccl import install\ninstall()\n"


@contextlib.contextmanager
def program(folder: Path, name: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program of `folder` whose only help is the folder's `pccl.py`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PLANETARY_")}
    process = subprocess.Popen(
        [sys.executable, name, *arguments],
        cwd=folder,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for source in PROGRAMS.glob("*.py"):
        shutil.copy(source, tmp_path)
    (tmp_path / "pccl.py").write_text(RECIPE)
    return tmp_path


def port_of(master: subprocess.Popen[str]) -> str:
    assert master.stdout is not None
    words = master.stdout.readline().split()
    assert words[:1] == ["serving"], master.communicate(timeout=HANG_S)
    return words[1].rpartition(":")[2]


def test_master_and_peers_run_unchanged_and_survive_a_kill(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(program(folder, "master.py", "0.0.0.0:0"))
        address = f"127.0.0.1:{port_of(master)}"
        peers = [stack.enter_context(program(folder, "diloco_peer.py", address, "40")) for _ in range(3)]
        victim = peers[0]
        assert victim.stdout is not None
        for line in victim.stdout:  # in the middle of the loop, with the others in it
            if line.startswith("step") and int(line.split()[1]) >= 5:
                break
        victim.send_signal(signal.SIGKILL)
        outputs = [peer.communicate(timeout=HANG_S) for peer in peers[1:]]
        for (out, err), peer in zip(outputs, peers[1:], strict=True):
            assert peer.returncode == 0, err
            assert out.splitlines()[-1] == "end 40.0 40.0 12000.0"  # 40 steps of 1, and 40 of 3 on 100 elements
        assert master.poll() is None, "the master has to serve after the end of main"
        master.send_signal(signal.SIGINT)
        out, err = master.communicate(timeout=HANG_S)
        assert master.returncode == 0, err
        assert "Traceback" not in err
        assert err.count("HAS NO TLS") == 1
        assert "PLANETARY_AUTHORITY" in err


def test_an_environment_gives_a_program_tls(folder: Path, tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(program(folder, "master.py", "0.0.0.0:0", PLANETARY_AUTHORITY=str(authority)))
        address = f"127.0.0.1:{port_of(master)}"
        invite = authority / "newest-invite.txt"
        assert invite.stat().st_mode & 0o077 == 0
        invited = [
            stack.enter_context(program(folder, "diloco_peer.py", address, "2", PLANETARY_INVITE=given))
            for given in (str(invite), invite.read_text())
        ]
        stranger = stack.enter_context(program(folder, "diloco_peer.py", address, "2"))
        for peer in invited:
            out, err = peer.communicate(timeout=HANG_S)
            assert peer.returncode == 0, err
            assert out.splitlines()[-1].startswith("end 2.0 2.0")
        assert stranger.poll() is None or stranger.returncode != 0
        master.send_signal(signal.SIGINT)
        _, err = master.communicate(timeout=HANG_S)
        assert "HAS NO TLS" not in err


def test_a_runner_needs_no_file_at_all(folder: Path) -> None:
    (folder / "pccl.py").unlink()
    runner = [sys.executable, "-m", "planetary.compat.pccl"]
    code = "import pccl, sys; from pccl._pccl import ReduceOpDescriptor; print(pccl.Result(8).name, sys.argv[1:])"
    (folder / "short.py").write_text(code)
    for start in (["short.py"], ["-m", "short"]):
        done = subprocess.run(
            [*runner, *start, "a"], cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.stdout.strip() == "RANK_CONNECTION_LOST ['a']", done.stderr
    refused = subprocess.run(
        [*runner, "absent.py"], cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert refused.returncode == 1
    assert "there is no such file" in refused.stderr


def test_interrupt_ends_the_wait(folder: Path) -> None:
    text = "from pccl import MasterNode\nm = MasterNode('127.0.0.1:0')\nm.run()\nm.interrupt()\ndel m\nprint('over')\n"
    (folder / "interrupted.py").write_text(text)
    with program(folder, "interrupted.py") as master:
        out, err = master.communicate(timeout=HANG_S)
    assert (master.returncode, out, err) == (0, "over\n", "")


def test_the_master_command_serves_a_data_parallel_loop(folder: Path) -> None:
    (folder / "command.py").write_text("from planetary.compat.pccl.master_command import main\nmain()\n")
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(program(folder, "command.py", "--listen-address", "127.0.0.1:0"))
        address = f"127.0.0.1:{port_of(master)}"
        peers = [stack.enter_context(program(folder, "ddp_peer.py", address)) for _ in range(2)]
        for peer in peers:
            out, err = peer.communicate(timeout=HANG_S)
            assert (peer.returncode, out) == (0, "end -10.0\n"), err
        master.send_signal(signal.SIGINT)
        _, err = master.communicate(timeout=HANG_S)
        assert master.returncode == 0, err
