"""What encoding and decoding an update costs: processor time for 100 million parameters, by codec.

    python bench/codec_speed.py [--against CHECKOUT] [--turns 3] [--without-numba]

A worker forms its delta, adds the error feedback, encodes and digests it (`CodedUpdates.give`), and checks, decodes and
adds the change that it gets (`take`), in its compute thread. The gateway decodes each worker's update (`read`) and
encodes the change for all (`advance`), in threads. Times are of one thread, the least of all calls, scaled from 16.8
million parameters in four matrices of 4096 x 1024. With `--against` this tree and another one are measured by turns.

The share of a worker's round is that of the encoding and decoding, `give` and `take`, in

- 12.7 s: `docs/synchronisation.md` pins 30.8 million parameters to 3.9 s a round of 30 steps (`bench/results/
  shaped_links.md`); 100 million parameters take as many times longer for equal tokens, on the same machine,
- 15.2 s: the same for 36 steps, which one bit a number needs for 1/100 of the bytes,
- 3.9 s: a round of 100 million parameters that is as short, on a machine three times as fast with this processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parents[1]
CODECS = ("float32", "bf16", "int8", "int4", "fp4", "sign", "sparse")
PARAMS, PIECES, SHAPE = 100e6, 4, (4096, 1024)
SIZE = PIECES * SHAPE[0] * SHAPE[1]
PINNED_S, PINNED_PARAMS, PINNED_STEPS = 3.9, 30.8e6, 30
ROUNDS = {
    f"{seconds:.1f} s": seconds
    for seconds in (
        PINNED_S * PARAMS / PINNED_PARAMS,
        PINNED_S * PARAMS / PINNED_PARAMS * 36 / PINNED_STEPS,
        PINNED_S,
    )
}


def fastest(work: Callable[[], object]) -> float:
    """Return the least processor time of three calls after one, for `PARAMS` parameters."""
    work()
    times: list[float] = []
    for _ in range(3):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times) * PARAMS / SIZE


def measure() -> dict[str, list[float]]:
    """Return the seconds of `give`, `take`, `read` and `advance` by codec, and of a copy, for the tree imported."""
    from planetary.core.tensors import TensorSpec
    from planetary.runs.rounds import messages as rm
    from planetary.runs.rounds.worker.exchange import CodedUpdates, Trained
    from planetary.sync.payload import PAYLOAD, PayloadForm, Shown, payload_digest

    specs = tuple(TensorSpec(f"w{number}", "f32", SHAPE) for number in range(PIECES))
    random = np.random.default_rng(0)
    start = {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in specs}
    ends = {
        name: values - np.float32(0.01) * random.standard_normal(SHAPE).astype(np.float32)
        for name, values in start.items()
    }
    found = {"copy": [fastest(lambda: {name: values.copy() for name, values in start.items()})]}
    trained = Trained(task=1, round=1, tokens=1, start=start, ends=ends)
    for codec in CODECS:
        worker, form = CodedUpdates(specs, rm.Compression(up=codec, down=codec)), PayloadForm(codec, specs)
        worker.take(rm.Parameters(version=0), start)
        outgoing = worker.give(trained)
        payload, digest = outgoing.tensors[PAYLOAD], outgoing.digest
        assert digest == payload_digest(payload)
        change, shown = rm.Parameters(version=1, since=0, digest=digest), Shown(codec, specs, start)
        found[codec] = [
            fastest(lambda worker=worker: worker.give(trained)),
            fastest(lambda worker=worker, change=change, payload=payload: worker.take(change, {PAYLOAD: payload})),
            fastest(lambda form=form, payload=payload, digest=digest: form.decode(payload, digest)),
            fastest(lambda shown=shown: shown.advance(ends)),
        ]
    return found


def measured(tree: Path, *, without_numba: bool) -> dict[str, list[float]]:
    """Return `measure` of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--measure", *(["--without-numba"] if without_numba else [])]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return json.loads(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--without-numba", action="store_true", help="the codecs in numpy")
    parser.add_argument("--measure", action="store_true", help="measure the tree of PYTHONPATH and print JSON")
    args = parser.parse_args()
    if args.measure:
        if args.without_numba:
            sys.modules["numba"] = None  # type: ignore[assignment]
        print(json.dumps(measure()))
        return
    trees = ({"before": args.against.resolve()} if args.against else {}) | {"now": HERE}
    turns: dict[str, list[dict[str, list[float]]]] = {name: [] for name in trees}
    for _ in range(args.turns):
        for name, tree in trees.items():
            turns[name].append(measured(tree, without_numba=args.without_numba))
    least = {
        tree: {row: [min(turn[row][i] for turn in found) for i in range(len(found[0][row]))] for row in found[0]}
        for tree, found in turns.items()
    }
    print(f"a copy of 100M float32: {min(rows['copy'][0] for rows in least.values()):.3f} s\n")
    shares = " | ".join(f"of {name}" for name in ROUNDS)
    print(f"| codec | tree | give | take | {shares} | read | advance | times as fast |")
    print(f"|---|---|{'---:|' * (5 + len(ROUNDS))}")
    for codec in CODECS:
        for tree, rows in least.items():
            give, take, read, advance = rows[codec]
            both = give + take
            of = " | ".join(f"{both / seconds:.1%}" for seconds in ROUNDS.values())
            faster = sum(least[next(iter(least))][codec]) / sum(rows[codec])
            numbers = f"{give:.2f} | {take:.2f} | {of} | {read:.2f} | {advance:.2f} | {faster:.1f}"
            print(f"| `{codec}` | {tree} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
