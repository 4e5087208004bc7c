"""Part a: the devices seen, and the check of a training step on each way to reach them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

from common import ARTIFACTS, IREE, PJRT, REHEARSAL, TORCH, Process, Record, last_json, tail

PACKAGES = ("jax", "jaxlib", "torch", "transformers", "numpy", "iree-base-runtime", "planetary-compute", "triton")
STEPS = 20
# Name of a trial -> backend, artifact, folder of the step, whether factors may be rounded to TF32.
TRIALS = {
    f"{PJRT} f32": (PJRT, "step.mlirbc", "main-f32", False),
    f"{PJRT} f32, TF32 allowed": (PJRT, "step.mlirbc", "main-f32", True),
    f"{PJRT} bf16": (PJRT, "step.mlirbc", "main-bf16", False),
    f"{IREE} f32": (IREE, "step.vmfb", "main-f32", False),
}


def trial(name: str) -> dict[str, Any]:
    """Run the check of a worker on this device, in this process, and time steps."""
    import msgspec
    import numpy as np

    from planetary.core.step import StepSpec
    from planetary.core.trials.deviations import worst_of
    from planetary.core.trials.step import decode_reference, draw_trial, run_trial
    from planetary.runtime.executor import open_executor
    from planetary.runtime.step_check import step_milliseconds

    backend, artifact, step, tf32 = TRIALS[name]
    if tf32:
        from planetary.compiler.backends import xla

        xla.exact_products = lambda module: 0
    folder = ARTIFACTS / step
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=StepSpec)
    began = time.perf_counter()
    executor = open_executor(folder / artifact, spec, backend=backend)
    opened = time.perf_counter() - began
    reference = decode_reference((folder / "reference").read_bytes(), spec)
    given = draw_trial(spec, reference.values, {})
    found = run_trial(spec, executor, given)
    errors = reference.errors(spec, given.before, found)
    worst, error = worst_of(errors)
    executor.load(given.params, given.buffers, given.opt_state)
    times = step_milliseconds(executor, [given.batch] * STEPS)
    return {
        "device": executor.device_name,
        "open_s": round(opened, 1),
        "verified": bool(all(one <= 1 for one in errors.values())),
        "worst_tensor": worst,
        "worst_error": error,
        "loss": float(found["loss"]),
        "expected_loss": reference.scalars["loss"],
        "grad_norm": float(found["grad_norm"]),
        "expected_grad_norm": reference.scalars["grad_norm"],
        "step_ms": float(np.median(times)),
        "peak_mib": executor.peak_memory() / 2**20,
    }


def seen() -> dict[str, Any]:
    """Return what there is, without opening a device."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


_LISTINGS = {
    "IREE": f"from planetary.runtime.backends import list_devices; print(list_devices({IREE!r}))",
    "JAX": f"import jax; jax.config.update('jax_platforms', {PJRT.partition(':')[2]!r}); print(jax.devices())",
    "PyTorch": f"import torch; print(torch.cuda.get_device_properties(0) if {TORCH == 'cuda'} else torch.__version__)",
    "workers of two": f"from planetary.runtime.backends import count_devices; print(count_devices({PJRT!r}))",
}


def main() -> None:
    """Record the devices and every trial."""
    record = Record("a-devices")
    record.put("seen", seen() | {"artifacts": json.loads((ARTIFACTS / "about.json").read_text())})
    listing = {name: Process(["-c", script]) for name, script in _LISTINGS.items()}
    for name, process in listing.items():
        code, output = process.wait(25)
        record.put(f"devices of {name}", tail(output, 1) if code == 0 else f"status {code}: {tail(output, 3)}")
    running = {name: Process([__file__, name]) for name in TRIALS}
    for name, process in running.items():
        code, output = process.wait(50)
        record.put(name, (last_json(output) if code == 0 else None) or {"failed": code, "output": tail(output)})
    if REHEARSAL:
        record.put("rehearsal", True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(trial(sys.argv[1])), flush=True)
        os._exit(0)  # without taking the runtimes apart
    main()
