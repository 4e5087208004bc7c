"""Where the time of a compiled training step goes: its dispatches, as IREE's own profiler sees them.

    python bench/dispatch_profile.py                                    # the step of examples/stdlib.toml, one thread
    python bench/dispatch_profile.py --set batch_size=8 --threads 2 --flag=--iree-llvmcpu-distribution-size=256

Each line: milliseconds of a step, calls, milliseconds of a call at its fastest, and for matrix products the billions of
operations per second. The last line sums the fastest calls, which other programs on the machine disturb least. IREE has
to be installed with its tools (`iree-base-compiler` and `iree-base-runtime` bring them).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec

SIZES = {"n_layer": 4, "n_embd": 256, "n_head": 4, "batch_size": 2, "sequence_length": 128}
TOOLS = Path(sys.executable).parent
# As `planetary.runtime.host_memory` sets them for workers.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**62), "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_ARENA_MAX": "1"}


def _compile(options: dict[str, Any], flags: list[str], module: Path) -> StepSpec:
    from planetary.compiler import ir
    from planetary.compiler.backends.iree import compiler_version, run_compiler
    from planetary.compiler.backends.targets import Target, compiler_flags
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.rewrites import normalise
    from planetary.compiler.step.train_step import StepOptions, build_train_step, replaced_arguments
    from planetary.core.artifact_label import ArtifactLabel
    from planetary.runtime.host import host_features

    step = build_train_step(export_model("planetary.models.nanochat:build", options), StepOptions())
    target = Target("cpu", "host", host_features())
    label = ArtifactLabel(compiler_version(), target.backend, target.name, target.features, step.spec.stablehlo_digest)
    with ir.new_context():
        parsed = ir.parse_module(step.portable)
        normalise.for_target(parsed, label, replaced_arguments(step.spec))
        text = ir.to_text(parsed)
    module.write_bytes(run_compiler(text, [*compiler_flags(target), *flags]))
    return step.spec


def _input(tensor: TensorSpec) -> str:
    value = "1" if tensor.dtype.startswith("i") else "0.01"
    return "--input=" + "x".join([*map(str, tensor.shape), tensor.dtype]) + "=" + value


def _profile(module: Path, spec: StepSpec, steps: int, threads: int, bundle: Path) -> list[dict[str, Any]]:
    inputs = [_input(t) for t in (*spec.params, *spec.buffers, *spec.opt_state)]
    command = [
        TOOLS / "iree-benchmark-module",
        f"--module={module}",
        "--device=local-task",
        "--function=train_step",
        f"--task_topology_group_count={threads}",
        f"--benchmark_min_time={steps}x",
        "--device_profiling_mode=host-execution,executable-metadata",
        f"--device_profiling_output={bundle}",
        *inputs,
        "--input=i32=1",
        *(_input(t) for t in spec.batch),
    ]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | ENVIRONMENT)
    listing = [TOOLS / "iree-profile", "dispatch", "--format=jsonl", bundle]
    lines = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    return [row for row in map(json.loads, lines) if row["type"] == "host_dispatch_group"]


def _rate(row: dict[str, Any]) -> str:
    """Billions of operations per second of a matrix product at its fastest call; "" for anything else."""
    found = re.search(r"matmul\w*?_(\d+(?:x\d+)+)_f32", row["key"])
    if found is None:
        return ""
    return f"{2 * math.prod(map(int, found[1].split('x'))) / row['min_ns']:.0f} GFLOP/s"


def main() -> None:
    """Parse the options, compile, profile, and print the dispatches that take longest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=N", help="size of the NanoChat model")
    parser.add_argument("--flag", action="append", default=[], help="more flags of iree-compile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--top", type=int, default=20, help="dispatches to list")
    given = parser.parse_args()
    options = SIZES | {name: int(value) for name, _, value in (text.partition("=") for text in given.set)}
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "step.vmfb"
        spec = _compile(options, given.flag, module)
        rows = _profile(module, spec, given.steps, given.threads, Path(folder) / "step.ireeprof")
    for row in sorted(rows, key=lambda row: -row["total_ns"])[: given.top]:
        each = row["count"] // given.steps
        print(
            f"{row['total_ns'] / 1e6 / given.steps:7.1f} ms {each:4} x {row['min_ns'] / 1e6:7.2f} ms  {row['key']} "
            f"{_rate(row)}".rstrip()
        )
    total = sum(row["total_ns"] for row in rows) / 1e6 / given.steps
    least = sum(row["min_ns"] * row["count"] for row in rows) / 1e6 / given.steps
    print(f"a step: {total:.1f} ms; {least:.1f} ms with every dispatch at its fastest")


if __name__ == "__main__":
    main()
