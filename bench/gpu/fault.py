"""Part f: a step for which the GPU's memory does not suffice at first.

Another process holds nearly all of the card. The worker runs out of memory, dies and comes back; once memory is free,
the run ends. In a rehearsal the worker is killed instead, since a CPU has no memory of its own to fill.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import PJRT, REHEARSAL, REPOSITORY, Process, Record, tail

from runs import outcome, read_lines, train, wait_for

EXAMPLE = REPOSITORY / "examples" / "stdlib.toml"
CHANGES: dict[str, object] = {
    "fabric.backend": PJRT,
    "fabric.workers": 1,
    "train.rounds": 3,
    "train.inner_steps": 20,
    "train.batch_size": 256,  # of 128 tokens: its activations take some gigabytes
    "eval.batches": 1,
    "model.options": "{ n_layer = 2, n_head = 4, n_embd = 128, vocab_size = 256 }",
}
TINY = {"train.batch_size": 2, "model.options": "{ n_layer = 1, n_head = 2, n_embd = 32, vocab_size = 256 }"}
LEFT_MIB = 900  # for the context of the worker's process and its parameters
LIMIT_S = 75.0 if not REHEARSAL else 200.0
_END_OF_WORKER = re.compile(r"worker [^ ]+, process \d+, ")
_HOLD = f"""
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - ({LEFT_MIB} << 20), dtype=torch.uint8, device="cuda")
print("held", held.numel(), flush=True)
sys.stdin.readline()
"""


def workers(run: Path) -> set[int]:
    """Return the process ids of workers that joined."""
    return {e["pid"] for e in read_lines(run / "events.jsonl") if e["event"] == "worker_joined"}


def failures(run: Path) -> list[str]:
    """Return the lines of the supervisors' logs that tell of a worker's end."""
    found = []
    for log in sorted((run / "logs").glob("*.log")) if (run / "logs").exists() else ():
        text = log.read_text(errors="replace")
        found += [line[:600] for line in text.splitlines() if _END_OF_WORKER.search(line)]
    return found


def main() -> None:
    """Record how the worker failed, and how the run ended."""
    record = Record("f-fault")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "runs" / "fault"
        until = time.monotonic() + LIMIT_S
        holding = None if REHEARSAL else Process(["-c", _HOLD])
        changes = CHANGES | (TINY if REHEARSAL else {})
        process = train(EXAMPLE, "fault", folder, changes, ["--full"])
        if REHEARSAL:
            happened = wait_for(lambda: workers(run), 80)
            for pid in workers(run):
                os.kill(pid, signal.SIGKILL)
            record.put("killed", happened)
        else:
            happened = wait_for(lambda: failures(run) or not process.alive, 60)
            record.put("memory held by another process", happened)
            if holding is not None:
                time.sleep(2)  # so that a second attempt fails too
                query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
                record.put("used", subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())
                holding.end()
        record.put("failures before memory was free", failures(run)[:10])
        code, output = process.wait(until - time.monotonic())
        found = outcome(run, code, output)
        record.put("failures in all", failures(run)[:20])
        record.put("workers that joined", len(workers(run)))
        record.put("run", found)
        record.put("said", tail(output, 20))


if __name__ == "__main__":
    main()
