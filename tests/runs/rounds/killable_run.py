"""A real run of a tiny model in real processes, for tests that kill some of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from planetary.artifacts.jsonl import JsonLinesTail
from waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[3]
TINY = (
    "model.options.n_layer=1",
    "model.options.n_head=2",
    "model.options.n_embd=32",
    "train.batch_size=2",
    "train.sequence_length=16",
    "train.inner_steps=1000",
    "optimizer.learning_rate=0.003",
    "optimizer.warmup_steps=2",
    "optimizer.schedule=constant",
    "eval.batches=2",
    "eval.every=1",
    "sync.compression=none",
    "sync.broadcast_compression=none",
    "sync.start_compression=none",
    "outer.merge=mean",
)

Event = dict[str, Any]


class KillableRun:
    """One `planetary train` process, followed through its journal."""

    def __init__(
        self,
        folder: Path,
        cache: Path,
        *arguments: str,
        resume: bool = False,
        example: str = "stdlib.toml",
        overrides: Sequence[str] = TINY,
    ) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "planetary.cli.main", "train"]
        if resume:
            command += [f"--resume={folder}"]
        else:
            command += [str(ROOT / "examples" / example), f"--run-dir={folder}"]
            command += [f"--set={override}" for override in overrides]
        already = (folder / "events.jsonl").exists()
        self._tail = JsonLinesTail(folder / "events.jsonl", dict[str, Any])
        self.events: list[Event] = self._tail.poll() if already else []
        self._read = len(self.events)
        self.process = subprocess.Popen(
            [*command, f"--cache={cache}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """Return the next event that `wanted` accepts; fails when the run ends before, or hangs."""
        event = wait_until(lambda: self._next(wanted), "the event", said=self._said, process=self.process)
        assert event is not None
        return event

    def _next(self, wanted: Callable[[Event], bool]) -> Event | None:
        self.events += self._tail.poll()
        while self._read < len(self.events):
            event = self.events[self._read]
            self._read += 1
            if wanted(event):
                return event
        return None

    def _said(self) -> str:
        logs = [path.read_text()[-1000:] for path in sorted((self.folder / "logs").glob("*.log"))]
        ended = self.process.communicate() if self.process.poll() is not None else ()
        return "\n".join([*ended, *map(str, self.events[-5:]), *logs])

    def wait_for_event(self, name: str, **fields: object) -> Event:
        """`wait_for` an event of this name whose fields have these values."""
        return self.wait_for(lambda e: e["event"] == name and all(e.get(key) == value for key, value in fields.items()))

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and error output."""
        out, error = self.process.communicate(timeout=HANG_S)
        self.events += self._tail.poll()
        return self.process.returncode, out, error

    def of(self, name: str) -> list[Event]:
        """All events of a name so far."""
        self.events += self._tail.poll()
        return [e for e in self.events if e["event"] == name]

    def child(self, role: str, containing: str = "") -> psutil.Process:
        """The process of a role (`gateway`, `node-manager`, `supervisor`, `worker`) below this run."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            line = process.cmdline()
            if role in line and any(containing in part for part in line):
                return process
        raise AssertionError(f"no {role} process is running")

    def family(self) -> list[psutil.Process]:
        """All processes below this run."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        """End whatever is left of it."""
        if self.process.poll() is None:
            family = self.family()
            self.process.send_signal(signal.SIGKILL)
            psutil.wait_procs(family, timeout=HANG_S)
            self.process.communicate()


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)
