"""Part e: the workload of the PCP report, 92 million parameters over 2,048 tokens: 70 steps of 8 sequences.

As in the report, each of 8 workers takes one sequence; here they share one GPU. The gateway tries the first batch and
the step on its CPU before anything is trained, which takes minutes for a batch of 8.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from common import PJRT, REHEARSAL, REPOSITORY, Record

from runs import outcome, train

EXAMPLE = REPOSITORY / "examples" / "nanochat-92m.toml"
CHANGES = {
    "fabric.backend": PJRT,
    "fabric.workers": 2 if REHEARSAL else 8,
    "fabric.quorum": 2 if REHEARSAL else 8,
    "fabric.host": "127.0.0.1",
    "fabric.target": "host",
    "train.rounds": 7,
    "train.inner_steps": 10,
    "train.batch_size": 1,
    "optimizer.warmup_steps": 20,
    "optimizer.schedule": "constant",
    "eval.every": 7,
    "eval.batches": 1,
    "checkpoint.every": 7,
}
TINY = {
    "model.options": "{ n_layer = 1, n_head = 2, n_embd = 32, vocab_size = 65536 }",
    "train.sequence_length": 32,
    "train.batch_size": 2,
}
LIMIT_S = 300.0 if REHEARSAL else 115.0


def main() -> None:
    """Record the run, and the lines that it prints with their times."""
    record = Record("e-nanochat")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        process = train(EXAMPLE, "nanochat", folder, CHANGES | (TINY if REHEARSAL else {}))
        code, output = process.wait(LIMIT_S)
        record.put("whole run, s", round(time.monotonic() - began, 1))
        found = outcome(folder / "runs" / "nanochat", code, output)
        record.put("first loss", found["losses"][0] if found["losses"] else None)
        record.put("run", found)
        record.put("stages", [line for line in output.splitlines() if ": took " in line])


if __name__ == "__main__":
    main()
