"""Compares kinds of one training step, compiled by IREE for this CPU: the frame of attention, cross_entropy, experts.

The kinds take turns, each in a fresh process with one thread: processor time of a step, and the growth of resident
memory beyond parameters and moments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import remat

if TYPE_CHECKING:
    from planetary.compiler.step.train_step import TrainStep


def parser_of(script: str | None, kinds: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the flags that the comparisons share; `script`: the script's docstring."""
    parser = argparse.ArgumentParser(description=(script or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=sorted(kinds), nargs="+", default=list(kinds))
    return parser


def compare(
    options: argparse.Namespace,
    sizes: Sequence[int],
    make: Callable[[str, int], TrainStep],
    *,
    size: str,
    kind: str,
    against: str,
    more: Mapping[str, Callable[[TrainStep], str]] | None = None,
) -> None:
    """Print a table.

    Args:
        options: of a parser from `parser_of`.
        sizes: a block of rows each.
        make: returns the step of a kind and a size.
        size, kind: heads of the first columns.
        against: the kind that the ratios refer to.
        more: further columns by head, from the step.
    """
    more = more or {}
    heads = [size, kind, *more, "processor time of a step, ms", f"of {against}", "growth of memory, MiB", "loss"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    with tempfile.TemporaryDirectory() as folder:
        for number in sizes:
            steps = {name: make(name, number) for name in options.only}
            runs = _runs(options, steps, Path(folder))
            times = {name: statistics.median(run["cpu"] for run in found) for name, found in runs.items()}
            for name, found in runs.items():
                ratio = f"{times[name] / times[against]:.2f}" if against in times else ""
                grown = statistics.median(run["grown"] for run in found)
                cells = [str(number), name, *(column(steps[name]) for column in more.values())]
                cells += [f"{times[name]:.0f}", ratio, f"{grown:.0f}", f"{found[0]['losses'][-1]:.6f}"]
                print("| " + " | ".join(cells) + " |", flush=True)


def _runs(options: argparse.Namespace, steps: Mapping[str, TrainStep], folder: Path) -> dict[str, list[dict]]:
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.runtime.host import host_features

    for name, step in steps.items():
        artifact = compile_artifact(step, Target("cpu", "host", host_features()))
        (folder / f"{name}.vmfb").write_bytes(artifact.data)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(step.spec))
    found: dict[str, list[dict]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, runs in found.items():
            command = [sys.executable, __file__, str(folder / name), str(options.steps)]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    return found


if __name__ == "__main__":  # the process of one kind
    place, remat.STEPS = sys.argv[1], int(sys.argv[2])
    print(json.dumps(remat.measured_steps(Path(f"{place}.vmfb"), Path(f"{place}.json"), threads=1)), flush=True)
    os._exit(0)  # without taking the runtime apart
