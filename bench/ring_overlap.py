"""The ring with and without overlap: held-out loss, and the share of time that workers wait between rounds.

    python bench/ring_overlap.py                                  # 36 rounds of 40 inner steps of the example
    python bench/ring_overlap.py --inner-steps 10 --repeats 1
    python bench/ring_overlap.py --outer 0.7,0.0 --outer 0.4,0.0   # other outer optimizers (rate,momentum)

Each run is `planetary train` with two workers on this machine, of one seed; runs of a setting alternate. A worker
waits while it has no lease under way: between the first `round_started` and the last `round_finished`, less the seconds
in inner steps. Held-out losses are those after the last round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.fabric.records import AnyRecord, DeltaAccepted, EvalFinished, RoundFinished, RoundStarted

ROOT = Path(__file__).parents[1]
WAYS = ("star", "none", "async")


class Found(msgspec.Struct):
    """What one run gave."""

    loss: float
    seconds: float  # from the first round's start to the last one's end
    waiting: float  # share of the workers' time


def run(way: str, arguments: list[str], cache: Path) -> Found:
    """Train once; `way` is the star, or the ring's `sync.overlap`."""
    ring = [] if way == "star" else ["--set=sync.topology=ring", f"--set=sync.overlap={way}"]
    with tempfile.TemporaryDirectory(prefix="planetary-bench-") as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "planetary.cli.main", "train", str(ROOT / "examples" / "stdlib.toml")]
        subprocess.run(
            [*command, f"--run-dir={folder}", f"--cache={cache}", *arguments, *ring],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        journal = list(read_json_lines(folder / "events.jsonl", AnyRecord))
    began = next(r.t for r in journal if isinstance(r, RoundStarted))
    ended = [r for r in journal if isinstance(r, RoundFinished)][-1]
    trained = [r for r in journal if isinstance(r, DeltaAccepted)]
    workers = len({r.worker for r in trained})
    busy = sum(r.seconds for r in trained)
    seconds = ended.t - began
    losses = {r.version: r.loss for r in journal if isinstance(r, EvalFinished)}
    return Found(losses[ended.round], seconds, 1 - busy / (workers * seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--inner-steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--outer", action="append", help="rate,momentum; may be repeated")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[1:])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "planetary-bench")
    args = parser.parse_args()
    print("| outer rate, momentum | way | held-out loss | seconds | waiting |")
    print("|---|---|---|---|---|")
    for outer in args.outer or ["1.0,0.0"]:
        rate, momentum = outer.split(",")
        settings = {
            "train.inner_steps": args.inner_steps,
            "optimizer.learning_rate": args.learning_rate,
            "eval.every": args.rounds,  # only after the last round
            "checkpoint.every": args.checkpoint_every,
            "outer.learning_rate": rate,
            "outer.momentum": momentum,
        }
        arguments = [f"--rounds={args.rounds}", *(f"--set={key}={value}" for key, value in settings.items())]
        found: dict[str, list[Found]] = {way: [] for way in args.ways}
        for _ in range(args.repeats):
            for way in args.ways:
                found[way].append(run(way, arguments, args.cache))
                print(outer, way, found[way][-1], file=sys.stderr, flush=True)
        for way, runs in found.items():
            assert len({one.loss for one in runs}) == 1, "the same run ended with another loss"
            seconds = statistics.median(one.seconds for one in runs)
            waiting = statistics.median(one.waiting for one in runs)
            print(f"| {outer} | {way} | {runs[0].loss:.4f} | {seconds:.1f} | {waiting:.1%} |", flush=True)


if __name__ == "__main__":
    main()
