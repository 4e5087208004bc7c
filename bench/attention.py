"""Time and memory of a training step whose attention is made of tiles, and of one that holds every score.

    python bench/attention.py [--lengths 512 1024 2048 4096] [--layers 2] [--width 256] [--rounds 3] [--steps 6]

A GPT-2 with one text a batch, float32, AdamW, compiled by IREE for this CPU. The two take turns, each in a fresh
process with one thread: processor time of a step, and the growth of resident memory beyond parameters and moments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import remat

WHOLE = {"tiles": 0, "whole": 1 << 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=sorted(WHOLE), nargs="+", default=list(WHOLE))
    parser.add_argument("--child", nargs=2, metavar=("VMFB", "SPEC"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        remat.STEPS = options.steps
        print(json.dumps(remat.measured_steps(*map(Path, options.child), threads=1)), flush=True)
        os._exit(0)  # without taking the runtime apart
    print("| positions | attention | processor time of a step, ms | of whole scores | growth of memory, MiB | loss |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for length in options.lengths:
            _compare(options, length, Path(folder))


def _compare(options: argparse.Namespace, length: int, folder: Path) -> None:
    for kind in options.only:
        _compile(options, length, WHOLE[kind], folder / kind)
    found: dict[str, list[dict]] = {kind: [] for kind in options.only}
    for _ in range(options.rounds):
        for kind, runs in found.items():
            command = [sys.executable, __file__, "--steps", str(options.steps)]
            command += ["--child", f"{folder / kind}.vmfb", f"{folder / kind}.json"]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    times = {kind: statistics.median(run["cpu"] for run in runs) for kind, runs in found.items()}
    for kind, runs in found.items():
        ratio = f"{times[kind] / times['whole']:.2f}" if "whole" in times else ""
        grown = statistics.median(run["grown"] for run in runs)
        print(
            f"| {length} | {kind} | {times[kind]:.0f} | {ratio} | {grown:.0f} | {runs[0]['losses'][-1]:.6f} |",
            flush=True,
        )


def _compile(options: argparse.Namespace, length: int, whole: int, path: Path) -> None:
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.step.train_step import StepOptions, build_train_step
    from planetary.models import layers
    from planetary.runtime.host import host_features

    layers.WHOLE = whole
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads, "vocab_size": 256}
    model = export_model("planetary.models.gpt2:build", sizes | {"sequence_length": length, "batch_size": 1})
    step = build_train_step(model, StepOptions())
    artifact = compile_artifact(step, Target("cpu", "host", host_features()))
    path.with_name(path.name + ".vmfb").write_bytes(artifact.data)
    path.with_name(path.name + ".json").write_bytes(msgspec.json.encode(step.spec))


if __name__ == "__main__":
    main()
