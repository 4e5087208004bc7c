"""Part g: the functions of a mixture on the GPU, and a ring of two processes whose tensors are there."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from common import ARTIFACTS, IREE, PJRT, TORCH, Process, Record, last_json, tail

TRIALS = {PJRT: "program.mlirbc", IREE: "program.vmfb"}
ELEMENTS = (1 << 10, 1 << 24)


def compare(backend: str) -> dict[str, Any]:
    """Compare every function with XLA on the CPU, as a worker does."""
    import msgspec

    from planetary.core.step import ProgramSpec
    from planetary.fleet.preparation.program_compiling import reference_from_xla
    from planetary.runtime.device_check import check_program
    from planetary.runtime.device_program import Program, open_program

    folder = ARTIFACTS / "mixture"
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=ProgramSpec)
    portable = (folder / "program.mlirbc").read_bytes()
    data = (folder / TRIALS[backend]).read_bytes()
    runner = open_program(data, Program(portable, spec.functions), backend=backend)
    report = check_program(runner, reference_from_xla(portable, spec), spec.functions)
    return {"functions": len(spec.functions), "summary": report.summary, "largest_function_s": report.seconds}


def peer(kind: str, address: str) -> dict[str, Any]:
    """All-reduce tensors of a device with another process; return the seconds and the digest of the results."""
    import hashlib

    import numpy as np

    from planetary.collectives import Communicator, ReduceOp

    found: dict[str, Any] = {}
    with Communicator(address) as comm:
        comm.update_topology(min_world_size=2)
        for count in ELEMENTS:
            values = np.random.default_rng(7 + comm.rank).standard_normal(count, np.float32)
            tensor, read = _tensor(kind, values)
            began = time.perf_counter()
            try:
                result = comm.all_reduce(tensor, op=ReduceOp.AVG)
            except Exception as error:  # noqa: BLE001 - it is the finding
                found[str(count)] = f"{type(error).__name__}: {error}"
                continue
            seconds = time.perf_counter() - began
            del result
            found[str(count)] = {"s": round(seconds, 4), "digest": hashlib.sha256(read().tobytes()).hexdigest()[:16]}
    return found


def _tensor(kind: str, values: Any) -> tuple[Any, Any]:
    if kind == "numpy":
        return values, lambda: values
    import torch

    tensor = torch.from_numpy(values.copy()).to(TORCH)
    return tensor, lambda: tensor.cpu().numpy()


def ring(kind: str) -> dict[str, Any]:
    """Run a master and two peers."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cli = ("-m", "planetary.cli.main")
    master = Process([*cli, "master", "--listen", f"127.0.0.1:{port}", "--plain-loopback"])
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
            break
        time.sleep(0.1)
    peers = [Process([__file__, "peer", kind, f"127.0.0.1:{port}"]) for _ in range(2)]
    ended = [one.wait(30) for one in peers]
    master.end()
    return {
        f"peer {i}": (last_json(output) if code == 0 else None) or {"failed": code, "output": tail(output)}
        for i, (code, output) in enumerate(ended)
    }


def main() -> None:
    """Record the comparisons and the rings."""
    record = Record("g-mixture")
    running = {backend: Process([__file__, "compare", backend]) for backend in TRIALS}
    rings = {kind: ring(kind) for kind in ("numpy", "torch")}
    for kind, found in rings.items():
        record.put(f"ring of two processes, {kind}", found)
    for backend, process in running.items():
        code, output = process.wait(60)
        record.put(f"mixture on {backend}", (last_json(output) if code == 0 else None) or {"failed": tail(output)})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(compare(sys.argv[2]) if sys.argv[1] == "compare" else peer(*sys.argv[2:])), flush=True)
        os._exit(0)
    main()
