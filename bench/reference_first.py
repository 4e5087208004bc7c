"""Does it pay to train the first rounds on XLA while IREE compiles the step? Seconds to each round from a cold cache.

    python bench/reference_first.py [--rounds 5] [--models small default]

Three runs per model, each a process with an empty cache, as a user starts it:

- *IREE*: workers wait for the gateway's compiled and verified step, as `planetary train` does.
- *XLA*: workers on `pjrt:cpu`, which import JAX and compile the step themselves; nothing else runs.
- *XLA beside IREE*: the same, while another process compiles and verifies the step for IREE from the moment at which
  the exported step is in the cache: what rounds on a reference backend would cost and bring, before any switch. The
  table says when IREE's step was there, after which the workers would have to load it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planetary.artifacts.store import BlobStore
from planetary.core.config import load_config
from planetary.data.fitting import fit_to_data
from planetary.data.prepare import prepare
from planetary.fleet.preparation.compiling import CompileTarget, compile_apart
from planetary.runs.rounds.preparation.preparation import prepare_run, step_options
from planetary.runs.rounds.preparation.prepared_steps import find_record
from planetary.runtime.host import host_features

CONFIG = Path(__file__).parents[1] / "examples" / "stdlib.toml"
SHORT = ("train.inner_steps=10", "optimizer.warmup_steps=5", "eval.every=100", "eval.batches=2")
MODELS = {
    "small": ("model.options.n_layer=2", "model.options.n_embd=64"),  # 131,072 parameters
    "default": (),  # 3,276,800
}


def compile_beside(sets: list[str], cache: Path, began: float, ready: multiprocessing.Queue[float]) -> None:
    """Wait for the exported step in the cache, compile it for IREE, and put the seconds since `began`."""
    config = load_config(CONFIG, sets)
    while not (cache / "data").is_dir() or not any((cache / "blobs").glob("*")):
        time.sleep(0.2)
    config = fit_to_data(config, prepare(config, cache / "data"))
    store = BlobStore(cache / "blobs")
    while find_record(store, config, step_options(config)) is None:
        time.sleep(0.2)
    prepared = prepare_run(config, cache, lambda text: None)
    asyncio.run(compile_apart(prepared, CompileTarget("cpu", "host", host_features()), cache))
    ready.put(time.time() - began)


def rounds_of(sets: list[str], cache: Path, folder: Path, began: float) -> list[float]:
    """Train, and return the seconds from `began` to the end of each round."""
    command = [sys.executable, "-m", "planetary", "train", str(CONFIG), f"--run-dir={folder}", f"--cache={cache}"]
    command += [f"--set={one}" for one in sets]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        ends: list[float] = []
        lines = []
        for line in process.stdout:
            lines.append(line)
            told = re.match(r"round (\d+)/", line)
            if told is not None and int(told[1]) > len(ends):
                ends += [time.time() - began] * (int(told[1]) - len(ends))
    if process.returncode:
        raise SystemExit("".join(lines))
    return ends


def measure(model: str, rounds: int) -> None:
    """Print the table's lines of one model."""
    sets = [*SHORT, *MODELS[model], f"train.rounds={rounds}", "train.target_minutes=0"]
    for name, backend, beside in (
        ("IREE", "cpu", False),
        ("XLA", "pjrt:cpu", False),
        ("XLA beside IREE", "pjrt:cpu", True),
    ):
        with tempfile.TemporaryDirectory(prefix="planetary-first-") as scratch:
            folder, began = Path(scratch), time.time()
            ready: multiprocessing.Queue[float] = multiprocessing.Queue()
            compiler = multiprocessing.Process(target=compile_beside, args=(sets, folder / "cache", began, ready))
            if beside:
                compiler.start()
            ends = rounds_of([*sets, f"fabric.backend={backend}"], folder / "cache", folder / "run", began)
            there = f"{ready.get(timeout=600):.1f}" if beside else "–"
            if beside:
                compiler.join()
        cells = " | ".join(f"{end:.1f}" for end in ends)
        print(f"| {model} | {name} | {cells} | {there} |", flush=True)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    heads = " | ".join(f"round {n}" for n in range(1, args.rounds + 1))
    print(f"| model | workers on | {heads} | IREE's step ready |\n|---|---|{'---:|' * (args.rounds + 1)}", flush=True)
    for model in args.models:
        measure(model, args.rounds)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
