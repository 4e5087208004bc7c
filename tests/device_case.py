"""What the device tier runs on one device, in a process of its own: JAX opens its devices once per process.

python device_case.py step|mixture FOLDER
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.core.step import ProgramSpec, StepSpec
from planetary.core.trials.deviations import worst_of
from planetary.core.trials.step import decode_reference, draw_trial, run_trial

BACKENDS = ("cuda", "pjrt:cuda", "hip", "metal", "vulkan", "cpu", "pjrt:cpu")
STEPS = 12


class Case(msgspec.Struct):
    """One request."""

    backend: str
    artifact: str  # file
    spec: StepSpec | None = None
    program: ProgramSpec | None = None
    reference: str = ""  # file
    portable: str = ""  # file


@functools.cache
def missing(backend: str) -> str:
    """Return why nothing can run on `backend` here; "" if a device is there."""
    if backend in {"cpu", "pjrt:cpu"}:
        return ""
    if backend == "pjrt:cuda":
        plugins = [name for name in ("jax_cuda13_plugin", "jax_cuda12_plugin") if importlib.util.find_spec(name)]
        if not plugins:
            return "JAX has no CUDA plugin here (pip install 'planetary-compute[pjrt-cuda]')"
        return missing("cuda")
    import iree.runtime as iree

    from planetary.runtime.iree_device import DRIVERS

    if DRIVERS[backend] not in iree.query_available_drivers():
        return f"this build of IREE's runtime has no {backend} driver"
    try:
        devices = iree.get_driver(DRIVERS[backend]).query_available_devices()
    except (RuntimeError, ValueError) as error:
        return f"IREE cannot open {backend}: {str(error).splitlines()[0]}"
    return "" if devices else f"IREE's {backend} driver lists no device"


def run_step(case: Case) -> dict[str, Any]:
    """Check the step against its reference, and time it."""
    from planetary.runtime.executor import open_executor
    from planetary.runtime.step_check import WARM_UP_STEPS, step_milliseconds

    assert case.spec is not None
    began = time.perf_counter()
    executor = open_executor(case.artifact, case.spec, backend=case.backend)
    opened = time.perf_counter() - began
    reference = decode_reference(Path(case.reference).read_bytes(), case.spec)
    trial = draw_trial(case.spec, reference.values, {})
    found = run_trial(case.spec, executor, trial)
    name, error = worst_of(reference.errors(case.spec, trial.before, found))
    executor.load(trial.params, trial.buffers, trial.opt_state)
    times = step_milliseconds(executor, [trial.batch] * (WARM_UP_STEPS + STEPS))
    return {
        "device": executor.device_name,
        "open_s": opened,
        "worst": name,
        "error": error,
        "step_ms": float(np.median(times)),
        "peak_mib": executor.peak_memory() / 2**20,
    }


def run_mixture(case: Case) -> dict[str, Any]:
    """Compare every function of a mixture's program with XLA on the CPU, as a worker does."""
    from planetary.compiler.backends.targets import Target
    from planetary.fleet.preparation.program_compiling import compared, reference_from_xla

    assert case.program is not None
    data = Path(case.artifact).read_bytes()
    portable = Path(case.portable).read_bytes()
    report = compared(reference_from_xla(portable, case.program), case.program, data, "", Target(case.backend, ""))
    return {"worst": report.worst_tensor, "error": report.worst_error}


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    given = msgspec.json.decode((folder / "case.json").read_bytes(), type=Case)
    answer = run_step(given) if sys.argv[1] == "step" else run_mixture(given)
    (folder / "answer.json").write_text(json.dumps(answer))
