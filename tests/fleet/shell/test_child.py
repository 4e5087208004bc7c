"""Children of a process, with what they started themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from planetary.fleet.shell.child import Child
from waiting import wait_until

COMPILER = """
import subprocess, sys
from planetary.fleet.shell.child import end_group, end_with_parent
end_with_parent(end_group)
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[1], "w").write(str(started.pid))
started.wait()
"""


def is_gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.processes
def test_a_killed_child_takes_its_compiler_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def run() -> None:
        child = await Child.start([sys.executable, "-c", COMPILER, str(note)], log=None)
        try:
            await asyncio.to_thread(wait_until, lambda: note.is_file() and note.read_text() != "", "a process is named")
        finally:
            child.kill_group()
            await child.wait()

    asyncio.run(run())
    wait_until(lambda: is_gone(int(note.read_text())), "it is gone")


@pytest.mark.processes
def test_a_compiler_does_not_outlive_the_gateway(tmp_path: Path) -> None:
    """When the gateway dies, the pipe is closed that the child waits at."""
    note = tmp_path / "pid"
    command = [sys.executable, "-c", COMPILER, str(note)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdin is not None
        wait_until(lambda: note.is_file() and note.read_text() != "", "the process is named")
        child.stdin.close()
        child.wait(60)
        wait_until(lambda: is_gone(int(note.read_text())), "it is gone")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
