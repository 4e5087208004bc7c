"""Time and memory of a training step of a large vocabulary, by what exists at once.

`tiles`: logits exist a tile at a time. `whole`: all at once. With `-one-hot` lookups in the table are products with
one-hot rows, as they are for small tables.

    python bench/cross_entropy.py [--tokens 256 2048 8192] [--words 50257] [--width 64] [--rounds 2]

A GPT-2 of one layer with texts of 256 tokens, float32, AdamW, compiled by IREE for this CPU. The kinds take turns, each
in a fresh process with one thread: processor time of a step, and the growth of resident memory beyond parameters and
moments.
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

KINDS = {"tiles": (1, 0), "whole": (1 << 60, 0), "tiles-one-hot": (1, 1 << 60), "whole-one-hot": (1 << 60, 1 << 60)}
"""From how many logits on they exist in tiles; up to how many rows of a table lookups are products."""
LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--words", type=int, default=50_257)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=sorted(KINDS), nargs="+", default=list(KINDS))
    parser.add_argument("--child", nargs=2, metavar=("VMFB", "SPEC"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        remat.STEPS = options.steps
        print(json.dumps(remat.measured_steps(*map(Path, options.child), threads=1)), flush=True)
        os._exit(0)  # without taking the runtime apart
    print("| tokens | logits | processor time of a step, ms | of whole | growth of memory, MiB | loss |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for tokens in options.tokens:
            _compare(options, tokens, Path(folder))


def _compare(options: argparse.Namespace, tokens: int, folder: Path) -> None:
    for kind in options.only:
        _compile(options, tokens, kind, folder / kind)
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
        loss = runs[0]["losses"][-1]
        print(f"| {tokens} | {kind} | {times[kind]:.0f} | {ratio} | {grown:.0f} | {loss:.6f} |", flush=True)


def _compile(options: argparse.Namespace, tokens: int, kind: str, path: Path) -> None:
    from planetary.compiler.autodiff import losses
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.rewrites import normalise
    from planetary.compiler.step.train_step import StepOptions, build_train_step
    from planetary.runtime.host import host_features

    losses.LARGE, normalise.ONE_HOT_ROWS = KINDS[kind]
    sizes = {"n_layer": 1, "n_embd": options.width, "n_head": 1, "vocab_size": options.words}
    batch = {"sequence_length": LENGTH, "batch_size": tokens // LENGTH}
    step = build_train_step(export_model("planetary.models.gpt2:build", sizes | batch), StepOptions())
    artifact = compile_artifact(step, Target("cpu", "host", host_features()))
    path.with_name(path.name + ".vmfb").write_bytes(artifact.data)
    path.with_name(path.name + ".json").write_bytes(msgspec.json.encode(step.spec))


if __name__ == "__main__":
    main()
