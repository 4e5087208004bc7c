"""Memory and time of a training step with and without recomputation of activations.

    python bench/remat.py [--layers 8] [--width 128] [--remat none blocks 60MiB] [--rounds 3]

For each setting: what the policy predicts; the temporary memory of the step as XLA compiled it for the CPU; the
growth of resident memory of a fresh process that runs the step with IREE (parameters and optimizer state are there
before); and the time of a step with both, the settings taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--remat", nargs="+", default=["none", "blocks", "60MiB"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-iree", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("VMFB", "SPEC"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured_steps(*map(Path, options.child))), flush=True)
        os._exit(0)  # without taking the runtime apart
    with tempfile.TemporaryDirectory() as folder:
        _compare(options, Path(folder))


def _compare(options: argparse.Namespace, folder: Path) -> None:
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.step.train_step import StepOptions, build_train_step

    sizes = {"n_layer": options.layers, "n_head": 4, "n_embd": options.width, "sequence_length": options.length}
    model = export_model("planetary.models.nanochat:build", sizes | {"batch_size": options.batch})
    programs: dict[str, Any] = {}
    for remat in options.remat:
        began = time.perf_counter()
        step = build_train_step(model, StepOptions(remat=remat))
        seconds = time.perf_counter() - began
        plan = step.remat
        print(f"{remat}: built in {seconds:.2f} s, {step.stablehlo.count('stablehlo.')} operations")
        if plan is not None:
            print(
                f"  policy: {_mib(plan.bytes_before)} -> {_mib(plan.bytes_after)}, {len(plan.cuts) + 1} segments, "
                f"{plan.cost:.0%} of the forward pass again"
            )
        programs[remat] = _compile_xla(step, model)
        print(f"  XLA: temporary memory {_mib(programs[remat][0])}")
        if not options.skip_iree:
            _compile_iree(step, folder / remat)
    for round_ in range(options.rounds):
        for remat in options.remat:
            found = _run_xla(*programs[remat][1:])
            print(f"round {round_} {remat}: XLA {found['ms']:.0f} ms, losses {found['losses'][:3]}")
            if not options.skip_iree:
                command = [sys.executable, __file__, "--child", f"{folder / remat}.vmfb", f"{folder / remat}.json"]
                found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                print(
                    f"round {round_} {remat}: IREE {found['ms']:.0f} ms ({found['cpu']:.0f} ms of processor time), "
                    f"+{found['grown']:.0f} MiB, {found['losses']}"
                )


def _compile_xla(step: Any, model: Any) -> tuple[int, Any, list]:
    import jax

    from planetary.compiler.backends import xla
    from planetary.compiler.step.step_module import replaced_arguments

    device = jax.devices("cpu")[0]
    text, kinds = xla.as_main(step.portable, "train_step", replaced=replaced_arguments(step.spec))
    program = xla.compile_main(text, [device])
    params = _start(step.spec, model.initial("param"))
    arguments = [
        *params,
        *(t.zeros() for t in step.spec.opt_state),
        np.array(0, np.int32),
        np.array(3e-3, np.float32),
        *_batch(step.spec),
    ]
    inputs = list(zip(arguments, kinds, strict=True))
    return program.get_compiled_memory_stats().temp_size_in_bytes, program, inputs


def _run_xla(program: Any, inputs: list) -> dict[str, Any]:
    import jax

    from planetary.compiler.backends import xla

    device = jax.devices("cpu")[0]
    held = [xla.place(np.array(array), kind, device) for array, kind in inputs]
    times, losses = [], []
    for index in range(STEPS):
        began = time.perf_counter()
        results = [parts[0] for parts in xla.run(program, held)]
        losses.append(float(np.asarray(results[-2])))
        jax.block_until_ready(results)
        times.append(time.perf_counter() - began)
        state = results[:-2]
        held = [*state, xla.place(np.array(index + 1, np.int32), "i32", device), *held[len(state) + 1 :]]
    return {"ms": 1e3 * statistics.median(times[1:]), "losses": losses}


def _compile_iree(step: Any, path: Path) -> None:
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.runtime.host import host_features

    artifact = compile_artifact(step, Target("cpu", "host", host_features()))
    path.with_name(path.name + ".vmfb").write_bytes(artifact.data)
    path.with_name(path.name + ".json").write_bytes(msgspec.json.encode(step.spec))


def measured_steps(module: Path, spec_file: Path, threads: int | None = None) -> dict[str, Any]:
    """Run steps with IREE in a process without JAX, whose memory is the step's alone."""
    from planetary.core.step import StepSpec
    from planetary.runtime.executor import open_executor

    spec = msgspec.json.decode(spec_file.read_bytes(), type=StepSpec)
    executor = open_executor(module, spec, backend="cpu", threads=threads)
    executor.load(dict(zip([t.name for t in spec.params], _start(spec, {}), strict=True)), {}, None)
    batch = _batch(spec)
    before = _memory_mib("VmRSS")
    times, losses = [], []
    used = time.process_time()
    for index in range(STEPS):
        began = time.perf_counter()
        losses.append(executor.train_step(index, 3e-3, batch).loss)
        times.append(time.perf_counter() - began)
    used = time.process_time() - used
    peak = _memory_mib("VmHWM")  # getrusage would count what the parent held when this process was started
    executor.close()
    return {
        "ms": 1e3 * statistics.median(times[1:]),
        "cpu": 1e3 * used / STEPS,
        "grown": peak - before,
        "losses": losses[:3],
    }


def _memory_mib(kind: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) / 1024


def _start(spec: Any, initial: dict) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    noise = [rng.standard_normal(t.shape, np.float32) * np.float32(0.05) for t in spec.params]
    return [initial.get(t.name, np.float32(0)) + n for t, n in zip(spec.params, noise, strict=True)]


def _batch(spec: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, t.shape).astype(np.int32) for t in spec.batch]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
