"""Real planetary processes around a model so small that a whole run takes seconds. Everything has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planetary.run.processes.announcement import Announcement, read_announcement
from waiting import HANG_S, wait_until


def write_config(folder: Path, *, name: str = "tiny", **changes: Any) -> Path:
    """Write a configuration and its data into `folder`; `changes` are `section__key=TOML value`."""
    source = random.Random(0)
    words = ["def", "return", "for", "in", "import", "class", "self", "x", "y", "if", "else", "print"]
    (folder / "corpus.txt").write_text(
        "\n".join(" ".join(source.choice(words) for _ in range(8)) for _ in range(4000)), encoding="utf-8"
    )
    tables: dict[str, dict[str, Any]] = {
        "model": {"options": "{ n_layer = 1, n_head = 2, n_embd = 32, vocab_size = 256 }"},
        "data": {"source": '"corpus.txt"'},
        "train": {"rounds": 3, "inner_steps": 3, "batch_size": 2, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.003, "warmup_steps": 2, "schedule": '"constant"'},
        "fabric": {"workers": 1, "threads": 1},
        "eval": {"batches": 2},
    }
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        tables.setdefault(section, {})[key] = value
    path = folder / f"{name}.toml"
    lines: list[str] = []
    for section, table in tables.items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Ended:
    """A command that ended by itself."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Its last words on standard error, as one line: what `planetary: ` introduces."""
        last = self.err.rpartition("planetary: ")[2]
        return " ".join(last.split())


def run(*arguments: object, cwd: Path, deadline_s: float = HANG_S) -> Ended:
    """Run a planetary command to its end. A hang is a failure, and takes the processes it started with it."""
    with started(*arguments, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            said = error.stderr or b""
            raise AssertionError(f"{arguments} did not end within {deadline_s:.0f} s; it said {said!r}") from None
    ended = Ended(process.returncode, out, err)
    assert "Traceback" not in ended.out + ended.err, ended.err
    return ended


@contextlib.contextmanager
def started(*arguments: object, cwd: Path, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a planetary command; at the end it is gone. Its children end with it."""
    with contextlib.ExitStack() as stack:
        output: Any = subprocess.PIPE if log is None else stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            [sys.executable, "-m", "planetary.cli.main", *map(str, arguments)],
            cwd=cwd,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "100"},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(HANG_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(HANG_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@contextlib.contextmanager
def gateway(
    config: Path, folder: Path, cache: Path, *, plain: bool = False, flags: Sequence[object] = ()
) -> Iterator[tuple[subprocess.Popen[str], Announcement]]:
    """A gateway of its own, with its run in `folder / "run"` and its log in `folder / "gateway.log"`."""
    announce = folder / "announcement"
    arguments = [f"--gateway-config={config}", f"--run-dir={folder / 'run'}", f"--cache={cache}", "--port=0"]
    arguments += ["--gateway-port=0", f"--state={folder / 'state'}", f"--announce={announce}"]
    # The threads of `write_config` are those of a run that starts its own workers.
    arguments += ["--set=fabric.threads=0", *(["--plain-loopback"] if plain else [])]
    with started("gateway", *arguments, *flags, cwd=folder, log=folder / "gateway.log") as process:
        announced = wait_until(lambda: read_announcement(announce), "the gateway listens", process=process)
        assert announced is not None
        yield process, announced


def node_flags(announced: Announcement, folder: Path, cache: Path) -> list[str]:
    """What a node manager on this machine needs to join."""
    flags = [f"--host={announced.host}", f"--port={announced.port}", f"--cache={cache}", f"--state={folder / 'node'}"]
    if not announced.token:
        return [*flags, "--plain-loopback"]
    token = folder / "token"
    token.write_text(announced.token)
    return [*flags, f"--token-file={token}"]


def events(run_folder: Path) -> list[dict[str, Any]]:
    """The journal, as far as it is written."""
    path = run_folder / "events.jsonl"
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
