"""Seconds until a run trains: cold, begun again, lengthened and resumed; of this tree and of another one, by turns.

    python bench/start.py [--against CHECKOUT] [--turns 1] [--mixture]

Every case is a process of its own, as a user starts it; what counts is the time from its start to the end of the first
round that it trains. `--against`: a checkout of another version, measured in turn with this one, because times on
shared cores compare within one run only.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
SMALL = {
    "model.options.n_layer": 2,
    "model.options.n_embd": 64,
    "model.options.n_head": 4,
    "train.batch_size": 4,
    "train.sequence_length": 64,
    "train.inner_steps": 10,
    "train.rounds": 3,
    "optimizer.warmup_steps": 5,
    "eval.batches": 2,
}
MIXTURE = {
    "train.inner_steps": 5,
    "train.rounds": 3,
    "optimizer.warmup_steps": 2,
    "eval.batches": 2,
    "fabric.workers": 4,
}
CASES = ("cold start", "another run, twice as long", "--resume --rounds 9")


def seconds_to_round(tree: Path, arguments: list[str], first: int) -> float:
    """Return the seconds from the start of `planetary train` to the end of round `first`."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    command = [sys.executable, "-m", "planetary", "train", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        found, lines = None, []
        for line in process.stdout:
            lines.append(line)
            told = re.match(r"round (\d+)/", line)
            if found is None and told is not None and int(told[1]) >= first:
                found = time.monotonic() - began
    if process.returncode or found is None:
        raise SystemExit("".join(lines))
    return found


def measure(tree: Path, folder: Path, *, mixture: bool) -> list[float]:
    """Return the seconds of `CASES` in an empty folder."""
    config = str(tree / "examples" / ("parallax-tiny.toml" if mixture else "stdlib.toml"))
    sets = [f"--set={key}={value}" for key, value in (MIXTURE if mixture else SMALL).items()]
    cache = f"--cache={folder / 'cache'}"
    first, second = folder / "first", folder / "second"
    return [
        seconds_to_round(tree, [config, *sets, f"--run-dir={first}", cache], 1),
        seconds_to_round(tree, [config, *sets, "--rounds=6", f"--run-dir={second}", cache], 1),
        seconds_to_round(tree, ["--resume", str(first), "--rounds=9", cache], 4),
    ]


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--mixture", action="store_true", help="a mixture over four composers instead of rounds")
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    trees = {"now": HERE} | ({"before": args.against.resolve()} if args.against else {})
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    for _ in range(args.turns):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory(prefix="planetary-start-") as folder:
                found[name].append(measure(tree, Path(folder), mixture=args.mixture))
    print(f"| until the first round has ended | {' s | '.join(trees)} s | ratio |\n|---|{'---:|' * (len(trees) + 1)}")
    for row, case in enumerate(CASES):
        times = [statistics.median(turn[row] for turn in found[name]) for name in trees]
        print(f"| {case} | {' | '.join(f'{t:.1f}' for t in times)} | {times[0] / times[-1]:.2f} |")


if __name__ == "__main__":
    main()
