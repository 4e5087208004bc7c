"""Runs the parts of `bench/gpu.sh`, each in a process and within a limit of its own.

    run.py [--rehearse] [--parts a b+g c] [--minutes 8] [--artifacts FOLDER]

Parts joined by + run at the same time. What a part found is in `$OUT/PART-NAME.json`; how each of them ended, with the
last words of those that failed, in `$OUT/summary.json`. The exit status is 1 if a part did not end in order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Part -> its program, and its limit in seconds.
PARTS: dict[str, tuple[str, float]] = {
    "a": ("devices", 60.0),
    "b": ("fabric", 90.0),
    "c": ("speed", 250.0),
    "d": ("serving", 110.0),
    "e": ("nanochat", 120.0),
    "f": ("fault", 80.0),
    "g": ("mixture", 60.0),
}
ORDER = ["a", "b+g+e", "c", "d", "f"]
SLOWER = 3.0  # of a rehearsal, on a machine with two cores


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="the CPU in place of the GPU, and tiny sizes")
    parser.add_argument("--parts", nargs="+", default=ORDER, help=f"default: {' '.join(ORDER)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all parts; later ones are left out")
    parser.add_argument("--artifacts", type=Path, help="made by prepare.py; a rehearsal makes its own")
    given = parser.parse_args()
    groups = [group.split("+") for group in given.parts]
    if unknown := sorted({part for group in groups for part in group} - PARTS.keys()):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if given.artifacts is None and not given.rehearse:
        parser.error("--artifacts is needed: the folder that bench/gpu/prepare.py made")
    out = Path(os.environ.setdefault("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    summary: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "command": sys.argv[1:]}
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as scratch:
        if given.rehearse:
            os.environ["GPU_REHEARSE"] = "1"
        artifacts = given.artifacts or Path(scratch) / "artifacts"
        if given.artifacts is None:
            prepare(artifacts)
        os.environ["GPU_ARTIFACTS"] = str(artifacts.resolve())
        for group in groups:
            run_group(group, end, SLOWER if given.rehearse else 1.0, Path(scratch), summary)
            (out / "summary.json").write_text(json.dumps(summary, indent=1))
    for part, ended in summary.items():
        if part in PARTS:
            print(f"part {part}: {ended}", flush=True)
    return int(any(summary[part]["status"] != 0 for group in groups for part in group))


def prepare(folder: Path) -> None:
    """Make the artifacts of a rehearsal; without IREE's compiler those of the other parts."""
    import importlib.util

    flags = [] if importlib.util.find_spec("iree.compiler") is not None else ["--no-modules"]
    subprocess.run([sys.executable, str(HERE / "prepare.py"), str(folder), "--rehearse", *flags], check=True)


def run_group(group: list[str], end: float, slower: float, scratch: Path, summary: dict[str, Any]) -> None:
    """Run parts at the same time, until their limits or the end of the whole."""
    running: dict[str, tuple[subprocess.Popen[bytes], float, Path]] = {}
    for part in group:
        limit = min(slower * PARTS[part][1], end - time.monotonic())
        if limit < 15:
            summary[part] = {"status": 125, "seconds": 0, "said": "left out: no time"}
            continue
        log = scratch / f"{part}.log"
        with log.open("wb") as output:
            command = [sys.executable, str(HERE / f"{PARTS[part][0]}.py")]
            environment = {**os.environ, "GPU_SPEED_S": str(limit - 8)}
            started = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )
        running[part] = started, time.monotonic() + limit, log
    began = time.monotonic()
    for part, (process, until, log) in running.items():
        try:
            status = process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = 124
        end_all_of(process)
        text = log.read_text(errors="replace")
        print(f"--- part {part}, {time.monotonic() - began:.0f} s, status {status}\n{text[-6000:]}", flush=True)
        summary[part] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        if status != 0:
            summary[part]["said"] = text[-1500:]


def end_all_of(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and the processes that it started, in sessions of their own too."""
    import signal

    children = descendants(process.pid) if process.poll() is None else []
    for pid in [process.pid, *children]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes below one, deepest last."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    sys.exit(main())
