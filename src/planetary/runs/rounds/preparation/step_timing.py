"""Times some training steps of an artifact in a separate process: a freshly compiled module may crash or hang.

    python -m planetary.runs.rounds.preparation.step_timing FOLDER

`FOLDER` holds the request and the values, and is given the answer: a `StepTimes`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.errors import CompileError
from planetary.core.exit_status import describe_exit
from planetary.core.step import StepSpec
from planetary.fleet.shell.child import Child, end_group, end_with_parent
from planetary.runtime.step_check import WARM_UP_STEPS, step_milliseconds

TIME_LIMIT_S = 600.0


class TimingRequest(msgspec.Struct, frozen=True):
    """A step to time.

    Attributes:
        artifact: file with the compiled step.
        spec: signature of the step.
        backend: that executes it.
        threads: of a CPU; 0: all usable cores.
        steps: how many steps to time, after `WARM_UP_STEPS` others.
    """

    artifact: str
    spec: StepSpec
    backend: str
    threads: int
    steps: int


class StepTimes(msgspec.Struct, frozen=True):
    """Times of steps in one process.

    Attributes:
        milliseconds: of each step.
        busy: processor seconds of the process per second and thread meanwhile; 1.0 for a device that is no CPU, whose
            time this process does not see. Less than the step reaches alone: other programs had the cores.
    """

    milliseconds: list[float]
    busy: float


def write_values(folder: Path, params: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray]) -> None:
    """Write the values the step starts from, once for any number of timings in `folder`."""
    np.savez(folder / "params.npz", allow_pickle=False, **params)
    np.savez(folder / "buffers.npz", allow_pickle=False, **buffers)


async def time_steps(folder: Path, request: TimingRequest) -> StepTimes:
    """Return the times of the steps, measured in a child process.

    Raises:
        CompileError: the process crashed, took longer than `TIME_LIMIT_S`, or the step gave no finite loss.
    """
    import asyncio

    (folder / "request.json").write_bytes(msgspec.json.encode(request))
    (folder / "times.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "planetary.runs.rounds.preparation.step_timing", str(folder)]
    child = await Child.start(command, log=folder / "output.txt", environment={"TF_CPP_MIN_LOG_LEVEL": "1"})
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            code = await child.wait()
    except TimeoutError:
        raise CompileError(f"{request.steps} steps did not end within {TIME_LIMIT_S:.0f} s") from None
    finally:
        child.kill_group()
    if code != 0:
        output = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
        raise CompileError(f"the process that runs the step {describe_exit(code)}: {output[-1] if output else ''}")
    return decoding.from_json((folder / "times.json").read_bytes(), StepTimes)


def _serve(folder: Path) -> None:
    from planetary.compiler.check.parity import random_batches
    from planetary.runtime.backends import CPU_BACKENDS
    from planetary.runtime.executor import open_executor
    from planetary.runtime.host import usable_cores

    request = decoding.from_json((folder / "request.json").read_bytes(), TimingRequest)
    params, buffers = (_load(folder / name) for name in ("params.npz", "buffers.npz"))
    executor = open_executor(request.artifact, request.spec, backend=request.backend, threads=request.threads or None)
    executor.load(params, buffers, None)
    batches = list(random_batches(request.spec, WARM_UP_STEPS + request.steps, seed=0))
    began: list[tuple[float, float]] = []
    milliseconds = step_milliseconds(executor, _noting(batches, began))
    wall_s, processor_s = time.perf_counter() - began[WARM_UP_STEPS][0], time.process_time() - began[WARM_UP_STEPS][1]
    threads = request.threads or usable_cores()
    busy = processor_s / (wall_s * threads) if request.backend in CPU_BACKENDS else 1.0
    (folder / "times.json").write_bytes(msgspec.json.encode(StepTimes(milliseconds, busy)))


def _noting(
    batches: Sequence[Sequence[np.ndarray]], began: list[tuple[float, float]]
) -> Iterator[Sequence[np.ndarray]]:
    """Yield `batches`, and note wall and processor seconds before each."""
    for batch in batches:
        began.append((time.perf_counter(), time.process_time()))
        yield batch


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


if __name__ == "__main__":
    end_with_parent(end_group)
    try:
        _serve(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - its text is the last line of the log, which the parent reports
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os._exit(0)  # without tearing down the interpreter while a device is open: see `runtime`
