"""Every preset of synchronisation over simulated links: held-out loss against simulated time, and against bytes.

    python bench/strategies.py              # all of the star, 4 workers, links like 50 Mbit/s for 30.8M parameters
    python bench/strategies.py --presets ddp,rda-sign --mbit 1000

Trains a small transformer for real with `planetary.simulate`: gateway, supervisors, workers and messages are those of
a run, time is simulated. The link is as much slower than `--mbit` as the model is smaller than 30.8M parameters, so
that a round's bytes take as long as there (`docs/synchronisation.md`); a step takes 0.13 s, a round of 30 steps 3.9 s.
All presets train as many steps with one learning rate. Writes the plot to docs/images, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib

import planetary
from planetary.core.configuration.presets import PRESETS
from planetary.core.errors import UserError

matplotlib.use("Agg")
from matplotlib import pyplot as plt

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "strategies.png"
STEP_S, RTT_S, PARAMS = 0.13, 0.08, 30.8e6
CONFIG: dict[str, Any] = {
    "run": {"name": "strategies"},
    "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 256}},
    "train": {"batch_size": 2, "sequence_length": 64},
    "optimizer": {"learning_rate": 0.006, "warmup_steps": 50},
}


def simulated(preset: str, workers: int, steps: int, link: planetary.SimulatedLink, cache: Path) -> planetary.Simulated:
    """Train with a preset, evaluating about twelve times."""
    inner = int(PRESETS[preset].settings["train.inner_steps"])
    rounds = round(steps / inner)
    each = {"eval.every": max(1, rounds // 12), "eval.batches": 4 * workers, "checkpoint.every": max(1, rounds // 4)}
    return planetary.simulate(
        CONFIG, workers=workers, rounds=rounds, preset=preset, overrides=each, links=link, step_s=STEP_S, cache=cache
    )


def plot(found: dict[str, planetary.Simulated], mbit: float) -> None:
    figure, (by_time, by_bytes) = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for number, (preset, run) in enumerate(found.items()):
        losses = [point.loss for point in run.curve]
        look = {"marker": ".", "linestyle": ("-", "--")[number // 10], "label": preset}  # there are ten colours
        by_time.plot([point.seconds for point in run.curve], losses, **look)
        by_bytes.plot([point.moved_bytes / 1e6 for point in run.curve], losses, **look)
    by_time.set(xscale="log", xlabel=f"simulated seconds, links like {mbit:g} Mbit/s", ylabel="held-out loss (nats)")
    by_bytes.set(xscale="log", xlabel="megabytes moved by all workers")
    by_bytes.legend(loc="upper right", ncols=2)
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A ring's pieces are not scaled with the link: one takes seconds there, and the worker behind it seems silent.
    parser.add_argument("--presets", default=",".join(name for name in PRESETS if name != "ring"))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--mbit", type=float, default=50.0, help="of every worker's link, for 30.8M parameters")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "planetary-bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curves here")
    given = parser.parse_args()
    size = sum(
        value.size for value in planetary.simulate(CONFIG, workers=1, rounds=1, cache=given.cache).params.values()
    )
    link = planetary.SimulatedLink(given.mbit * 1e6 / 8 * size / PARAMS, RTT_S)
    print(f"{size:,} parameters, {given.workers} workers, {given.steps} steps, {link.bandwidth / 1e3:.1f} kB/s")
    print("| preset | held-out loss | simulated seconds | of them computing | bytes, all workers |")
    print("|---|---:|---:|---:|---:|")
    found: dict[str, planetary.Simulated] = {}
    began = time.monotonic()
    for preset in given.presets.split(","):
        try:
            run = found[preset] = simulated(preset, given.workers, given.steps, link, given.cache)
        except UserError as error:  # this model has too few tensors for a preset with many fragments
            print(f"| `{preset}` | {error} | – | – | – |", flush=True)
            continue
        end = run.curve[-1]
        computing = given.steps * STEP_S / end.seconds
        print(
            f"| `{preset}` | {end.loss:.4f} | {end.seconds:.0f} | {computing:.0%} | {end.moved_bytes:,} |", flush=True
        )
        print(f"# {preset}: {run.outcome}, {time.monotonic() - began:.0f} s", flush=True)
        if given.json:
            given.json.write_text(json.dumps({name: run.curve for name, run in found.items()}))
    plot(found, given.mbit)


if __name__ == "__main__":
    main()
