"""Part b: the default example with two workers on one GPU, and with one on the GPU and one on the CPU."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from common import PJRT, REHEARSAL, REPOSITORY, Process, Record

from planetary.run.processes.announcement import read_announcement
from runs import CLI, largest_difference, outcome, train, wait_for

EXAMPLE = REPOSITORY / "examples" / "stdlib.toml"
CHANGES: dict[str, object] = {"train.rounds": 3, "train.inner_steps": 12, "eval.every": 1, "eval.batches": 8}
EXACT = {"sync.compression": "none", "sync.broadcast_compression": "none", "sync.start_compression": "none"}
TINY = {"model.options": "{ n_layer = 1, n_head = 2, n_embd = 32, vocab_size = 256 }", "train.sequence_length": 16}
if REHEARSAL:
    CHANGES |= TINY
LIMIT_S = 170.0 if REHEARSAL else 75.0
AGREES = 1e-3


def mixed(folder: Path) -> tuple[Process, list[Process]]:
    """Start a gateway, and two nodes with a worker each: on this machine's CPU, and on its GPU."""
    folder.mkdir()
    given = [f"--set={key}={value}" for key, value in {**CHANGES, **EXACT, "fabric.workers": 2}.items()]
    flags = [f"--run-dir={folder / 'run'}", f"--cache={folder / 'cache'}", "--port=0", "--gateway-port=0"]
    flags += [f"--state={folder / 'state'}", f"--announce={folder / 'announced'}", "--plain-loopback"]
    gateway = Process([*CLI, "gateway", f"--gateway-config={EXAMPLE}", *flags, *given], cwd=folder)
    if not wait_for(lambda: read_announcement(folder / "announced") or not gateway.alive, 40) or not gateway.alive:
        return gateway, []
    announced = read_announcement(folder / "announced")
    assert announced is not None
    nodes = []
    for name, backend in (("beside", "pjrt:cpu"), ("device", PJRT)):
        flags = [f"--host={announced.host}", f"--port={announced.port}", "--plain-loopback", f"--backend={backend}"]
        flags += [f"--node-name={name}", f"--state={folder / name}", f"--cache={folder / 'cache'}"]
        nodes.append(Process([*CLI, "node-manager", *flags, f"--logs={folder / 'run' / 'logs'}"], cwd=folder))
    return gateway, nodes


def main() -> None:
    """Record the runs and the differences of their losses."""
    record = Record("b-fabric")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        until = time.monotonic() + LIMIT_S
        sent = CHANGES | EXACT
        processes = {
            "two workers on the GPU": train(
                EXAMPLE, "gpu", folder / "gpu", sent | {"fabric.backend": PJRT}, ["--full"]
            ),
            "two workers on the CPU": train(
                EXAMPLE, "cpu", folder / "cpu", sent | {"fabric.backend": "pjrt:cpu"}, ["--full"]
            ),
            "two workers on the GPU, default codecs": train(
                EXAMPLE, "signs", folder / "signs", CHANGES | {"fabric.backend": PJRT}, ["--full"]
            ),
        }
        gateway, nodes = mixed(folder / "mixed")
        places = {"gpu": "two workers on the GPU", "cpu": "two workers on the CPU"}
        places["signs"] = "two workers on the GPU, default codecs"
        found = {}
        for place, title in places.items():
            code, output = processes[title].wait(until - time.monotonic())
            found[place] = outcome(folder / place / "runs" / place, code, output)
            record.put(title, found[place])
        code, output = gateway.wait(until - time.monotonic())
        for node in nodes:
            node.end()
        found["mixed"] = outcome(folder / "mixed" / "run", code, output)
        record.put("one worker on the GPU, one on the CPU", found["mixed"])
        for place in ("gpu", "mixed", "signs"):
            off = largest_difference(found["cpu"]["losses"], found[place]["losses"])
            record.put(f"largest difference of losses, {place}", off)
            if place != "signs":
                record.put(f"losses within {AGREES} of the CPU's, {place}", off is not None and off <= AGREES)


if __name__ == "__main__":
    main()
