"""What the parts of `bench/gpu.sh` share: their settings, their result files, and processes with a limit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCH = HERE.parent
REPOSITORY = BENCH.parent
REHEARSAL = os.environ.get("GPU_REHEARSE") == "1"
OUT = Path(os.environ.get("OUT", "out")).resolve()
ARTIFACTS = Path(os.environ.get("GPU_ARTIFACTS", "gpu-artifacts")).resolve()
PJRT = "pjrt:cpu" if REHEARSAL else "pjrt:cuda"
IREE = "cpu" if REHEARSAL else "cuda"
TORCH = "cpu" if REHEARSAL else "cuda"


class Record:
    """The result file of a part, written anew with each finding: a part that is cut off leaves what it has."""

    def __init__(self, name: str) -> None:
        self._path = OUT / f"{name}.json"
        self.found: dict[str, Any] = {}
        self._began = time.monotonic()

    def put(self, key: str, value: Any) -> None:
        """Keep a finding."""
        self.found[key] = value
        self.found["seconds"] = round(time.monotonic() - self._began, 1)
        OUT.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1, default=str))
        new.rename(self._path)
        print(f"[{self.found['seconds']:6.1f} s] {key}: {json.dumps(value, default=str)[:300]}", flush=True)


class Process:
    """A Python program in a session of its own, which ends with all that it started."""

    def __init__(
        self, command: Sequence[object], *, environment: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
        )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._popen.poll() is None

    def wait(self, limit_s: float, given: str = "") -> tuple[int, str]:
        """Return its exit status and its output; the status is 124 for a program that was ended at the limit."""
        try:
            output, _ = self._popen.communicate(given, timeout=max(0.1, limit_s))
            return self._popen.returncode, output
        except subprocess.TimeoutExpired:
            self.end()
            output, _ = self._popen.communicate()
            return 124, output

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()

    def read(self, limit_s: float) -> str | None:
        """Return output that is there within the limit; None at its end. Not to be mixed with `wait`."""
        assert self._popen.stdout is not None
        descriptor = self._popen.stdout.fileno()
        if not select.select([descriptor], [], [], limit_s)[0]:
            return ""
        return os.read(descriptor, 1 << 16).decode(errors="replace") or None

    def end(self) -> None:
        """Kill its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


def last_json(output: str) -> dict[str, Any] | None:
    """Return the last line of an output that is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def tail(output: str, lines: int = 12) -> str:
    """Return the last lines of an output, without those of loggers of drivers."""
    said = [line[:400] for line in output.strip().splitlines() if not line.startswith(("I0", "I1", "W0", "W1"))]
    return "\n".join(said[-lines:])
